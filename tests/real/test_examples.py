"""The examples as a user runs them, in short."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ..rigs.openai_server import KEY, Shown, either, generate, judge_by, openai_server

EXAMPLES = Path(__file__).parents[2] / "examples"
PNG = b"\x89PNG\r\n\x1a\n"
EXPERIMENTS = [
    "temporal_clue",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            "codenames",
            "email_agent",
            "game_2048",
            "langgraph_agent",
            "openenv",
            "tic_tac_toe",
        )
    ),
]
"""Those that draw a curve."""


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Path:
    """One in which examples are run; their model is there."""
    (tmp_path / "home" / "examples").mkdir(parents=True)
    (tmp_path / "home" / "examples" / "model").symlink_to(tiny_model)
    return tmp_path


def run(
    script: str, folder: Path, *options: str, environment: dict[str, str] | None = None
) -> Sequence[str]:
    """Run a script of the examples; the lines that it prints."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / script, "--smoke", *options],
        cwd=folder,
        env=os.environ
        | {"ART_PROGRESS": "0", "ART_CLOUD_HOME": str(folder / "home")}
        | (environment or {}),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    print(done.stdout)
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_trains_and_draws(name: str, folder: Path) -> None:
    lines = run(f"{name}/train.py", folder, "--control", "--json", "--plot", "curve.png")
    result = json.loads(lines[-1])
    assert result["steps"] == 1
    [measure] = [key.removesuffix("_before") for key in result if key.endswith("_before")]
    assert {f"{measure}_after", f"{measure}_control", "seconds"} < result.keys()
    assert (folder / "curve.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-o", "nonsense"], "'nonsense' is not KEY=VALUE"),
        (
            ["--provider", "nowhere"],
            "There is no provider 'nowhere'",
        ),
    ],
)
def test_what_cannot_be_meant_is_told_without_a_traceback(
    options: list[str], message: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        run("codenames/train.py", folder, "--base-model", "any", *options)
    said = capfd.readouterr().err
    assert message in said
    assert "Traceback" not in said


def judged(shown: Shown) -> float:
    return len(json.dumps(shown.conversations)) % 100 / 100


@pytest.mark.slow
def test_the_email_agent_by_a_judge(folder: Path) -> None:
    with openai_server(judge_by(judged)) as asked:
        environment = {"OPENAI_BASE_URL": asked.url, "OPENAI_API_KEY": KEY}
        options = ["--judge", "a-judge", "--json"]
        lines = run("email_agent/train.py", folder, *options, environment=environment)
    assert json.loads(lines[-1])["steps"] == 1
    assert len(asked.bodies) == 1
    for body in asked.bodies:
        assert "Find mails by words." in body["messages"][1]["content"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["auto_rl", "mcp_rl"])
def test_a_judge_is_all_that_it_takes(name: str, folder: Path) -> None:
    words = ["Where is the tea?", "How much room is left for rice in the south?"]
    with openai_server(either(generate(words.__getitem__), judge_by(judged))) as asked:
        environment = {"OPENAI_BASE_URL": asked.url, "OPENAI_API_KEY": KEY}
        options = ["--judge", "a-judge", "--json"]
        lines = run(f"{name}/train.py", folder, *options, environment=environment)
    result = json.loads(lines[-1])
    assert (result["step"], result["tasks"]) == (1, 1)
    assert result["wins"] + result["losses"] + result["ties"] == 1
    tools = {"auto_rl": "How many boxes of an item are in a hall.", "mcp_rl": "todo://list"}
    assert tools[name] in asked.bodies[0]["messages"][1]["content"]


@pytest.mark.slow
def test_resume(tmp_path: Path) -> None:
    lines = run("resume/resume.py", tmp_path, "--plot", "curve.png")
    assert "The machine is lost, and its disk with it." in lines
    assert "6 steps, each there once; both runs are equal to the bit." in lines
    assert (tmp_path / "curve.png").read_bytes().startswith(PNG)
