"""The snippets of the pages that need a judge, against a scripted one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer

import art_cloud as art
from art_cloud.cli.main import app

from ..rigs import mcp_notes
from ..rigs.openai_server import KEY, Shown, either, generate, judge_by, openai_server
from ..unit.stand_in import serve
from .test_docs_snippets import BLOCK, ROOT, run

COMMAND = '["python", "notes_server.py"]'
WORDS = ["fox", "dog", "cat", "hen", "cow", "pig", "owl", "bee", "ant", "emu"]


def judged(shown: Shown) -> float:
    return len(json.dumps(shown.conversations)) % 100 / 100


@pytest.mark.parametrize("page", ["docs/rewards.md", "docs/auto.md", "docs/mcp.md"])
async def test_every_snippet_of_a_page_runs(
    page: str,
    backend: art.Backend,
    model: art.TrainableModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names: dict[str, Any] = {"art": art, "backend": backend, "model": model, "Path": Path}
    blocks = BLOCK.findall((ROOT / page).read_text())
    found = [code for language, code in blocks if language == "python"]
    assert len(found) >= 3
    monkeypatch.chdir(tmp_path)
    scripted = either(generate(lambda n: f"{WORDS[n]} " * 4), judge_by(judged))
    app = mcp_notes.make_server().streamable_http_app()
    with serve(app, lifespan="on") as notes, openai_server(scripted) as asked:
        monkeypatch.setenv("OPENAI_BASE_URL", asked.url)
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        for code in found:
            mine = code.replace("http://127.0.0.1:8000/v1", asked.url).replace('"none"', repr(KEY))
            await run("python", mine.replace(COMMAND, repr(f"{notes}/mcp")), names)


def test_the_options_of_auto_have_rows() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    known = {flag for parameter in group.commands["auto"].params for flag in parameter.opts}
    text = (ROOT / "docs/auto.md").read_text()
    assert set(re.findall(r"--[a-z][a-z-]+", text)) == known - {"--help", "description"}
