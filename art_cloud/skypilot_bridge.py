"""Calls to SkyPilot, each a process of `launch/skypilot/bridge.py` in a Python that has SkyPilot.

SkyPilot pins versions that ours do not agree with, so it may have an environment of its own; where
its API server runs is its own business (`sky api login`, SKYPILOT_API_SERVER_ENDPOINT).
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .errors import (
    ArtCloudError,
    ConfigError,
    ConflictError,
    LaunchError,
    NoMachineError,
    NotFoundError,
    ProviderError,
)

LAUNCH = Path(__file__).parent / "launch"
PYTHON = "ART_SKYPILOT_PYTHON"
LINE_BYTES = 2**24
"""No answer is longer than this."""

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
    async with aclosing(_messages(name, arguments)) as messages:
        async for message in messages:
            if "log" not in message:
                return message["result"]
            if on_log is not None:
                on_log(message["log"])
    raise AssertionError("the messages end with a result")


async def lines(name: str, /, **arguments: Any) -> AsyncIterator[str]:
    """What the function `name` of the bridge says while it goes on."""
    async with aclosing(_messages(name, arguments)) as messages:
        async for message in messages:
            if "log" in message:
                yield message["log"]


async def _messages(name: str, arguments: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
    """The lines that the bridge answers; the last one has the result."""
    request = json.dumps({"call": name, **arguments}).encode()
    async with _bridge() as (process, said):
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(request)
        process.stdin.write_eof()
        async for line in process.stdout:
            message = json.loads(line)
            if "error" in message:
                raise _meant(message["error"], message["message"])
            yield message
            if "result" in message:
                return
        await process.wait()
        why = said[-1] if said else f"exit code {process.returncode}"
        raise ProviderError(f"SkyPilot can't be asked, its program ended: {why}. Try: sky status")


@asynccontextmanager
async def _bridge() -> AsyncIterator[tuple[Process, deque[str]]]:
    """Its process, which ends with the block, and the last lines that it writes beside answers."""
    command = [find_python(), str(LAUNCH / "skypilot" / "bridge.py")]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=LINE_BYTES
    )
    said: deque[str] = deque(maxlen=20)
    reading = asyncio.create_task(_keep(process, said))
    try:
        yield process, said
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await reading


async def _keep(process: Process, said: deque[str]) -> None:
    assert process.stderr is not None
    async for line in process.stderr:
        said.append(line.decode(errors="replace").rstrip())


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
