#!/usr/bin/env python3
"""What art-cloud does on a machine that you can log in to. By hand: see README.md.

    box.py check [PYTHON]                       what the machine has
    box.py wheels KEY                           the folder for a wheel that is to be installed
    box.py install KEY REQUIREMENT              an environment of that name, made once
    box.py start [--if-free] NAME PYTHON [ARGUMENT...]     art-server, with those arguments
    box.py endpoint NAME                        where its server listens, or how it ended
    box.py list                                 all servers, and what dead ones left running
    box.py stop NAME                            end it, and all that it started
    box.py log NAME [--follow]                  what it wrote

Answers are JSON on standard output; a failure is a sentence on standard error and exit code 1 (3:
there is nothing of that name). `start` reads a JSON object of environment variables from standard
input: secrets never stand in arguments or on disk.

Everything lies in ~/.art-cloud, which only its owner can read: `envs/KEY`, and for each cluster
`clusters/NAME` with the server's state, `server.log`, `endpoint.json` (written by the server) and
`session.json`: by which login's token it was started, and which processes are its own.

Needs Linux, Python 3.8 and nothing else.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import platform
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path.home() / ".art-cloud"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
POLL_SECONDS = 0.2
LOCK_SECONDS = 30.0
"""Far above the second for which a start holds the lock."""
ENDPOINT_SECONDS = 10.0
"""How long `endpoint` waits before it says that the server still boots."""
ENDING_SECONDS = 60.0
"""How long a server may take to finish or abandon its step before it is killed."""
KILL_SECONDS = 10.0
LOG_LINES = 15


class BoxError(Exception):
    code = 1


class NoSuchError(BoxError):
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


# ---------------------------------------------------------------- what the machine has


def check(options: argparse.Namespace) -> dict[str, Any]:
    memory = dict(
        line.split(":") for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line
    )
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "memory_bytes": int(memory["MemAvailable"].split()[0]) * 1024,
        "disk_bytes": shutil.disk_usage(ROOT if ROOT.exists() else Path.home()).free,
        "time": time.time(),
        "art_cloud": _version_of(options.python) if options.python else None,
        "environments": sorted(done.parent.name for done in (ROOT / "envs").glob("*/installed")),
        **_gpus(),
    }


def _version_of(python: str) -> str:
    """The version of art-cloud that an environment has, with its server."""
    command = "import art_cloud, art_server; print(art_cloud.__version__)"
    try:
        found = subprocess.run(
            [python, "-P", "-c", command], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise BoxError(f"{python} can't be run: {error.strerror}") from None
    if found.returncode:
        why = found.stderr.strip().splitlines()[-1:] or ["it says nothing"]
        raise BoxError(f"{python} has no art-cloud[server]: {why[0]}")
    return found.stdout.strip()


def _gpus() -> dict[str, Any]:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    if shutil.which(query[0]) is None:
        return {"gpus": [], "gpu_problem": None}
    found = subprocess.run(query, capture_output=True, text=True, check=False)
    if found.returncode:
        return {"gpus": [], "gpu_problem": (found.stdout + found.stderr).strip()}
    rows = [[part.strip() for part in line.split(",")] for line in found.stdout.splitlines()]
    gpus = [{"name": name, "memory": memory, "driver": driver} for name, memory, driver in rows]
    return {"gpus": gpus, "gpu_problem": None}


# ---------------------------------------------------------------- an environment for the server


def wheels(options: argparse.Namespace) -> dict[str, Any]:
    folder = ROOT / "wheels" / checked(options.key)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return {"path": str(folder)}


def install(options: argparse.Namespace) -> dict[str, Any]:
    folder = ROOT / "envs" / checked(options.key)
    done, python = folder / "installed", folder / "bin" / "python"
    with lock(ROOT / "envs" / f"{options.key}.lock", wait=None):
        if not done.exists():
            uv = _uv()
            environment = dict(os.environ)
            if _gpus()["gpus"]:  # the build of torch that the driver can run
                environment.setdefault("UV_TORCH_BACKEND", "auto")
            for command in (
                [uv, "venv", "--quiet", "--clear", "--python", ">=3.11", str(folder)],
                [uv, "pip", "install", "--python", str(python), options.requirement],
            ):
                _run(command, environment)
            done.touch()
    return {"python": str(python)}


def _uv() -> str:
    """uv, which also gets a Python where the machine's own is too old."""
    tools = ROOT / "tools"
    places = [os.environ.get("PATH", ""), *map(str, (Path.home() / ".local/bin", tools / "bin"))]
    found = shutil.which("uv", path=os.pathsep.join(places))
    if found is None:
        _run([sys.executable, "-m", "venv", str(tools)], dict(os.environ))
        _run([str(tools / "bin" / "pip"), "install", "--quiet", "uv"], dict(os.environ))
        found = str(tools / "bin" / "uv")
    return found


def _run(command: list[str], environment: dict[str, str]) -> None:
    ended = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if ended.returncode:
        lines = ended.stdout.decode(errors="replace").splitlines()[-LOG_LINES:]
        raise BoxError("\n".join([f"{' '.join(command)} failed:", *lines]))


# ---------------------------------------------------------------- servers


def start(options: argparse.Namespace) -> dict[str, Any]:
    environment: dict[str, str] = json.load(sys.stdin)
    owner = hashlib.sha256(environment.get("ART_CLOUD_TOKEN", "").encode()).hexdigest()
    name, folder = options.name, ROOT / "clusters" / checked(options.name)
    with lock(ROOT / "lock"):
        running = servers()
        if name in running:
            return {"state": "exists", "owner": _session(name).get("owner")}
        if options.if_free and running:
            return {"state": "busy", "with": sorted(running)}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            (folder / "server.log").replace(folder / "server.1.log")
        with suppress(FileNotFoundError):
            (folder / "endpoint.json").unlink()
        command = [options.python, "-P", "-m", "art_server", "--state", str(folder)]
        with (folder / "server.log").open("ab") as log:
            try:
                process = subprocess.Popen(
                    [*command, *options.arguments],
                    env={**os.environ, **environment},
                    cwd=str(Path.home()),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as error:
                raise BoxError(f"{options.python} can't be started: {error.strerror}") from None
        session = {"owner": owner, "session": process.pid, "boot": _boot()}
        _write(folder / "session.json", json.dumps(session))
        while name not in servers() and process.poll() is None:
            time.sleep(POLL_SECONDS / 10)  # until others see it
    return {"state": "started", "owner": owner}


def endpoint(options: argparse.Namespace) -> dict[str, Any]:
    give_up = time.monotonic() + ENDPOINT_SECONDS
    while True:
        with lock(ROOT / "lock"):
            server = servers().get(checked(options.name))
        leader = server.leader if server else None
        found = _read_json(ROOT / "clusters" / options.name / "endpoint.json")
        if leader is None:
            return {"state": "ended", "log": _last_lines(options.name)}
        if found.get("pid") == leader.pid:
            return {"state": "running", "url": found["url"]}
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
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    age = uptime - process.started / os.sysconf("SC_CLK_TCK")
    listens = _read_json(ROOT / "clusters" / name / "endpoint.json").get("pid") == process.pid
    return {
        "name": name,
        "state": "ending" if server.leader is None else "running" if listens else "starting",
        "started_at": time.time() - age,
        "pid": process.pid,
        "owner": _session(name).get("owner"),
    }


def stop(options: argparse.Namespace) -> dict[str, Any]:
    name = checked(options.name)
    if not ROOT.exists():
        return {"ended": False}
    with lock(ROOT / "lock"):
        first = servers().get(name)
    if first is None:
        return {"ended": False}
    now = time.monotonic()
    kill_at, give_up = now + options.grace, now + options.grace + KILL_SECONDS
    _signal([first.leader] if first.leader else first.processes, signal.SIGTERM)
    while left := _left(name, first.processes):
        now = time.monotonic()
        if now > give_up:
            pids = ", ".join(str(process.pid) for process in left)
            raise BoxError(f"{name} does not end: still there are processes {pids}")
        if now > kill_at or first.leader not in left:
            _signal(left, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    return {"ended": True}


def _left(name: str, known: list[Process]) -> list[Process]:
    """What still runs of the server `name` and of its processes that were `known` before."""
    server = servers().get(name)
    now = set(map(_identity, processes()))
    found = server.processes if server else []
    return [*found, *(one for one in known if _identity(one) in now and one not in found)]


def _identity(process: Process) -> tuple[int, int]:
    return process.pid, process.started


def _signal(targets: list[Process], number: signal.Signals) -> None:
    for process in targets:
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            continue
        except PermissionError:
            raise BoxError(
                f"process {process.pid} is another user's: end it as that user"
            ) from None


def log(options: argparse.Namespace) -> None:
    """Follows until the server ended, or nobody reads any more."""
    path = ROOT / "clusters" / checked(options.name) / "server.log"
    if not path.exists():
        raise NoSuchError(f"there is no log of a cluster {options.name} at {path}")
    reader = select.poll()
    reader.register(sys.stdout, 0)  # 0: only that it was closed
    with path.open("rb") as file:
        while True:
            alive = options.follow and options.name in servers()
            shutil.copyfileobj(file, sys.stdout.buffer)
            sys.stdout.buffer.flush()
            if not alive or reader.poll(POLL_SECONDS * 1000):
                return


# ---------------------------------------------------------------- processes


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

    A server is known by its arguments. What else runs in the session that it leads belongs to it,
    also when the server itself has gone: its id is not given away while its session has members.
    """
    leaders: dict[str, Process] = {}
    sessions: dict[int, list[Process]] = {}
    for process in processes():
        sessions.setdefault(process.session, []).append(process)
        name = _cluster_of(process.command)
        if name and (name not in leaders or process.session == process.pid):
            leaders[name] = process
    found = {
        name: Server(leader, [leader, *(p for p in sessions.get(leader.pid, []) if p != leader)])
        for name, leader in leaders.items()
    }
    for path in (ROOT / "clusters").glob("*/session.json"):
        name, session = path.parent.name, _session(path.parent.name)
        left = sessions.get(session.get("session", 0), [])
        ours = session.get("boot") == _boot() and all(p.pid != session["session"] for p in left)
        if name not in found and left and ours:
            found[name] = Server(None, left)
    return found


def _cluster_of(command: list[str]) -> str | None:
    is_server = any(part == "art_server" or Path(part).name == "art-server" for part in command)
    if not is_server or "--state" not in command[:-1]:
        return None
    folder = Path(command[command.index("--state") + 1])
    return folder.name if folder.parent == ROOT / "clusters" else None


def _session(name: str) -> dict[str, Any]:
    return _read_json(ROOT / "clusters" / name / "session.json")


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


# ---------------------------------------------------------------- files


@contextmanager
def lock(path: Path, wait: float | None = LOCK_SECONDS) -> Iterator[None]:
    """Hold a lock that all logins share; `wait` None: for as long as it takes."""
    for folder in (ROOT, path.parent):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    give_up = time.monotonic() + (wait or 0)
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (fcntl.LOCK_NB if wait is not None else 0))
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    message = f"{path} is locked by another process: `fuser {path}` names it"
                    raise BoxError(message) from None
                time.sleep(POLL_SECONDS)
        yield


def checked(name: str) -> str:
    if not NAME.fullmatch(name) or ".." in name:
        raise BoxError(f"{name!r} is not a valid name")
    return name


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError:
        raise BoxError(f"{path} is not what art-cloud writes") from None
    return content


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)


def _last_lines(name: str) -> list[str]:
    try:
        with (ROOT / "clusters" / name / "server.log").open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
            return file.read().decode(errors="replace").splitlines()[-LOG_LINES:]
    except FileNotFoundError:
        return []


def main() -> None:
    os.umask(0o077)
    parser = argparse.ArgumentParser("box.py", description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(required=True)

    def command(name: str, call: Any, *arguments: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name)
        made.set_defaults(call=call)
        for argument in arguments:
            made.add_argument(argument)
        return made

    command("check", check).add_argument("python", nargs="?")
    command("wheels", wheels, "key")
    command("install", install, "key", "requirement")
    starting = command("start", start, "name", "python")
    starting.add_argument("--if-free", action="store_true", help="only where no other server runs")
    starting.add_argument("arguments", nargs=argparse.REMAINDER)
    command("endpoint", endpoint, "name")
    command("list", list_)
    command("stop", stop, "name").add_argument("--grace", type=float, default=ENDING_SECONDS)
    command("log", log, "name").add_argument("--follow", action="store_true")

    options = parser.parse_args()
    try:
        answer = options.call(options)
    except BoxError as failure:
        print(failure, file=sys.stderr)
        sys.exit(failure.code)
    if answer is not None:
        print(json.dumps(answer))


if __name__ == "__main__":
    main()
