"""Calls to SkyPilot, by `launch/skypilot/bridge.py` in a Python that has SkyPilot.

SkyPilot pins versions that ours do not agree with, so it may have an environment of its own; where
its API server runs is its own business (`sky api login`, SKYPILOT_API_SERVER_ENDPOINT).
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from ....shared.errors import (
    ArtCloudError,
    ConfigError,
    ConflictError,
    LaunchError,
    NoMachineError,
    NotFoundError,
    ProviderError,
)
from ...install import LAUNCH

PYTHON = "ART_SKYPILOT_PYTHON"
LINE_BYTES = 2**24
"""No answer is longer than this."""

Answers = AsyncGenerator[dict[str, Any], None]

MEANING: dict[str, tuple[type[ArtCloudError], str]] = {
    "NoCloudAccessError": (
        ConfigError,
        "SkyPilot has no cloud that it may use. Set one up as it says, then try again: sky check",
    ),
    "ResourcesUnavailableError": (NoMachineError, "SkyPilot found no machine for this"),
    "ResourcesMismatchError": (ConflictError, "There is a machine of that name, but another one"),
    "ClusterOwnerIdentityMismatchError": (ConflictError, "It belongs to another account"),
    "ClusterDoesNotExist": (NotFoundError, "SkyPilot has no such cluster"),
    "ClusterNotUpError": (LaunchError, "The machine is not up"),
    "RuntimeError": (LaunchError, "SkyPilot did not bring the machine up"),
    "RequestCancelled": (LaunchError, "It was cancelled: art-cloud down, or sky api cancel"),
    "ApiServerConnectionError": (
        ProviderError,
        "SkyPilot's API server does not answer, so what runs is not known. See: sky api info",
    ),
    "NotSupportedError": (ConfigError, "SkyPilot can't do this there"),
    "InvalidSkyPilotConfigError": (ConfigError, "SkyPilot's configuration can't be used"),
    "FileNotFoundError": (ConfigError, "SkyPilot can't be asked for this"),
    "IsADirectoryError": (ConfigError, "SkyPilot can't be asked for this"),
    "ValueError": (ConfigError, "SkyPilot can't be asked for this"),
    "YAMLError": (ConfigError, "The YAML can't be read"),
}
"""Of SkyPilot's exceptions: https://docs.skypilot.co/en/latest/reference/api.html."""


async def call(
    name: str, /, *, on_log: Callable[[str], None] | None = None, **arguments: Any
) -> Any:
    """What the function `name` of the bridge returns; raises what its exception means here."""
    async with aclosing(answers(name, **arguments)) as messages:
        async for message in messages:
            if "result" in message:
                return message["result"]
            if on_log is not None and "log" in message:
                on_log(message["log"])
    raise AssertionError("the answers end with a result")


async def lines(name: str, /, **arguments: Any) -> AsyncIterator[str]:
    """What the function `name` of the bridge says while it goes on."""
    async with aclosing(answers(name, **arguments)) as messages:
        async for message in messages:
            if "log" in message:
                yield message["log"]


async def answers(name: str, /, **arguments: Any) -> Answers:
    """What the function `name` of the bridge answers, to the last, which has the result."""
    bridge = Bridge.of(find_python())
    reader, writer = await asyncio.open_connection(sock=bridge.connect(), limit=LINE_BYTES)
    try:
        writer.write(json.dumps({"call": name, **arguments}).encode() + b"\n")
        async for line in reader:
            message = json.loads(line)
            if "error" in message:
                raise _meant(message["error"], message["message"])
            yield message
            if "result" in message:
                return
    except ConnectionError:
        pass  # it ended: what it said tells why
    finally:
        writer.close()
    raise ProviderError(
        f"SkyPilot can't be asked, its program ended: {bridge.last_words()}. Try: sky status"
    )


class Bridge:
    """A Python that has imported SkyPilot, which takes seconds, and forks for each call."""

    _running: ClassVar[dict[object, Bridge]] = {}
    _starting = threading.Lock()

    def __init__(self, python: str) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        self._sockets, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [python, str(LAUNCH / "skypilot" / "bridge.py"), "serve"],
                stdin=theirs.fileno(),
                stdout=self._said,
                stderr=self._said,
            )

    @classmethod
    def of(cls, python: str) -> Bridge:
        """One for each Python, user and API server, for as long as this process lives."""
        theirs = {k: v for k, v in os.environ.items() if k == "HOME" or k.startswith("SKYPILOT_")}
        key = (os.getpid(), python, frozenset(theirs.items()))
        with cls._starting:
            found = cls._running.get(key)
            if found is None or found._process.poll() is not None:
                found = cls._running[key] = cls(python)
            return found

    def connect(self) -> socket.socket:
        """For one call; to close it ends what was asked."""
        ours, theirs = socket.socketpair()
        with theirs, suppress(BrokenPipeError):
            socket.send_fds(self._sockets, [b"1"], [theirs.fileno()])
        return ours

    def last_words(self) -> str:
        code = self._process.poll()
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), f"exit code {code}")


def _meant(name: str, message: str) -> ArtCloudError:
    kind, words = MEANING.get(name, (ProviderError, f"SkyPilot failed ({name})"))
    return kind(f"{words}.\n{message}")


def find_python() -> str:
    """The Python that has SkyPilot: of `ART_SKYPILOT_PYTHON`, else this one.

    Raises:
        ConfigError: there is none.
    """
    if given := os.environ.get(PYTHON):
        python = shutil.which(Path(given).expanduser())
        if python is None:
            raise ConfigError(f"{PYTHON} is {given}, and there is no such program.")
        return python
    if find_spec("sky") is None:
        raise ConfigError(
            "SkyPilot is not installed in this environment. Give it one of its own (python3 -m "
            "venv ~/.skypilot && ~/.skypilot/bin/pip install 'skypilot[aws]~=0.14.1') and name its "
            f"Python: export {PYTHON}=~/.skypilot/bin/python"
        )
    return sys.executable
