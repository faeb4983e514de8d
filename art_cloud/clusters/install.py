"""What another machine has to install to run the version of art-cloud that runs here."""

from __future__ import annotations

import filecmp
import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import distribution
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit
from uuid import uuid4

from ..shared.errors import ConfigError
from ..shared.version import __version__
from .registry import home

PACKAGE = Path(str(files("art_cloud")))
LAUNCH = next(
    folder for above in (PACKAGE, PACKAGE.parent) if (folder := above / "launch").is_dir()
)
"""The folder with what other machines run: inside this package in a wheel, beside it in a checkout.
"""

SOURCES = ("art_cloud", "server_image/art_server", "launch", "pyproject.toml")


@dataclass(frozen=True)
class Source:
    """A released version, or the wheel of a checkout."""

    key: str
    """A hash that is the same for the same content."""
    wheel: Path | None

    def environment(self, engine: str) -> str:
        """The name of an environment that has this version and its pinned dependencies."""
        return self.key + ("-vllm" if engine == "vllm" else "")

    def requirement(self, extras: str, wheel: str | None = None) -> str:
        """The requirement for pip, on a machine that has the wheel at the path `wheel`."""
        if self.wheel is None:
            return f"art-cloud[{extras}]=={__version__}"
        return f"art-cloud[{extras}] @ file://{wheel or self.wheel}"


def extras(engine: str) -> str:
    return "server,vllm" if engine == "vllm" else "server"


def lock(engine: str) -> Path:
    """The pinned versions that are installed with it (pip's constraints)."""
    name = "server-vllm.lock.txt" if engine == "vllm" else "server.lock.txt"
    return LAUNCH / name


def source() -> Source:
    """The version that runs here. From a checkout that is its wheel, built once for each state of
    the files.

    Raises:
        ConfigError: it can't be built, or the checkout has changed since it was installed.
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
    """The checkout that art-cloud was installed from (PEP 610), if it was installed from one.

    Raises:
        ConfigError: what runs here is a copy of it, and not what it has now.
    """
    origin = json.loads(distribution("art-cloud").read_text("direct_url.json") or "{}")
    if "dir_info" not in origin:
        return None
    folder = Path(unquote(urlsplit(origin["url"]).path))
    if not origin["dir_info"].get("editable", False) and not _is_copy_of(folder):
        raise ConfigError(
            f"What runs here is a copy of {folder}, which has changed or gone since, and other "
            f"machines are to install the same. Install it anew: pip install --editable {folder}"
        )
    return folder


def _is_copy_of(folder: Path) -> bool:
    sources = (path for path in PACKAGE.rglob("*.py") if LAUNCH not in path.parents)
    twins = ((path, folder / PACKAGE.name / path.relative_to(PACKAGE)) for path in sources)
    return all(twin.is_file() and filecmp.cmp(path, twin, shallow=False) for path, twin in twins)


def _digest(checkout: Path) -> str:
    digest = hashlib.sha256()
    for place in SOURCES:
        for path in sorted([checkout / place, *(checkout / place).rglob("*")]):
            if path.is_file() and path.suffix != ".pyc":
                digest.update(f"{path.relative_to(checkout)}\0".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def _build(checkout: Path, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f"{folder.name}.{uuid4().hex}.partial")
    command = [*_builder(), str(partial), str(checkout)]
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


def _builder() -> list[str]:
    """The command that builds a wheel. The folder that it goes to and the folder of its sources
    follow."""
    uv = shutil.which("uv", path=Path(sys.executable).parent) or shutil.which("uv")
    if uv is not None:
        return [uv, "build", "--quiet", "--wheel", "--out-dir"]
    if find_spec("pip") is None:
        raise ConfigError("A wheel of this checkout is built by uv or pip. Run: pip install uv")
    return [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]
