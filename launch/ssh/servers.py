#!/usr/bin/env python3
"""art-server on a machine that you can log in to, outliving the login. By hand: see README.md.

    servers.py start [OPTION...] NAME PYTHON [ARGUMENT...]      art-server, with those arguments
    servers.py endpoint NAME                        where its server listens, or how it ended
    servers.py list                                 all servers, and what dead ones left running
    servers.py stop NAME [--only IDENTITY]          end it (if it is that one), and all it started
    servers.py log NAME [--follow]                  what it wrote

Answers are JSON on standard output; a failure is a sentence on standard error and exit code 1 (3:
there is nothing of that name). `start` reads a JSON object of environment variables from standard
input: secrets never stand in arguments or on disk.

Everything lies in ~/.art-cloud, which only its owner can read: for each cluster `clusters/NAME`
with the server's state, `server.log`, `endpoint.json` (written by the server) and `session.json`:
by whose token it was started (half its SHA-256), from where, and which mark the processes have in
their environment that are its own.

Needs Linux, Python 3.8 and nothing else.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path.home() / ".art-cloud"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
POLL_SECONDS = 0.2
ENDPOINT_SECONDS = 10.0
"""How long `endpoint` waits before it says that the server still boots."""
ENDING_SECONDS = 60.0
"""How long a server may take to finish or abandon its step before it is killed."""
KILL_SECONDS = 10.0
LOG_LINES = 15
POWER_OFF = ("poweroff",)
WATCH_SECONDS = 2.0
MARK = "ART_CLOUD_MARK"
"""A variable of the environment that a server and all that it starts have in common."""


class ServersError(Exception):
    code = 1


class NoSuchError(ServersError):
    code = 3


class Process(NamedTuple):
    pid: int
    session: int
    started: int
    """Clock ticks after the machine was booted."""
    command: list[str]


class Server(NamedTuple):
    """The processes of one cluster, the server itself first if it still lives."""

    leader: Process | None
    processes: list[Process]
    identity: str
    """What another one under its name, before or later, has not."""
    mark: str | None
    session: dict[str, Any]
    """What `start` wrote of this very server; {} if something else started it."""
    endpoint: dict[str, Any]
    """What this very server wrote, once it listens."""


def start(options: argparse.Namespace) -> dict[str, Any]:
    environment = json.load(sys.stdin)
    owner = hashlib.sha256(environment.get("ART_CLOUD_TOKEN", "").encode()).hexdigest()[:32]
    name, folder = options.name, ROOT / "clusters" / options.name
    with lock(ROOT / "lock"):
        running = servers()
        if name in running:
            return _described(name, running[name])
        if options.if_free and running:
            return {"state": "busy", "with": sorted(running)}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            (folder / "server.log").replace(folder / "server.1.log")
        for stale in ("endpoint.json", "session.json"):
            with suppress(FileNotFoundError):
                (folder / stale).unlink()
        mark = uuid.uuid4().hex
        command = [options.python, "-P", "-m", "art_server", "--state", str(folder)]
        with (folder / "server.log").open("ab") as log:
            process = subprocess.Popen(
                [*command, *options.arguments],
                env={**os.environ, MARK: mark, **environment},
                cwd=str(Path.home()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        session = {"owner": owner, "by": options.by, "mark": mark, "process": _of(process.pid)}
        _write(folder / "session.json", json.dumps(session))
        while name not in servers() and process.poll() is None:
            time.sleep(POLL_SECONDS / 10)  # until others see it
    if options.poweroff is not None:
        power_off_after(folder, options.poweroff)
    return {"state": "started", "owner": owner}


def power_off_after(folder: Path, seconds: float) -> None:
    """Leave a process behind that switches the machine off once no server of this user has run on
    it for so long."""
    if os.fork():
        return
    os.setsid()
    with (folder / "poweroff.log").open("ab") as log, open(os.devnull) as nothing:
        for place, file in ((0, nothing), (1, log), (2, log)):
            os.dup2(file.fileno(), place)
    since = time.monotonic()
    while time.monotonic() - since < seconds:
        time.sleep(min(WATCH_SECONDS, seconds / 4))
        if servers():
            since = time.monotonic()
    code, said = power(*POWER_OFF)
    os.write(1, f"{' '.join(POWER_OFF)} ended with code {code}: {said}\n".encode())
    os._exit(0)


def power(*command: str) -> tuple[int, str]:
    """The code and the output of a command that only root may use, asked for without a password."""
    if os.geteuid():
        command = ("sudo", "-n", *command)
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    try:
        ended = subprocess.run(
            command,
            env={**os.environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
    except OSError as error:
        return 127, f"{error.filename}: {error.strerror}"
    return ended.returncode, ended.stdout.decode(errors="replace").strip()


def endpoint(options: argparse.Namespace) -> dict[str, Any]:
    give_up = time.monotonic() + ENDPOINT_SECONDS
    while True:
        with lock(ROOT / "lock"):
            server = servers().get(options.name)
        if server is None or server.leader is None:
            return {"state": "ended", "log": _last_lines(options.name)}
        if server.endpoint:
            return {"state": "running", "url": server.endpoint["url"]}
        if time.monotonic() > give_up:
            return {"state": "starting"}
        time.sleep(POLL_SECONDS)


def list_(options: argparse.Namespace) -> dict[str, Any]:
    if not ROOT.exists():
        return {"servers": [], "logs": []}
    with lock(ROOT / "lock"):
        described = [_described(name, server) for name, server in servers().items()]
    logs = (ROOT / "clusters").glob("*/server.log")
    return {"servers": described, "logs": sorted(path.parent.name for path in logs)}


def _described(name: str, server: Server) -> dict[str, Any]:
    process = server.leader or server.processes[0]
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - process.started / os.sysconf("SC_CLK_TCK")
    state = "running" if server.endpoint else "starting"
    return {
        "name": name,
        "state": "ending" if server.leader is None else state,
        "age": age,
        "pid": process.pid,
        "identity": server.identity,
        "owner": server.session.get("owner"),
        "by": server.session.get("by"),
    }


def stop(options: argparse.Namespace) -> dict[str, Any]:
    name = options.name
    if not ROOT.exists():
        return {"ended": False}
    with lock(ROOT / "lock"):
        first = servers().get(name)
    if first is None or options.only not in (None, first.identity):
        return {"ended": False}
    kill_at = time.monotonic() + options.grace
    _signal([first.leader] if first.leader else first.processes, signal.SIGTERM)
    while left := _left(first):
        if time.monotonic() > kill_at + KILL_SECONDS:
            raise ServersError(f"{name} does not end: still there are {[one.pid for one in left]}")
        if time.monotonic() > kill_at or first.leader not in left:
            _signal(left, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    return {"ended": True}


def _left(server: Server) -> list[Process]:
    """What still runs of a server, and of what it has started since."""
    known = set(map(_identity, server.processes))
    return [
        process
        for process in processes()
        if _identity(process) in known or (server.mark and _mark(process) == server.mark)
    ]


def _identity(process: Process) -> str:
    return f"{_boot()}/{process.pid}/{process.started}"


def _of(pid: int) -> str | None:
    return next((_identity(process) for process in processes() if process.pid == pid), None)


def _mark(process: Process) -> str | None:
    """The mark that it was started with; None: it has none, or is another user's."""
    with suppress(OSError):
        content = Path(f"/proc/{process.pid}/environ").read_bytes()
        for variable in content.split(b"\0"):
            if variable.startswith(MARK.encode() + b"="):
                return variable.partition(b"=")[2].decode(errors="replace")
    return None


def _signal(targets: list[Process], number: signal.Signals) -> None:
    for process in targets:
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            continue
        except PermissionError:
            raise ServersError(
                f"process {process.pid} is another user's: end it as that user"
            ) from None


def log(options: argparse.Namespace) -> None:
    """Follows until the server ended, or nobody reads any more."""
    path = ROOT / "clusters" / options.name / "server.log"
    if not path.exists():
        raise NoSuchError(f"there is no log of a cluster {options.name} at {path}")
    reader = select.poll()
    reader.register(sys.stdout, 0)  # 0: only that it was closed
    with path.open("rb") as file:
        while True:
            alive = options.follow and options.name in servers()
            shutil.copyfileobj(file, sys.stdout.buffer)
            sys.stdout.buffer.flush()
            if not alive or reader.poll(int(POLL_SECONDS * 1000)):
                return


def processes() -> Iterator[Process]:
    """All that run here; what ended meanwhile, or only waits to be reaped, is left out."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                stat = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
                command = (folder / "cmdline").read_text(errors="replace").split("\0")[:-1]
                if stat[0] != "Z":
                    yield Process(int(folder.name), int(stat[3]), int(stat[19]), command)


def servers() -> dict[str, Server]:
    """Everything of ours that runs here, by cluster name.

    A server is known by its arguments. What else runs in the session that it leads belongs to it.
    Where the server itself has gone, what has its mark is left of it. Files count only if they are
    of this very process: those of one that is long gone make no other process ours.
    """
    leaders: dict[str, Process] = {}
    sessions: dict[int, list[Process]] = {}
    everything = list(processes())
    for process in everything:
        sessions.setdefault(process.session, []).append(process)
        name = _cluster_of(process.command)
        if name and (name not in leaders or process.session == process.pid):
            leaders[name] = process
    found = {}
    for name, leader in leaders.items():
        identity = _identity(leader)
        session, endpoint = (
            content if content.get("process") == identity else {}
            for content in (_read(name, "session"), _read(name, "endpoint"))
        )
        own = [leader, *(p for p in sessions.get(leader.pid, []) if p != leader)]
        mark = session.get("mark") or endpoint.get("mark")
        found[name] = Server(leader, own, identity, mark, session, endpoint)
    for name in {path.parent.name for path in (ROOT / "clusters").glob("*/*.json")} - found.keys():
        session = _read(name, "session")
        mark = session.get("mark") or _read(name, "endpoint").get("mark")
        left = [process for process in everything if mark and _mark(process) == mark]
        if mark and left:
            found[name] = Server(None, left, mark, mark, session, {})
    return found


def _cluster_of(command: list[str]) -> str | None:
    is_server = any(part == "art_server" or Path(part).name == "art-server" for part in command)
    if not is_server or "--state" not in command[:-1]:
        return None
    folder = Path(command[command.index("--state") + 1])
    return folder.name if folder.parent == ROOT / "clusters" else None


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold a lock that all logins share."""
    for folder in (ROOT, path.parent):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def valid(name: str) -> str:
    """For argparse: what can be a part of a path."""
    if not NAME.fullmatch(name) or ".." in name:
        raise ValueError(name)
    return name


def _read(name: str, what: str) -> dict[str, Any]:
    """The file `what` of a cluster, {} if there is none."""
    path = ROOT / "clusters" / name / f"{what}.json"
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError:
        raise ServersError(f"{path} is not what art-cloud writes") from None
    return content


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)


def _last_lines(name: str) -> list[str]:
    try:
        with (ROOT / "clusters" / name / "server.log").open(errors="replace") as file:
            return [line.rstrip("\n") for line in deque(file, LOG_LINES)]
    except FileNotFoundError:
        return []


def main() -> None:
    os.umask(0o077)
    parser = argparse.ArgumentParser("servers.py", description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(required=True)

    def command(call: Callable[[argparse.Namespace], object], *names: str) -> Any:
        made = commands.add_parser(call.__name__.rstrip("_"))
        made.set_defaults(call=call)
        for name in names:
            made.add_argument(name, type=valid)
        return made

    starting = command(start, "name")
    starting.add_argument("--if-free", action="store_true", help="only where no other server runs")
    starting.add_argument("--poweroff", type=float, metavar="SECONDS", help="after the last server")
    starting.add_argument("--by", default="somebody", help="who starts it, for others to read")
    starting.add_argument("python")
    starting.add_argument("arguments", nargs=argparse.REMAINDER)
    command(endpoint, "name")
    command(list_)
    stopping = command(stop, "name")
    stopping.add_argument("--grace", type=float, default=ENDING_SECONDS)
    stopping.add_argument("--only", metavar="IDENTITY", help="as `list` shows it")
    command(log, "name").add_argument("--follow", action="store_true")

    options = parser.parse_args()
    try:
        answer = options.call(options)
    except ServersError as failure:
        print(failure, file=sys.stderr)
        sys.exit(failure.code)
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(1)
    if answer is not None:
        print(json.dumps(answer))


if __name__ == "__main__":
    main()
