from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest
from typer.testing import CliRunner, Result

from art_cloud import __version__
from art_cloud.cli.main import app
from art_cloud.clusters.registry import Registry, home
from art_cloud.clusters.spec import ClusterSpec
from art_cloud.shared.config import LoRAConfig
from art_cloud.shared.names import ModelName
from art_cloud.store.checkpoints import Checkpoints, Manifest
from art_cloud.store.opening import open_store

MODEL = ModelName("games", "agent")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ART_CLOUD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "160")


def run(*arguments: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(app, arguments, input=answer)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", "from art_cloud.cli.main import main; main()", *arguments]
    return subprocess.run(program, capture_output=True, text=True, check=False)


def make_steps(url: str, count: int) -> Checkpoints:
    steps = Checkpoints(open_store(url, create=True), MODEL)
    for step in range(count):
        folder = home() / f"step-{step}" / "adapter"
        folder.mkdir(parents=True)
        (folder / "adapter_model.safetensors").write_bytes(bytes([step]) * 1000)
        draft = Manifest(
            project=MODEL.project,
            model=MODEL.model,
            step=step,
            kind="train" if step else "init",
            call_id=uuid4().hex,
            parent=None,
            base_model="tiny",
            lora=LoRAConfig(),
            metrics={"reward": step / 4, "loss": 0.5},
            versions={},
        )
        steps.commit(draft, folder.parent)
    return steps


def test_help_is_light_and_names_every_command() -> None:
    program = (
        "import sys\nfrom art_cloud.cli.main import app\n"
        "try: app(['--help'])\n"
        "finally: print('heavy', {'torch', 'pydantic', 'openai', 'httpx', 'rich', 'asyncio'}"
        " & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "heavy set()" in done.stdout
    for name in ("up", "status", "logs", "down", "demo", "checkpoints"):
        assert f"\n  {name} " in done.stdout


def test_version() -> None:
    assert run("--version").stdout == f"{__version__}\n"


def test_the_shell_completes_commands() -> None:
    completed = subprocess.run(
        [Path(sys.executable).with_name("art-cloud")],
        env=os.environ
        | {
            "_ART_CLOUD_COMPLETE": "complete_bash",
            "COMP_WORDS": "art-cloud st",
            "COMP_CWORD": "1",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert completed.stdout.split() == ["status"]


def test_nothing_runs_and_nothing_to_end() -> None:
    assert "No clusters. Start one: art-cloud up" in run("status").stdout
    assert json.loads(run("status", "--json").stdout) == []
    assert "Nothing to end" in run("down", "--all").stdout
    assert json.loads(run("down", "--all", "--json").stdout) == {"ended": [], "receipts": []}


@pytest.mark.parametrize(
    "arguments",
    [
        ("status", "nope"),
        ("logs", "nope"),
        ("down", "nope"),
        ("checkpoints", "ls", "a/b", "--name", "nope"),
    ],
)
def test_an_unknown_cluster_is_a_message_without_a_traceback(arguments: tuple[str, ...]) -> None:
    Registry().claim("there", ClusterSpec(provider="local", store="file:///s"))
    done = command(*arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "Error: There is no cluster 'nope'. Known are: there.\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("up", "--idle", "soon"), "'soon' is not a duration"),
        (("up", "moon", "--store", "s3://b"), "There is no provider 'moon'"),
        (("up", "moon"), "There is no provider 'moon'"),
        (("up", "--store", "s3:/b"), "neither a URL nor a folder"),
        (("up", "--model", "./nothere"), "no folder './nothere' on this machine"),
        (("up", "--budget", "5"), "-o price_per_hour="),
        (("up", "--name", "a/b"), "'a/b' is not a valid name"),
        (("checkpoints", "ls", "games"), "Write it as project/model"),
        (("checkpoints", "ls", "a/b", "--store", "ftp://x"), "no store of kind 'ftp'"),
        (("checkpoints", "ls", "a/b", "--store", "/not/there"), "/not/there"),
        (("checkpoints", "ls", "a/b", "--store", "x", "--name", "y"), "not both"),
    ],
)
def test_what_cannot_be_meant_is_told(arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 1
    assert done.stdout == ""
    assert message in done.stderr
    assert Registry().list() == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("down",),
        ("down", "a", "--all"),
        ("upp",),
        ("logs",),
        ("up", "--engine", "vlm"),
    ],
)
def test_wrong_usage_exits_2(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert "Usage: " in done.stderr


LONG = "art-somebody-with-a-long-name-on-a-machine-of-a-provider-skypilot"


def test_names_are_never_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a narrow terminal a row takes lines of its own; in a pipe it is one, however long."""
    for name in (LONG[:64], "b"):
        Registry().claim(name, ClusterSpec(provider="local", store="file:///s"))
    store = (tmp_path / "store").as_uri()
    make_steps(store, 1)
    monkeypatch.setenv("COLUMNS", "80")
    narrow = run("status").stdout
    assert LONG[:64] in narrow.splitlines()
    assert "state stopped" in narrow
    monkeypatch.delenv("COLUMNS")
    lines = run("status").stdout.splitlines()
    [row] = [line for line in lines if LONG[:64] in line]
    assert "stopped" in row
    assert "its launch broke off" in row
    run("down", "--all", "--yes")
    assert LONG[:64] in run("receipts").stdout


def test_down_all_asks_first() -> None:
    Registry().claim("a", ClusterSpec(provider="local", store="file:///s"))
    Registry().claim("b", ClusterSpec(provider="local", store="file:///s"))
    refused = run("down", "--all", answer="n\n")
    assert refused.exit_code == 1
    assert "End a, b?" in refused.stderr
    assert len(Registry().list()) == 2
    ended = run("down", "--all", "--yes", "--json")
    told = json.loads(ended.stdout)
    assert told["ended"] == ["a", "b"]
    assert [receipt["name"] for receipt in told["receipts"]] == ["a", "b"]
    assert Registry().list() == []


def test_checkpoints_of_a_store_need_no_server(tmp_path: Path) -> None:
    store = (tmp_path / "store").as_uri()
    make_steps(store, 3)
    listed = json.loads(run("checkpoints", "ls", "games/agent", "--store", store, "--json").stdout)
    assert [(info["step"], info["kind"], info["bytes"]) for info in listed] == [
        (0, "init", 1000),
        (1, "train", 1000),
        (2, "train", 1000),
    ]
    table = run("checkpoints", "ls", "games/agent", "--store", store).stdout
    assert "reward" in table
    assert "0.25" in table

    forked = run(
        "checkpoints", "fork", "games/agent", "games/copy", "--step", "1", "--store", store
    )
    assert forked.stdout == "games/copy begins at step 1 of games/agent.\n"
    assert Checkpoints(open_store(store), ModelName("games", "copy")).steps() == [1]
    again = run("checkpoints", "fork", "games/agent", "games/copy", "--store", store)
    assert again.exit_code == 1
    assert "exists already" in again.stderr


def test_removing_checkpoints_asks_first_and_keeps_the_newest(tmp_path: Path) -> None:
    store = (tmp_path / "store").as_uri()
    steps = make_steps(store, 3)
    assert (
        run("checkpoints", "rm", "games/agent", "0", "--store", store, answer="n\n").exit_code == 1
    )
    assert steps.steps() == [0, 1, 2]
    removed = run("checkpoints", "rm", "games/agent", "0", "1", "--store", store, "--yes")
    assert removed.stdout == "Removed step 0, 1 of games/agent.\n"
    assert steps.steps() == [2]
    newest = run("checkpoints", "rm", "games/agent", "2", "--store", store, "--yes")
    assert newest.exit_code == 1
    assert "is the newest" in newest.stderr
    missing = run("checkpoints", "rm", "games/agent", "7", "--store", store, "--yes")
    assert missing.exit_code == 1
    assert "has no step 7" in missing.stderr


def test_the_default_store_is_that_of_local_clusters() -> None:
    make_steps((home() / "store").as_uri(), 1)
    assert len(json.loads(run("checkpoints", "ls", "games/agent", "--json").stdout)) == 1
    assert "has no steps" in run("checkpoints", "ls", "games/other").stdout
