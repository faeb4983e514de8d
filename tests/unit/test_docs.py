"""The pages say what the code has: options, metrics, commands, flags, errors; and no dead link."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from art_server.__main__ import parse_arguments
from art_server.steps.runtime import Runtime, Settings
from pydantic import BaseModel

from art_cloud.cli.main import app
from art_cloud.shared.config import PRESETS, LoRAConfig, SFTConfig, TrainConfig
from art_cloud.shared.errors import BY_CODE
from art_cloud.shared.protocol import (
    JobInfo,
    JobKind,
    RegisterRequest,
    Sample,
    SFTExample,
    SFTRequest,
    TrainGroup,
)
from art_cloud.shared.wire import TrainBatch, encode_batch
from art_cloud.trackers.tracker import GROUPS

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
NARROW = [f"docs/{page}.md" for page in ("README", "agents", "benchmarks", "status")]
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def read(page: str) -> str:
    return (ROOT / page).read_text()


def section(page: str, heading: str) -> str:
    """The part of a page from a heading to the next of its kind or above."""
    text = read(page)
    level = len(heading) - len(heading.lstrip("#"))
    rest = rf"^{re.escape(heading)}$.*?(?=^#{{1,{level}}} |\Z)"
    found = re.search(rest, text, re.DOTALL | re.MULTILINE)
    assert found, f"{page} has no {heading!r}"
    return found[0]


def listed(text: str) -> set[str]:
    """What stands in backticks."""
    return set(re.findall(r"`([^`\n]+)`", FENCE.sub("", text)))


@pytest.mark.parametrize("config", [TrainConfig, LoRAConfig, SFTConfig])
def test_every_option_has_a_row(config: type[BaseModel]) -> None:
    rows = section("docs/training.md", f"### {config.__name__}")
    assert config.model_fields.keys() <= listed(rows)


def test_every_loss_has_a_row_with_its_numbers() -> None:
    table = section("docs/training.md", "## Choose a loss")
    for name, options in PRESETS.items():
        row = re.search(rf"^\| `{name}`.*$", table, re.MULTILINE)
        assert row, name
        cells = [cell.strip() for cell in row[0].split("|")][2:7]
        assert cells[:3] == [options.scale_rewards, options.normalization, options.ratio_level]
        numbers = [float("inf") if cell == "none" else float(cell) for cell in cells[3:]]
        assert numbers == [options.epsilon_low, options.epsilon_high]


async def test_every_metric_of_a_real_step_is_explained(tiny_model: Path, tmp_path: Path) -> None:
    runtime = Runtime(Settings(tmp_path / "state", str(tmp_path / "store")))

    async def make(number: int, kind: JobKind, body: bytes) -> set[str]:
        job = JobInfo(id=f"{number:032}", kind=kind, project="p", model="m", state="running")
        return set((await runtime.programs.run(job, body, lambda data: None)).metrics)

    def sample(completion: list[int]) -> Sample:
        logprobs = [-6.0] * len(completion)
        return Sample(
            prompt_ids=[1, 2], completion_ids=completion, logprobs=logprobs, policy="p/m@0"
        )

    request = RegisterRequest(base_model=str(tiny_model))
    batch = TrainBatch(
        groups=[TrainGroup(rewards=[0.0, 1.0], samples=[[0], [1]])],
        samples=[sample([3, 4]), sample([5])],
        config=TrainConfig(kl_coef=0.1),
    )
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    examples = SFTRequest(examples=[SFTExample(messages=messages)])
    try:
        await make(1, "register", request.model_dump_json().encode())
        trained = await make(2, "train", encode_batch(batch))
        tuned = await make(3, "sft", examples.model_dump_json().encode())
    finally:
        await runtime.close()
    assert trained | tuned <= listed(section("docs/training.md", "## Read the metrics"))


def test_every_metric_has_its_group() -> None:
    table = section("docs/observability.md", "## What the metrics are called")
    rows = dict(re.findall(r"^\| `(\w+)/`[^|]*\| (.*) \|$", table, re.MULTILINE))
    for name, group in GROUPS.items():
        assert name in listed(rows[group]), name
    metrics = section("docs/training.md", "## Read the metrics")
    explained = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", metrics, re.MULTILINE)
    assert listed(" ".join(explained)) <= GROUPS.keys()


def commands(group: typer.core.TyperGroup, before: str = "art-cloud") -> Iterator[str]:
    for name, command in group.commands.items():
        if isinstance(command, typer.core.TyperGroup):
            yield from commands(command, f"{before} {name}")
        else:
            yield f"{before} {name}"


def test_every_command_stands_in_a_page() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    pages = "\n".join(page.read_text() for page in PAGES)
    assert [name for name in commands(group) if name not in pages] == []


def test_every_flag_of_the_server_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--help"])
    flags = set(re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE))
    assert len(flags) > 5
    assert flags <= listed(section("docs/server.md", "## Flags"))


def test_every_error_has_a_row_with_its_status() -> None:
    table = section("docs/server.md", "## Errors")
    rows = re.findall(r"^\| (\d*) *\| `(\w+)` \| `(\w+)` \|", table, re.MULTILINE)
    assert {(code, name) for _, code, name in rows} == {
        (code, error.__name__) for code, error in BY_CODE.items()
    }
    for status, code, _ in rows:
        assert not status or int(status) == BY_CODE[code].status, code


def anchors(page: Path) -> set[str]:
    """The fragments that GitHub makes of a page's headings."""
    headings = HEADING.findall(FENCE.sub("", page.read_text()))
    return {
        re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_link_is_dead(page: Path) -> None:
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if target.startswith(("https://", "http://")):
            continue
        path, _, fragment = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        if fragment:
            assert fragment in anchors(there), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_that_a_page_names_is_there(page: Path) -> None:
    for path, name in re.findall(r"(tests/[\w/]+\.py)::(\w+)", page.read_text()):
        assert f"def {name}(" in read(path)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *NARROW])
def test_no_line_is_wider_than_a_window(page: str) -> None:
    assert [line for line in read(page).splitlines() if len(line) > 120] == []


def test_the_index_names_every_page() -> None:
    index = read("docs/README.md")
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert {page for page in pages if f"]({page})" not in index} == set()


def test_the_picture_of_the_rooms_is_the_contract() -> None:
    linter = tomllib.loads(read("pyproject.toml"))["tool"]["importlinter"]
    rooms = {
        one["containers"][0]: [set(layer.split(" | ")) for layer in one["layers"]]
        for one in linter["contracts"]
        if one["type"] == "layers"
    }
    [picture] = FENCE.findall(section("CONTRIBUTING.md", "## Find your way"))
    drawn: dict[str, list[set[str]]] = {}
    for line in filter(None, picture.splitlines()[1:-1]):
        names = line.split()
        if not line.startswith(" "):
            drawn[names[0]] = found = []
            del names[0]
        found.append(set(names))
    assert drawn == rooms


def test_where_to_change_names_files_that_are_there() -> None:
    page = (ROOT / "docs/develop/where-to-change.md").read_text()
    named = set(
        re.findall(r"`((?:art_cloud|server_image|tests|docs|launch|examples)/[^`]*)`", page)
    )
    assert len(named) > 20
    assert sorted(path for path in named if not (ROOT / path).exists()) == []
