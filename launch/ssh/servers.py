#!/usr/bin/env python3
"""art-server on this machine, outliving whoever starts it. By hand: see README.md.

    servers.py start [OPTION...] NAME PYTHON [ARGUMENT...]      art-server, with those arguments
    servers.py endpoint NAME                        where its server listens, or how it ended
    servers.py list                                 all servers, and what dead ones left running
    servers.py stop NAME [--only IDENTITY]          end it (if it is that one), and all it started
    servers.py log NAME [--follow]                  what it wrote

Answers are JSON on standard output; a failure is a sentence on standard error and exit code 1 (3:
there is nothing of that name). `start` reads a JSON object of environment variables from standard
input: secrets never stand in arguments or on disk.

Everything lies in ~/.art-cloud, which only its owner can read: for each cluster `clusters/NAME`
with the server's state, `server.log` (and that of the start before, `server.1.log`),
`endpoint.json` (written by the server), `session.json`: by whose token it was started (half its
SHA-256), from where, and which mark the processes have in their environment that are its own; and
`lock`, which the server holds for as long as it lives.

The provider "ssh" runs this file on other machines; the provider "local" imports it and names a
folder of its own. It needs Python 3.8 and Linux, or psutil and art-cloud where there is no /proc.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

ROOT = Path.home() / ".art-cloud"
PROC = Path("/proc")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
POLL_SECONDS = 0.1
ENDPOINT_SECONDS = 10.0
"""How long `endpoint` waits before it says that the server still boots."""
ENDING_SECONDS = 60.0
"""How long a server may take to finish or abandon its step before it is killed."""
KILL_SECONDS = 10.0
LOCK_SECONDS = 10.0
"""How long a lock may be held by something that is no server yet: far above what it takes."""
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
    identity: str
    """The boot of the machine, the id, and when it was started: no other process has the same."""
    started_at: float
    """Unix time, by the clock of this machine: the same whenever it is asked."""
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


class Servers:
    """Those whose folders lie in `root`/clusters."""

    started: dict[Path, subprocess.Popen[bytes]] = {}
    """By this process, each with its folder: they are reaped, and their exit code is known."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clusters = root / "clusters"

    def start(
        self,
        name: str,
        command: list[str],
        environment: dict[str, str],
        *,
        by: str | None = None,
        works_in: Path | None = None,
        if_free: bool = False,
    ) -> dict[str, Any]:
        """Start a server, unless there is one of that name: then the answer describes that.

        `command` is a Python and the arguments of the server; `environment` is added to that of
        this process. With `if_free` nothing is started beside another server.
        """
        folder, give_up = self.clusters / name, time.monotonic() + LOCK_SECONDS
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (folder / "lock").open("a") as lock:
            while not _try_lock(lock):
                if there := self.all().get(name):
                    return described(name, there)
                self._wait_for_lock(name, give_up)
            with (self.root / "lock").open("a") as turn:  # of several names one is the first
                fcntl.flock(turn, fcntl.LOCK_EX)
                running = self.all()
                if name in running:
                    return described(name, running[name])
                if if_free and running:
                    return {"state": "busy", "with": sorted(running)}
                token = environment.get("ART_CLOUD_TOKEN", "").encode()
                owner = hashlib.sha256(token).hexdigest()[:32]
                mark = uuid.uuid4().hex
                environment = {**os.environ, MARK: mark, **environment}
                process = _spawn(folder, command, environment, works_in, lock)
                self.started[folder] = process
                identity = _identity_of(process.pid)
                session = {"owner": owner, "by": by, "mark": mark, "process": identity}
                _write(folder / "session.json", json.dumps(session))
                while name not in self.all() and process.poll() is None:
                    time.sleep(POLL_SECONDS / 10)  # until others see it
        return {"state": "started", "owner": owner}

    def endpoint(self, name: str, patience: float = ENDPOINT_SECONDS) -> dict[str, Any]:
        give_up = time.monotonic() + patience
        while True:
            server = self.all().get(name)
            if server and server.endpoint:
                return {"state": "running", "url": server.endpoint["url"]}
            if not (server.leader if server else self._is_locked(name)):
                process = self.started.get(self.clusters / name)
                code = process.poll() if process else None
                return {"state": "ended", "code": code, "log": self._last_lines(name)}
            if time.monotonic() >= give_up:
                return {"state": "starting"}
            time.sleep(POLL_SECONDS)

    def look(self) -> dict[str, Any]:
        """All that runs, and the names of which there is a log."""
        with suppress(FileNotFoundError), (self.root / "lock").open() as turn:
            fcntl.flock(turn, fcntl.LOCK_SH)  # what is being started is seen
        logs = self.clusters.glob("*/server.log")
        return {
            "servers": [described(name, server) for name, server in self.all().items()],
            "logs": sorted(path.parent.name for path in logs),
        }

    def stop(
        self,
        name: str,
        only: Callable[[dict[str, Any]], bool] | None = None,
        grace: float = ENDING_SECONDS,
    ) -> dict[str, Any]:
        """SIGTERM to the server; SIGKILL to whatever of it is left after `grace` seconds."""
        give_up = time.monotonic() + LOCK_SECONDS
        while (first := self.all().get(name)) is None and self._is_locked(name):
            self._wait_for_lock(name, give_up)
        if first is None or (only and not only(described(name, first))):
            return {"ended": False}
        kill_at = time.monotonic() + grace
        _signal(name, [first.leader] if first.leader else first.processes, signal.SIGTERM)
        while left := _left(first):
            if time.monotonic() > kill_at + KILL_SECONDS:
                pids = ", ".join(str(process.pid) for process in left)
                raise ServersError(f"{name} does not end: still there are processes {pids}")
            leader = first.leader and first.leader.identity
            if time.monotonic() > kill_at or leader not in [one.identity for one in left]:
                _signal(name, left, signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        if process := self.started.pop(self.clusters / name, None):
            process.poll()
        return {"ended": True}

    def log(self, name: str, follow: bool) -> Iterator[list[bytes]]:
        """The lines that came since it was asked last; with `follow` until the server has ended."""
        path = self.clusters / name / "server.log"
        if not path.exists():
            raise NoSuchError(f"There is no log of a cluster {name!r} at {path}")
        with path.open("rb") as file:
            rest = b""
            while True:
                alive = follow and name in self.all()
                *lines, rest = (rest + file.read()).split(b"\n")
                yield lines
                if not alive:
                    break
            if rest:
                yield [rest]

    def all(self) -> dict[str, Server]:
        """Everything of ours that runs here, by cluster name.

        A server is known by its arguments. What else runs in the session that it leads belongs to
        it. Where the server itself has gone, what has its mark is left of it. Files count only if
        they are of this very process: those of one that is long gone make no other process ours.
        """
        leaders: dict[str, Process] = {}
        sessions: dict[int, list[Process]] = {}
        everything = list(processes())
        for process in everything:
            sessions.setdefault(process.session, []).append(process)
            name = self._cluster_of(process.command)
            if name and (name not in leaders or process.session == process.pid):
                leaders[name] = process
        found = {}
        for name, leader in leaders.items():
            session, endpoint = (
                content if content.get("process") == leader.identity else {}
                for content in (self._read(name, "session"), self._read(name, "endpoint"))
            )
            own = [leader, *(p for p in sessions.get(leader.pid, []) if p != leader)]
            mark = session.get("mark") or endpoint.get("mark")
            found[name] = Server(leader, own, leader.identity, mark, session, endpoint)
        for name in {path.parent.name for path in self.clusters.glob("*/*.json")} - found.keys():
            session = self._read(name, "session")
            mark = session.get("mark") or self._read(name, "endpoint").get("mark")
            left = [process for process in everything if mark and _mark(process) == mark]
            if mark and left:
                found[name] = Server(None, left, mark, mark, session, {})
        return found

    def _cluster_of(self, command: list[str]) -> str | None:
        is_server = any(part == "art_server" or Path(part).name == "art-server" for part in command)
        if not is_server or "--state" not in command[:-1]:
            return None
        folder = Path(command[command.index("--state") + 1])
        return folder.name if folder.parent == self.clusters else None

    def _is_locked(self, name: str) -> bool:
        """Whether a server of `name` lives, or is being started.

        A process that has just been started does not show its arguments yet: `all` misses it.
        """
        try:
            with (self.clusters / name / "lock").open() as file:
                return not _try_lock(file)
        except FileNotFoundError:
            return False

    def _wait_for_lock(self, name: str, give_up: float) -> None:
        if time.monotonic() > give_up:
            path = self.clusters / name / "lock"
            raise ServersError(f"{path} is held, but not by a server of {name}")
        time.sleep(POLL_SECONDS)

    def _read(self, name: str, what: str) -> dict[str, Any]:
        """The file `what` of a cluster, {} if there is none."""
        path = self.clusters / name / f"{what}.json"
        try:
            content: dict[str, Any] = json.loads(path.read_text())
        except FileNotFoundError:
            return {}
        except ValueError:
            raise ServersError(f"{path} is not what art-cloud writes") from None
        return content

    def _last_lines(self, name: str) -> list[str]:
        try:
            with (self.clusters / name / "server.log").open(errors="replace") as file:
                return [line.rstrip("\n") for line in deque(file, LOG_LINES)]
        except FileNotFoundError:
            return []

    def power_off_after(self, name: str, seconds: float) -> None:
        """Leave a process behind that switches the machine off once no server of this user has run
        on it for so long."""
        if os.fork():
            return
        os.setsid()
        log = self.clusters / name / "poweroff.log"
        with log.open("ab") as output, open(os.devnull) as nothing:
            for place, file in ((0, nothing), (1, output), (2, output)):
                os.dup2(file.fileno(), place)
        since = time.monotonic()
        while time.monotonic() - since < seconds:
            time.sleep(min(WATCH_SECONDS, seconds / 4))
            if self.all():
                since = time.monotonic()
        code, said = power(*POWER_OFF)
        os.write(1, f"{' '.join(POWER_OFF)} ended with code {code}: {said}\n".encode())
        os._exit(0)


def _spawn(
    folder: Path,
    command: list[str],
    environment: dict[str, str],
    works_in: Path | None,
    lock: IO[str],
) -> subprocess.Popen[bytes]:
    with suppress(FileNotFoundError):
        (folder / "server.log").replace(folder / "server.1.log")
    for stale in ("endpoint.json", "session.json"):
        with suppress(FileNotFoundError):
            (folder / stale).unlink()
    log = os.open(folder / "server.log", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
    python, *arguments = command
    try:
        return subprocess.Popen(
            [python, "-P", "-m", "art_server", "--state", str(folder), *arguments],
            env=environment,
            cwd=works_in,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=[lock.fileno()],
        )
    finally:
        os.close(log)


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


def described(name: str, server: Server) -> dict[str, Any]:
    process = server.leader or server.processes[0]
    state = "running" if server.endpoint else "starting"
    return {
        "name": name,
        "state": "ending" if server.leader is None else state,
        "started_at": process.started_at,
        "age": time.time() - process.started_at,
        "pid": process.pid,
        "identity": server.identity,
        "owner": server.session.get("owner"),
        "by": server.session.get("by"),
    }


def processes() -> Iterator[Process]:
    """All that run here; what ended meanwhile, or only waits to be reaped, is left out."""
    if not PROC.exists():
        yield from _processes_by_psutil()
        return
    boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
    stat = (PROC / "stat").read_text().splitlines()
    [booted_at] = [int(line.split()[1]) for line in stat if line.startswith("btime ")]
    ticks = os.sysconf("SC_CLK_TCK")
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                stat = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
                command = (folder / "cmdline").read_text(errors="replace").split("\0")[:-1]
                if stat[0] != "Z":
                    identity = f"{boot}/{folder.name}/{stat[19]}"
                    started_at = booted_at + int(stat[19]) / ticks
                    yield Process(int(folder.name), int(stat[3]), identity, started_at, command)


def _processes_by_psutil() -> Iterator[Process]:
    import psutil

    from art_cloud.shared.processes import identity_of

    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            pid, identity = process.pid, identity_of(process.pid)
            if identity and process.status() != psutil.STATUS_ZOMBIE:
                started_at, command = process.create_time(), process.cmdline()
                yield Process(pid, os.getsid(pid), identity, started_at, command)


def _mark(process: Process) -> str | None:
    """The mark that it was started with; None: it has none, or is another user's."""
    if not PROC.exists():
        import psutil

        with suppress(psutil.Error, OSError):
            return psutil.Process(process.pid).environ().get(MARK)
        return None
    with suppress(OSError):
        content = (PROC / str(process.pid) / "environ").read_bytes()
        for variable in content.split(b"\0"):
            if variable.startswith(MARK.encode() + b"="):
                return variable.partition(b"=")[2].decode(errors="replace")
    return None


def _identity_of(pid: int) -> str | None:
    return next((process.identity for process in processes() if process.pid == pid), None)


def _left(server: Server) -> list[Process]:
    """What still runs of a server, and of what it has started since."""
    known = {process.identity for process in server.processes}
    return [
        process
        for process in processes()
        if process.identity in known or (server.mark and _mark(process) == server.mark)
    ]


def _signal(name: str, targets: list[Process], number: signal.Signals) -> None:
    for process in targets:
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            continue
        except PermissionError:
            raise ServersError(
                f"{name} runs as another user (process {process.pid}): end it as that user"
            ) from None


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.chmod(0o600)
    partial.replace(path)


def valid(name: str) -> str:
    """For argparse: what can be a part of a path."""
    if not NAME.fullmatch(name) or ".." in name:
        raise ValueError(name)
    return name


def start(here: Servers, options: argparse.Namespace) -> dict[str, Any]:
    command, environment = [options.python, *options.arguments], json.load(sys.stdin)
    about = {"by": options.by, "works_in": Path.home(), "if_free": options.if_free}
    answer = here.start(options.name, command, environment, **about)
    if options.poweroff is not None and answer["state"] == "started":
        here.power_off_after(options.name, options.poweroff)
    return answer


def stop(here: Servers, options: argparse.Namespace) -> dict[str, Any]:
    def only(server: dict[str, Any]) -> bool:
        return options.only in (None, server["identity"])

    return here.stop(options.name, only, options.grace)


def log(here: Servers, options: argparse.Namespace) -> None:
    """Follows until the server ended, or nobody reads any more."""
    reader = select.poll()
    reader.register(sys.stdout, 0)  # 0: only that it was closed
    for lines in here.log(options.name, options.follow):
        sys.stdout.buffer.writelines(line + b"\n" for line in lines)
        sys.stdout.buffer.flush()
        if options.follow and reader.poll(int(POLL_SECONDS * 1000)):
            return


def main() -> None:
    os.umask(0o077)
    parser = argparse.ArgumentParser("servers.py", description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(required=True)

    def command(what: str, call: Callable[[Servers, argparse.Namespace], object]) -> Any:
        made = commands.add_parser(what)
        made.set_defaults(call=call)
        if what != "list":
            made.add_argument("name", type=valid)
        return made

    starting = command("start", start)
    starting.add_argument("--if-free", action="store_true", help="only where no other server runs")
    starting.add_argument("--poweroff", type=float, metavar="SECONDS", help="after the last server")
    starting.add_argument("--by", default="somebody", help="who starts it, for others to read")
    starting.add_argument("python")
    starting.add_argument("arguments", nargs=argparse.REMAINDER)
    command("endpoint", lambda here, options: here.endpoint(options.name))
    command("list", lambda here, options: here.look())
    stopping = command("stop", stop)
    stopping.add_argument("--grace", type=float, default=ENDING_SECONDS)
    stopping.add_argument("--only", metavar="IDENTITY", help="as `list` shows it")
    command("log", log).add_argument("--follow", action="store_true")

    options = parser.parse_args()
    try:
        answer = options.call(Servers(ROOT), options)
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
