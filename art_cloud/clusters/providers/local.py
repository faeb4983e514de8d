"""This machine: the server as a process of its own, which outlives the one that started it.

What starts it, finds it and ends it is `launch/ssh/servers.py`, the same file that runs on other
machines; here it is imported, and the folder of a cluster is `<home>/clusters/<name>`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import NonNegativeFloat

from ...links.endpoint import Endpoint
from ...shared.config import Frozen
from ...shared.errors import ConfigError, ConflictError, LaunchError, NotFoundError, ProviderError
from ..install import LAUNCH
from ..registry import folder_of, home
from ..spec import Check, ClusterSpec, Instance, Offer, Which
from .kit import ended, instance_of, options_of

PACKAGES = ("torch", "transformers", "peft", "uvicorn", "psutil")
"""Of the `server` extra: those that tell whether it is installed."""
POLL_SECONDS = 0.1
ENDING_SECONDS = 60.0
"""How long a server may take to finish or abandon its step before it is killed."""


class Options(Frozen):
    """What `art.up("local", ...)` takes beside what all providers take."""

    price_per_hour: NonNegativeFloat = 0.0
    """US dollars that the machine costs you."""


class LocalProvider:
    async def offers(self, spec: ClusterSpec) -> list[Offer]:
        """This machine: it costs what `price_per_hour=` says, nothing if that is not given."""
        price = options_of(spec, Options, "A local cluster").price_per_hour
        return [Offer(provider="local", region="this machine", price_per_hour=price)]

    async def launch(self, spec: ClusterSpec, name: str) -> None:
        """Start the server.

        Raises:
            ConfigError: the `server` extra is not installed.
            ConflictError: one of that name runs that was started with another token.
        """
        _require(*PACKAGES)
        command = [sys.executable, *spec.server_arguments(name)]
        try:
            with _failures():  # in no thread: it would start the server though this is cancelled
                there = _servers().start(name, command, spec.server_environment())
        except OSError as error:
            raise LaunchError(f"The server of {name} could not be started: {error}.") from error
        if there["owner"] not in (None, spec.owner):
            raise ConflictError(
                f"A server {name} runs here that was started with another token. Give yours "
                f"another name (name=), or end that one: art-cloud down {name}"
            )

    async def endpoint(self, name: str) -> Endpoint:
        while (answer := await _ask("endpoint", name, 0.0))["state"] == "starting":
            await asyncio.sleep(POLL_SECONDS)
        if answer["state"] == "running":
            return Endpoint(url=answer["url"])
        how = "" if answer["code"] is None else f" with exit code {answer['code']}"
        log = folder_of(name) / "server.log"
        raise ended(f"The server of {name} ended{how}", answer["log"], str(log))

    async def check(self) -> list[Check]:
        """For `art-cloud doctor`: `ConfigError` if the `server` extra is not installed."""
        _require(*PACKAGES)
        return []

    async def list(self) -> list[Instance]:
        if not _can_run_servers():
            return []
        return [_instance(server) for server in (await _ask("look"))["servers"]]

    async def terminate(self, name: str, *, only: Which | None = None) -> None:
        """SIGTERM to the server; SIGKILL to whatever of it is left after `ENDING_SECONDS`."""

        def meant(server: dict[str, Any]) -> bool:
            return only is None or only(_instance(server))

        if _can_run_servers():
            await _ask("stop", name, meant, ENDING_SECONDS)

    async def logs(self, name: str, *, follow: bool) -> AsyncIterator[str]:
        parts = _servers().log(name, follow)
        with _failures():
            while (lines := await asyncio.to_thread(next, parts, None)) is not None:
                for line in lines:
                    yield line.decode(errors="replace")
                await asyncio.sleep(POLL_SECONDS if follow else 0)


def _instance(server: dict[str, Any]) -> Instance:
    started_at = datetime.fromtimestamp(server["started_at"], UTC)
    return instance_of("local", "", server, started_at)


def _require(*modules: str) -> None:
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"A local cluster needs {', '.join(missing)}, which is not installed here. "
            "Run: pip install 'art-cloud[server]'"
        )


def _can_run_servers() -> bool:
    """Whether this machine is one of POSIX, with the locks that servers hold."""
    return find_spec("fcntl") is not None


@cache
def _program() -> ModuleType:
    """`servers.py`, which is part of no package: it works by hand too.

    Raises:
        ConfigError: this machine can't run servers.
    """
    if not _can_run_servers():
        raise ConfigError("A local cluster needs Linux or macOS. Name another provider.")
    if not Path("/proc").exists():
        _require("psutil")
    spec = spec_from_file_location("art_cloud_servers", LAUNCH / "ssh" / "servers.py")
    assert spec is not None
    assert spec.loader is not None
    program = module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


def _servers() -> Any:
    return _program().Servers(home())


async def _ask(what: str, *arguments: object) -> Any:
    """What a method of `Servers` answers."""
    with _failures():
        return await asyncio.to_thread(getattr(_servers(), what), *arguments)


@contextmanager
def _failures() -> Iterator[None]:
    program = _program()
    try:
        yield
    except program.NoSuchError as error:
        raise NotFoundError(f"{error}.") from None
    except program.ServersError as error:
        raise ProviderError(f"{error}.") from None
