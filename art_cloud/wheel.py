"""What another machine has to install to run the version of art-cloud that runs here."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit
from uuid import uuid4

from ._version import __version__
from .errors import ConfigError
from .registry import home

LAUNCH = next(
    folder for above in Path(__file__).parents[:2] if (folder := above / "launch").is_dir()
)
"""What other machines run and pin: in a wheel inside of this package, in a checkout beside it."""

SOURCES = ("art_cloud", "server_image/art_server", "launch", "pyproject.toml")


@dataclass(frozen=True)
class Source:
    """A released version, or the wheel of a checkout."""

    key: str
    """The same for the same content."""
    wheel: Path | None

    def environment(self, engine: str) -> str:
        """The name of one that has it, with its lock."""
        return self.key + ("-vllm" if engine == "vllm" else "")

    def requirement(self, extras: str, wheel: str | None = None) -> str:
        """For pip, on a machine that has the wheel at the path `wheel`."""
        if self.wheel is None:
            return f"art-cloud[{extras}]=={__version__}"
        return f"art-cloud[{extras}] @ file://{wheel or self.wheel}"


def extras(engine: str) -> str:
    return "server,vllm" if engine == "vllm" else "server"


def lock(engine: str) -> Path:
    """The versions that are installed with it (pip's constraints)."""
    name = "server-vllm.lock.txt" if engine == "vllm" else "server.lock.txt"
    return LAUNCH / name


def source() -> Source:
    """Where this process runs from a checkout, its wheel, built once for each state of the files.

    Raises:
        ConfigError: it can't be built.
    """
    checkout = _checkout()
    if checkout is None:
        return Source(__version__, None)
    key = f"{__version__}-{_digest(checkout)}"
    folder = home() / "wheels" / key
    if not list(folder.glob("*.whl")):
        _build(checkout, folder)
    [wheel] = folder.glob("*.whl")
    return Source(key, wheel)


def _checkout() -> Path | None:
    """The folder that art-cloud is installed from as it is (PEP 610), if it is."""
    origin = json.loads(distribution("art-cloud").read_text("direct_url.json") or "{}")
    is_folder = origin.get("dir_info", {}).get("editable", False)
    return Path(unquote(urlsplit(origin["url"]).path)) if is_folder else None


def _digest(checkout: Path) -> str:
    digest = hashlib.sha256()
    for place in SOURCES:
        for path in sorted([checkout / place, *(checkout / place).rglob("*")]):
            if path.is_file() and path.suffix != ".pyc":
                digest.update(f"{path.relative_to(checkout)}\0".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def _build(checkout: Path, folder: Path) -> None:
    uv = shutil.which("uv", path=Path(sys.executable).parent) or shutil.which("uv")
    if uv is None:
        raise ConfigError("A wheel of this checkout is built by uv. Run: pip install uv")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f"{folder.name}.{uuid4().hex}.partial")
    command = [uv, "build", "--quiet", "--wheel", "--out-dir", str(partial), str(checkout)]
    try:
        built = subprocess.run(command, capture_output=True, text=True, check=False)
        if built.returncode:
            raise ConfigError(f"No wheel can be made of {checkout}: {built.stderr.strip()}")
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # another launch built it meanwhile
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
