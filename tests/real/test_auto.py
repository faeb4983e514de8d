"""`art-cloud auto`, from a sentence to a table: a server of its own, a scripted judge."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import art_cloud as art
from art_cloud.cli.main import app

from ..rigs.openai_server import KEY, Shown, either, generate, judge_by, openai_server

TOOLS = '''
def population(city: str) -> str:
    """The population of a city."""
    return "10 million"
'''


def judged(shown: Shown) -> float:
    return len(json.dumps(shown.conversations)) % 100 / 100


def test_from_a_sentence_to_a_comparison(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ART_CLOUD_HOME", str(tmp_path / "home"))
    Path("tools.py").write_text(TOOLS)
    words = ["Where is Lima?", "How many people live in Riga?", "Compare Oslo with Nairobi!"]
    with openai_server(either(generate(words.__getitem__), judge_by(judged))) as asked:
        monkeypatch.setenv("OPENAI_BASE_URL", asked.url)
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        command = ["auto", "Answers questions about cities", "--base-model", str(tiny_model)]
        options = ["--judge", "a-judge", "--tools", "tools.py", "--count", "3", "--steps", "1"]
        result = CliRunner().invoke(app, [*command, *options, "--max-tokens", "12", "--json"])
        assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["model"], report["step"]) == ("auto/answers-questions-about-cities", 1)
    assert report["tasks"] == report["wins"] + report["losses"] + report["ties"] == 1
    assert report["difference"] == pytest.approx(report["trained"] - report["base"])
    written = art.load_scenarios(Path("answers-questions-about-cities.jsonl"))
    assert [one.task for one in written] == words
    assert sum(one.split == "test" for one in written) == 1
    assert "The population of a city." in asked.bodies[0]["messages"][1]["content"]
    judgements = [body["messages"][0]["content"] for body in asked.bodies[1:]]
    assert len(judgements) == 5  # four groups of the step, and the held-out one
    assert not any(name in text for name in ("base model", "trained") for text in judgements)
    assert KEY not in result.output
