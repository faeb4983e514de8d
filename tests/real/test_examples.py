"""The examples as a user runs them, in short."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_resume(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "resume" / "resume.py", "--smoke", "--plot", "curve.png"],
        cwd=tmp_path,
        env=os.environ | {"ART_PROGRESS": "0"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    print(done.stdout)
    assert "The machine is lost, and its disk with it." in done.stdout
    assert "6 steps, each there once; both runs are equal to the bit." in done.stdout
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
