"""The client where there is neither `fcntl` nor `termios`, as on Windows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
OF_LOCKS = ("test_cluster.py", "test_registry.py", "test_store.py")
OF_SERVERS = re.compile("import fcntl|art_server|import torch|import numpy|openenv")

EVERY_MODULE = """
import importlib, pkgutil, sys
import art_cloud
for module in pkgutil.walk_packages(art_cloud.__path__, "art_cloud."):
    importlib.import_module(module.name)
assert sys.modules["fcntl"] is sys.modules["termios"] is None
"""


def without_them(folder: Path, *arguments: str) -> None:
    """Run Python with these arguments; it and whatever Python it starts can't import the two."""
    site = folder / "site"
    site.mkdir()
    blocked = "import sys; sys.modules.update(fcntl=None, termios=None)"
    (site / "sitecustomize.py").write_text(blocked)
    # filelock warns where it expects `fcntl` to be and locks by the existence of a file
    environment = os.environ | {"PYTHONPATH": str(site), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def run_tests(folder: Path, *files: str) -> None:
    only = ("-m", "pytest", "-n", "0", "-m", "not slow", f"--basetemp={folder / 'tmp'}")
    without_them(folder, *only, *(str(TESTS / file) for file in files))


def test_every_module_can_be_imported(tmp_path: Path) -> None:
    without_them(tmp_path, "-c", EVERY_MODULE)


def test_what_is_locked_and_stored_is_so_there_too(tmp_path: Path) -> None:
    run_tests(tmp_path, *OF_LOCKS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_else_the_client_does_it_does_there_too(tmp_path: Path) -> None:
    of_client = {
        path.name for path in TESTS.glob("test_*.py") if not OF_SERVERS.search(path.read_text())
    }
    run_tests(tmp_path, *sorted(of_client - {*OF_LOCKS, Path(__file__).name}))
