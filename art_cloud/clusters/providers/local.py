"""This machine: the server as a process of its own, which outlives the one that started it.

A cluster's folder is `<home>/clusters/<name>`: the server's state, `server.log` (and that of the
start before, `server.1.log`), `endpoint.json` (written by the server when it listens),
`session.json` (by whose token it was started) and `lock`, which the server holds for as long as it
lives. The folder's path stands in the server's arguments, so `list` finds it by looking at
processes only. What a killed server left is known by a mark in its environment: files only say
which, so that those of a server that is long gone make no other process ours.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar
from uuid import uuid4

from filelock import lock_descriptor
from pydantic import BaseModel, ValidationError

from ...links.endpoint import Endpoint
from ...shared.errors import ConfigError, ConflictError, LaunchError, NotFoundError, ProviderError
from ...shared.processes import MARK, identity_of
from ..registry import home
from ..spec import Check, ClusterSpec, Instance, Offer, Which

if TYPE_CHECKING:
    import psutil

PACKAGES = ("torch", "transformers", "peft", "uvicorn", "psutil")
"""Of the `server` extra: those that tell whether it is installed."""
POLL_SECONDS = 0.1
ENDING_SECONDS = 60.0
"""How long a server may take to finish or abandon its step before it is killed."""
KILL_SECONDS = 10.0
LOCK_SECONDS = 10.0
"""How long a lock may be held by something that is no server yet: far above what it takes."""
LOG_LINES = 15

_started: dict[str, subprocess.Popen[bytes]] = {}
"""Servers started by this process: kept so that they are reaped, and their exit code is known."""


class _EndpointFile(BaseModel):
    """Where a server listens; `process` is its identity."""

    url: str
    process: str | None = None
    mark: str | None = None


class _SessionFile(BaseModel):
    """Who started a server; `process` is its identity."""

    owner: str
    process: str | None
    mark: str


F = TypeVar("F", bound=BaseModel)


@dataclass(frozen=True)
class _Server:
    """The processes of one cluster, the server itself first if it still lives."""

    leader: psutil.Process | None
    processes: list[psutil.Process]
    identity: str
    mark: str | None
    """What all that it starts has in its environment."""
    owner: str | None = None
    url: str | None = None
    """None: it does not listen (yet)."""


class LocalProvider:
    async def offers(self, spec: ClusterSpec) -> list[Offer]:
        """This machine: it costs what `price_per_hour=` says, nothing if that is not given."""
        if unknown := spec.options.keys() - {"price_per_hour"}:
            raise ConfigError(
                f"A local cluster has no option {', '.join(sorted(unknown))}, only price_per_hour."
            )
        price = spec.options.get("price_per_hour", 0.0)
        try:
            offer = {"provider": "local", "region": "this machine", "price_per_hour": price}
            return [Offer.model_validate(offer)]
        except ValidationError:
            raise ConfigError(
                f"price_per_hour is {price!r}, which is no number of US dollars."
            ) from None

    async def launch(self, spec: ClusterSpec, name: str) -> None:
        """Start the server.

        Raises:
            ConfigError: the `server` extra is not installed.
            ConflictError: one of that name runs that was started with another token.
        """
        _require(*PACKAGES)
        folder = _folder(name)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (folder / "lock").open("a") as lock:
            give_up = time.monotonic() + LOCK_SECONDS
            while not _try_lock(lock):
                if there := (await asyncio.to_thread(_scan)).get(name):
                    return _check_owner(there, spec, name)
                if time.monotonic() > give_up:
                    raise ProviderError(f"{folder}/lock is held, but not by a server of {name}.")
                await asyncio.sleep(POLL_SECONDS)
            if there := (await asyncio.to_thread(_scan)).get(name):
                return _check_owner(there, spec, name)
            for stale in ("endpoint.json", "session.json"):
                (folder / stale).unlink(missing_ok=True)
            self._start(spec, name, folder, lock.fileno())

    def _start(self, spec: ClusterSpec, name: str, folder: Path, lock: int) -> None:
        command = [sys.executable, "-P", "-m", "art_server"]
        command += ["--state", str(folder), *spec.server_arguments(name)]
        with suppress(FileNotFoundError):
            (folder / "server.log").replace(folder / "server.1.log")
        log = os.open(folder / "server.log", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
        mark = uuid4().hex
        try:
            process = subprocess.Popen(
                command,
                env=os.environ | {MARK: mark} | spec.server_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=[lock],
            )
        except OSError as error:
            raise LaunchError(f"The server of {name} could not be started: {error}.") from error
        finally:
            os.close(log)
        _started[name] = process
        session = _SessionFile(owner=spec.owner, process=identity_of(process.pid), mark=mark)
        _write(folder / "session.json", session.model_dump_json())

    async def endpoint(self, name: str) -> Endpoint:
        while True:
            server = (await asyncio.to_thread(_scan)).get(name)
            if server and server.url:
                return Endpoint(url=server.url)
            if not (server and server.leader) and not _is_locked(name):
                raise _ended(name)
            await asyncio.sleep(POLL_SECONDS)

    async def check(self) -> list[Check]:
        """For `art-cloud doctor`: `ConfigError` if the `server` extra is not installed."""
        _require(*PACKAGES)
        return []

    async def list(self) -> list[Instance]:
        _require("psutil")
        return [
            _instance(name, server) for name, server in (await asyncio.to_thread(_scan)).items()
        ]

    async def terminate(self, name: str, *, only: Which | None = None) -> None:
        """SIGTERM to the server; SIGKILL to whatever of it is left after `ENDING_SECONDS`."""
        _require("psutil")
        await asyncio.to_thread(_terminate, name, only)

    async def logs(self, name: str, *, follow: bool) -> AsyncIterator[str]:
        path = _folder(name) / "server.log"
        if not path.exists():
            raise NotFoundError(f"There is no log of a local cluster {name!r} at {path}.")
        with path.open(encoding="utf-8", errors="replace") as file:
            pending = ""
            while True:
                alive = follow and name in await asyncio.to_thread(_scan)
                for part in file:
                    pending += part
                    if pending.endswith("\n"):
                        yield pending.rstrip("\n")
                        pending = ""
                if not alive:
                    break
                await asyncio.sleep(POLL_SECONDS)
            if pending:
                yield pending


def _folder(name: str) -> Path:
    return home() / "clusters" / name


def _require(*modules: str) -> None:
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"A local cluster needs {', '.join(missing)}, which is not installed here. "
            "Run: pip install 'art-cloud[server]'"
        )


def _scan() -> dict[str, _Server]:
    """Everything of ours that runs here, by cluster name.

    A server is known by its arguments. What else runs in the session that it leads belongs to it.
    Where the server itself has gone, what has its mark is left of it.
    """
    import psutil

    leaders: dict[str, psutil.Process] = {}
    sessions: dict[int, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            name = _cluster_of(process.cmdline())
            session = os.getsid(process.pid)
            sessions.setdefault(session, []).append(process)
            if name and (name not in leaders or session == process.pid):
                leaders[name] = process
    servers = {
        name: _of_leader(name, leader, sessions.get(leader.pid, []))
        for name, leader in leaders.items()
    }
    everything = [process for members in sessions.values() for process in members]
    folders = {path.parent.name for path in (home() / "clusters").glob("*/*.json")}
    for name in folders - servers.keys():
        by, at = _read_session(name), _read_endpoint(name)
        mark = by.mark if by else at.mark if at else None
        if mark and (left := _marked(everything, mark)):
            servers[name] = _Server(None, left, mark, mark, by.owner if by else None)
    return servers


def _of_leader(name: str, leader: psutil.Process, members: list[psutil.Process]) -> _Server:
    """What the files of a cluster say counts only if they are of this very process."""
    processes = [leader, *(process for process in members if process != leader)]
    identity = identity_of(leader.pid) or ""
    session, endpoint = _read_session(name), _read_endpoint(name)
    if session and session.process != identity:
        session = None
    if endpoint and endpoint.process != identity:
        endpoint = None
    return _Server(
        leader,
        processes,
        identity,
        mark=session.mark if session else endpoint.mark if endpoint else None,
        owner=session.owner if session else None,
        url=endpoint.url if endpoint else None,
    )


def _marked(processes: list[psutil.Process], mark: str) -> list[psutil.Process]:
    """Those that were started with this mark in their environment, and still run."""
    import psutil

    found = []
    for process in processes:
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _cluster_of(command: list[str]) -> str | None:
    """The cluster whose server was started by `command`, if it is one of this user's home."""
    is_server = any(part == "art_server" or Path(part).name == "art-server" for part in command)
    if not is_server or "--state" not in command[:-1]:
        return None
    folder = Path(command[command.index("--state") + 1])
    return folder.name if folder.parent == home() / "clusters" else None


def _read_endpoint(name: str) -> _EndpointFile | None:
    return _read(name, "endpoint.json", _EndpointFile)


def _read_session(name: str) -> _SessionFile | None:
    return _read(name, "session.json", _SessionFile)


def _read(name: str, file: str, kind: type[F]) -> F | None:
    try:
        text = (_folder(name) / file).read_text()
    except FileNotFoundError:
        return None
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise ProviderError(f"{file} of {name} is not what a server writes.") from error


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.chmod(0o600)
    partial.replace(path)


def _check_owner(server: _Server, spec: ClusterSpec, name: str) -> None:
    if server.owner not in (None, spec.owner):
        raise ConflictError(
            f"A server {name} runs here that was started with another token. Give yours another "
            f"name (name=), or end that one: art-cloud down {name}"
        )


def _instance(name: str, server: _Server) -> Instance:
    process = server.leader or server.processes[0]
    return Instance(
        name=name,
        provider="local",
        state="running" if server.url else "starting" if server.leader else "ending",
        started_at=datetime.fromtimestamp(process.create_time(), UTC),
        detail=f"pid {process.pid}",
        identity=server.identity,
        owner=server.owner,
    )


def _terminate(name: str, only: Which | None) -> None:
    import psutil

    first = _wait_for_server(name)
    if first is None or (only and not only(_instance(name, first))):
        return
    now = time.monotonic()
    kill_at, give_up = now + ENDING_SECONDS, now + ENDING_SECONDS + KILL_SECONDS
    try:
        _signal([first.leader] if first.leader else first.processes, signal.SIGTERM)
        while left := _left(first):
            now = time.monotonic()
            if now > give_up:
                pids = ", ".join(str(process.pid) for process in left)
                raise ProviderError(f"{name} does not end: still there are processes {pids}.")
            if now > kill_at or first.leader not in left:
                _signal(left, signal.SIGKILL)
            time.sleep(POLL_SECONDS)
    except psutil.AccessDenied as error:
        raise ProviderError(
            f"{name} runs as another user (process {error.pid}): end it as that user."
        ) from error
    if process := _started.pop(name, None):
        process.poll()


def _wait_for_server(name: str) -> _Server | None:
    """The server of `name`, waited for if it is being started."""
    give_up = time.monotonic() + LOCK_SECONDS
    while (server := _scan().get(name)) is None and _is_locked(name):
        if time.monotonic() > give_up:
            raise ProviderError(f"{_folder(name)}/lock is held, but not by a server of {name}.")
        time.sleep(POLL_SECONDS)
    return server


def _left(server: _Server) -> list[psutil.Process]:
    """What still runs of a server, and of what it has started since."""
    import psutil

    left = _marked(list(psutil.process_iter()), server.mark) if server.mark else []
    for process in server.processes:
        with suppress(psutil.NoSuchProcess):
            runs = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
            if runs and process not in left:
                left.append(process)
    return left


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    import psutil

    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _try_lock(file: IO[str]) -> bool:
    return lock_descriptor(file.fileno(), blocking=False)


def _is_locked(name: str) -> bool:
    """Whether a server of `name` lives, or is being started.

    A process that has just been started does not show its arguments yet: `_scan` misses it.
    """
    try:
        with (_folder(name) / "lock").open() as file:
            return not _try_lock(file)
    except FileNotFoundError:
        return False


def _ended(name: str) -> LaunchError:
    process = _started.get(name)
    code = process.poll() if process else None
    how = "" if code is None else f" with exit code {code}"
    log = _folder(name) / "server.log"
    lines = "\n".join(f"  {line}" for line in _last_lines(log)) or "  (nothing)"
    return LaunchError(
        f"The server of {name} ended{how}. The last lines of {log}:\n{lines}\n"
        "Mend what they name, then start it again."
    )


def _last_lines(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 65536))
            return file.read().decode(errors="replace").splitlines()[-LOG_LINES:]
    except FileNotFoundError:
        return []
