"""The base model of demo and examples where none is named: made on the spot, no download."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from ..shared.errors import ConfigError
from ..shared.progress import say


def make_tiny_model(folder: Path) -> Path:
    """Write a model of 1.7 M parameters that knows nothing to `folder`, unless it is there.

    Raises:
        ConfigError: the server's packages are not installed here.
    """
    missing = [name for name in ("art_server", "torch", "matplotlib") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"This trains and plots on this machine, and {', '.join(missing)} is not installed "
            "here: pip install 'art-cloud[demo]'."
        )
    # a model this small is faster on one thread, and the server inherits it
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not (folder / "config.json").exists():
        say("Making a small language model of 1.7 M parameters ...")
        command = [sys.executable, "-m", "art_server.tiny_model", str(folder)]
        subprocess.run(command, check=True, capture_output=True)
    return folder
