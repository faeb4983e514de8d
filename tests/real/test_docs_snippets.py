"""What README and docs tell the reader to type is typed here, in order, page by page."""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import re
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import typer
from art_server.__main__ import parse_arguments
from modal.cli.entry_point import entrypoint_cli

import art_cloud as art
from art_cloud.cli.main import app
from art_cloud.clusters.command_line import provider_options
from art_cloud.clusters.providers import get_provider
from art_cloud.clusters.providers.modal.options import PRICES

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```", re.DOTALL | re.MULTILINE)
ELSEWHERE = ("# OpenPipe ART", "vllm serve", "art-server --model", 'art.up("ssh", host="gpu-box"')
"""Of what is not installed here, or started below already."""
HUB_MODELS = re.compile(r"Qwen/Qwen[\w.-]+")
START_SECONDS = 120.0
AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


@dataclass(frozen=True)
class Server:
    url: str
    token: str
    folder: Path


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An art-server started by hand, with a home, a store and a working folder of its own."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield from start(tiny_model, tmp_path_factory.mktemp("docs"), monkeypatch)


def start(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    token = secrets.token_hex(16)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ART_CLOUD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ART_CLOUD_TOKEN", token)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    endpoint = tmp_path / "state" / "endpoint.json"
    command = [sys.executable, "-m", "art_server", "--model", str(tiny_model)]
    with (tmp_path / "server.log").open("w") as log:
        process = subprocess.Popen([*command, "--state", "state"], stderr=log)
    try:
        give_up = time.monotonic() + START_SECONDS
        while not endpoint.exists():
            assert process.poll() is None, (tmp_path / "server.log").read_text()
            assert time.monotonic() < give_up, "the server did not listen"
            time.sleep(0.1)
        url = ast.literal_eval(endpoint.read_text())["url"]
        yield Server(url, token, tmp_path)
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(autouse=True)
def a_folder_for_each_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pages write to a folder of one name."""
    monkeypatch.chdir(tmp_path)


def blocks(page: str, server: Server, tiny_model: Path) -> Iterator[tuple[str, str]]:
    """The snippets of a page as language and code, for this server and the tiny model."""
    for language, code in BLOCK.findall((ROOT / page).read_text()):
        if not any(mark in code for mark in ELSEWHERE):
            mine = HUB_MODELS.sub(str(tiny_model), code)
            yield language, mine.replace("http://127.0.0.1:8321", server.url)


async def run(language: str, code: str, names: dict[str, Any]) -> None:
    if language == "sh":
        # -f: a status of 400 or above fails the line
        shell = await asyncio.create_subprocess_exec(
            "bash", "-euo", "pipefail", "-c", code.replace("curl -s", "curl -fsS")
        )
        assert await shell.wait() == 0, code
        return
    compiled = compile(code, code, "exec", flags=AWAIT)
    scope = names
    if code.startswith("async with"):  # a connection of its own, which the block closes
        scope = names | {"model": names["model"].model_copy()}
    pending = eval(compiled, scope)
    if inspect.iscoroutine(pending):
        await pending


async def rollout(model: art.TrainableModel[Any], country: str, number: int) -> art.Trajectory:
    messages: art.Messages = [{"role": "user", "content": f"The capital of {country}?"}]
    answer = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_tokens=4
    )
    return art.Trajectory(
        messages_and_choices=[*messages, answer.choices[0]],
        reward=float(number),
        metadata={"hard": number > 1},
    )


async def some_groups(model: art.TrainableModel[Any]) -> list[art.TrajectoryGroup]:
    return await art.gather_trajectory_groups(
        art.TrajectoryGroup(rollout(model, country, n) for n in range(3))
        for country in ("Peru", "Kenya")
    )


@pytest.mark.parametrize(
    "page",
    [
        "docs/agents.md",
        "docs/training.md",
        "docs/server.md",
        "docs/checkpoints.md",
        "docs/durability.md",
        "docs/deploy.md",
        "docs/recording.md",
        "docs/pipeline.md",
        "docs/money.md",
        "docs/observability.md",
    ],
)
async def test_every_snippet_of_a_page_runs(page: str, server: Server, tiny_model: Path) -> None:
    project = Path(page).stem  # one server for all pages: a project for each
    model = art.TrainableModel(name="agent-001", project=project, base_model=str(tiny_model))
    async with art.connect(server.url, server.token) as backend:
        await model.register(backend)
        groups = await some_groups(model)
        if page in ("docs/checkpoints.md", "docs/deploy.md"):
            for _ in range(3):
                await backend.train(model, groups)
            await model.log(metrics={"reward": 0.5})
        names: dict[str, Any] = {
            "art": art,
            "asyncio": asyncio,
            "backend": backend,
            "groups": groups,
            "model": model,
            "openai": openai,
            "os": os,
            "store": server.folder / "home" / "store",
        }
        found = list(blocks(page, server, tiny_model))
        assert len(found) > 3
        for language, code in found:
            mine = code.replace("capitals", project).replace("~/runs", str(server.folder / "runs"))
            await run(language, mine, names)


async def test_the_ported_script_trains(server: Server, tiny_model: Path) -> None:
    names: dict[str, Any] = {}
    for language, code in blocks("docs/porting.md", server, tiny_model):
        mine = code.replace('art.up("local")', f"art.connect({server.url!r}, {server.token!r})")
        await run(language, mine, names)
    await names["main"]()
    model = art.TrainableModel(name="agent-001", project="numbers", base_model=str(tiny_model))
    async with art.connect(server.url, server.token) as backend:
        await model.register(backend)
        assert await model.get_step() == 2


async def test_the_readme_script_trains(server: Server, tiny_model: Path, tmp_path: Path) -> None:
    scripts = [
        code
        for language, code in blocks("README.md", server, tiny_model)
        if language == "python" and "asyncio.run(main())" in code
    ]
    assert len(scripts) == 1
    script = scripts[0].replace(", 20)", ", 2)")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    assert [line.split()[0] for line in output.decode().splitlines()] == ["1", "2"]
    [look] = [
        code
        for language, code in blocks("README.md", server, tiny_model)
        if language == "sh" and "art-cloud checkpoints" in code
    ]
    await run("sh", look, {})  # of the store of the script, whose server has ended
    assert (tmp_path / "best" / "adapter_model.safetensors").is_file()
    assert list((tmp_path / "rollouts").rglob("*.parquet"))


MODAL_PAGES = ("docs/modal.md", "launch/modal/README.md")


async def test_what_the_modal_pages_ask_for_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has an account here: what each line asks for is checked by what would take it."""
    monkeypatch.setenv("MODAL_PROXY_TOKEN_ID", "wk-1")
    monkeypatch.setenv("MODAL_PROXY_TOKEN_SECRET", "ws-1")
    page = (ROOT / "docs/modal.md").read_text()
    calls = [
        ast.unparse(node)
        for language, code in BLOCK.findall(page)
        if language == "python"
        for node in ast.walk(compile(code, code, "exec", ast.PyCF_ONLY_AST | AWAIT))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "art.up"
    ]
    assert len(calls) >= 3
    specs = [eval(call, {"art": art})._spec for call in calls]
    lines = re.findall(r"^art-cloud .*|`art-cloud [^`]*", page, re.MULTILINE)
    for context in [parsed(typer.main.get_command(app), line) for line in lines]:
        if context.info_name == "up":
            given = context.params
            options = provider_options(given["options"]) | {"serverless": given["serverless"]}
            kept = {key: given[key] for key in ("store", "idle", "budget")}
            specs.append(art.up(given["provider"], **kept, **options)._spec)
    assert len(specs) >= len(calls) + 2
    for spec in specs:
        [offer] = await get_provider(spec.provider).offers(spec)
        assert offer.price_per_hour >= PRICES["H100"]
        chosen = spec.model_copy(update={"offer": offer})
        assert parse_arguments(chosen.server_arguments("one")).store == spec.store

    text = "\n".join((ROOT / one).read_text() for one in MODAL_PAGES)
    commands = re.findall(r"(?:^|`|&& )modal ((?:[a-z-]+ ?)+)", text, re.MULTILINE)
    assert len(commands) > 6
    for command in commands:
        assert parsed(entrypoint_cli, f"modal {command}", resilient=True).info_name


def parsed(command: Any, line: str, *, resilient: bool = False) -> Any:
    """The context of the command that `line` calls; an error if there is no such thing."""
    name, *words = shlex.split(line.strip("`"), comments=True)
    while hasattr(command, "resolve_command"):
        context = command.context_class(command, info_name=name)
        name, command, words = command.resolve_command(context, words)
    return command.make_context(name, words, resilient_parsing=resilient)
