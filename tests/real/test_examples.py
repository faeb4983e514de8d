"""The examples as a user runs them, in short."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PNG = b"\x89PNG\r\n\x1a\n"
EXPERIMENTS: list[str] = []
"""Those that draw a curve."""


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
def test_an_experiment_trains_and_draws(name: str, tmp_path: Path) -> None:
    lines = run(f"{name}/train.py", tmp_path, "--control", "--json", "--plot", "curve.png")
    result = json.loads(lines[-1])
    assert result["steps"] == 1
    [measure] = [key.removesuffix("_before") for key in result if key.endswith("_before")]
    assert {f"{measure}_after", f"{measure}_control", "seconds"} < result.keys()
    assert (tmp_path / "curve.png").read_bytes().startswith(PNG)


def test_resume(tmp_path: Path) -> None:
    lines = run("resume/resume.py", tmp_path, "--plot", "curve.png")
    assert "The machine is lost, and its disk with it." in lines
    assert "6 steps, each there once; both runs are equal to the bit." in lines
    assert (tmp_path / "curve.png").read_bytes().startswith(PNG)
