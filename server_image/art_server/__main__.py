"""`art-server`: serve a base model and its adapters on loopback, and train them.

The token that clients must send is read from the environment variable ART_CLOUD_TOKEN.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast
from uuid import uuid4

import platformdirs
import uvicorn

from art_cloud.shared.errors import ArtCloudError, ConfigError, RivalError
from art_cloud.shared.limits import words
from art_cloud.shared.names import check_name, whole_path
from art_cloud.shared.processes import MARK, identity_of
from art_cloud.shared.version import __version__

from .api import doors
from .lifetime import GRACE_SECONDS, Guardian, Limits
from .watchdog import BEAT_SECONDS, LOG_FORMAT, STALL_SECONDS, Watchdog, serve_in_a_child

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from .steps.compute import Compute
    from .steps.jobs import Jobs
    from .steps.journal import Journal
    from .steps.runtime import Runtime, Settings

log = logging.getLogger("art_server")

TOKEN = "ART_CLOUD_TOKEN"  # noqa: S105
BOOT_SECONDS = 1800.0
"""A server that does not listen after this long is given up: nobody could lease it."""
CLOSING_SECONDS = 30.0
"""How long an end may take beside the running job, before the process is ended on the spot."""
ANSWERING_SECONDS = 5.0
"""How long requests may take to finish then, before they are ended."""
JOURNAL_MIB = 900
"""The largest body that SQLite keeps: 1e9 bytes."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """What `art-server` was told. By argparse: pydantic-settings answers a wrong value with a
    traceback, shows `float` where `--help` has SECONDS or USD, and reads the environment too."""
    parser = argparse.ArgumentParser("art-server", description=__doc__)
    parser.add_argument("--model", help="base model: a folder or a Hugging Face name; without it, "
                        "the first model that is registered decides")  # fmt: skip
    parser.add_argument("--name", default="server", help="of this cluster")
    parser.add_argument("--host", choices=["127.0.0.1", "0.0.0.0"],  # noqa: S104
                        default="127.0.0.1",
                        help="0.0.0.0 only in a container whose ports are not open")  # fmt: skip
    parser.add_argument("--port", type=_port, default=0, help="0: any free one")
    parser.add_argument("--store", help="URL or folder where steps are kept")
    parser.add_argument("--state", type=Path, help="folder for the journal and the cache")
    parser.add_argument("--durability", choices=["sync", "async"], default="sync",
                        help="a job is done once its step is in the store, or once it is served "
                        "(the next one waits for the store)")  # fmt: skip
    parser.add_argument(
        "--read-only",
        action="store_true",
        help="serve what others trained, as new as it is in the store",
    )
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--vllm-python", metavar="PATH", help="the Python that has vLLM; without "
                        "it, $ART_VLLM_PYTHON or this one")  # fmt: skip
    parser.add_argument("--placement", choices=["resident", "sleep", "separate"],
                        help="of trainer and vLLM on GPUs; without it, what fits")  # fmt: skip
    parser.add_argument("--lease", type=_above_0, metavar="SECONDS", default=math.inf,
                        help="end when no client asked for anything for so long")  # fmt: skip
    parser.add_argument("--idle", type=_above_0, metavar="SECONDS", default=math.inf,
                        help="end when nothing happened for so long")  # fmt: skip
    parser.add_argument("--budget", type=_above_0, metavar="USD", default=math.inf,
                        help="end before the machine has cost more; needs --price")  # fmt: skip
    parser.add_argument("--price", type=_above_0, metavar="USD", help="of an hour of the machine")
    parser.add_argument("--deadline", type=_above_0, metavar="SECONDS", default=math.inf,
                        help="end before so long after the launch")  # fmt: skip
    parser.add_argument("--launched", type=_above_0, metavar="UNIX_SECONDS",
                        help="start of what is paid for; without it, now")  # fmt: skip
    parser.add_argument("--spent", type=_not_below_0, metavar="SECONDS", default=0.0,
                        help="for which the machine, or one before it, was paid for already, at "
                        "least: for a clock that is behind that of --launched")  # fmt: skip
    parser.add_argument("--stall", type=_above_0, metavar="SECONDS", default=STALL_SECONDS,
                        help="end when what is at work has not moved for so long")  # fmt: skip
    parser.add_argument("--max-body", type=_mebibytes, default=512, metavar="MIB",
                        help=f"largest request that is taken; at most {JOURNAL_MIB}")  # fmt: skip
    parser.add_argument(
        "--wait",
        action="store_true",
        help="import everything, print 'ready', and go on with the environment "
        "that standard input then gives, as a line of JSON",
    )
    parser.add_argument("--version", action="version", version=__version__)
    options = parser.parse_args(arguments)
    if math.isfinite(options.budget) and options.price is None:
        parser.error("--budget needs --price, what an hour of the machine costs")
    return options


def _above_0(text: str) -> float:
    if not (number := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def _not_below_0(text: str) -> float:
    if not (number := float(text)) >= 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return number


def _port(text: str) -> int:
    if not 0 <= (port := int(text)) <= 65535:
        raise argparse.ArgumentTypeError(f"{port} is not between 0 and 65535")
    return port


def _mebibytes(text: str) -> int:
    if not 1 <= (size := int(text)) <= JOURNAL_MIB:
        raise argparse.ArgumentTypeError(f"{size} is not between 1 and {JOURNAL_MIB}")
    return size


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; `ConfigError` if the port is taken."""
    # asyncio sets TCP_NODELAY only where the protocol is named: 40 ms an answer
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(doors.BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"Port {port} on {host} can't be used: {error.strerror}. Choose another --port, or "
            "none for a free one."
        ) from None
    return listener


def make_state_folder(state: Path) -> Path:
    try:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(
            f"The folder {state} can't be made ({error.strerror}). Give another --state."
        ) from None
    return state


def open_journal(state: Path, *, read_only: bool) -> Journal:
    """Raises `ConfigError` if it is another server's, or has what a reader must not do."""
    from .steps.journal import Journal

    journal = Journal(state / "journal.sqlite")
    if read_only and journal.models():
        raise ConfigError(f"{state} is of a server that trains: --read-only needs another --state.")
    return journal


def wait_for_environment() -> None:
    """Import what takes long, then wait to be told the environment: a snapshot of the memory that
    is taken in between has no connection, no device and nothing of the store in it.

    Raises `ConfigError` if standard input ends before.
    """
    from .api import app  # noqa: F401
    from .steps import programs  # noqa: F401

    print("ready", flush=True)
    os.dup2(2, 1)  # nobody reads on
    if not (told := sys.stdin.readline()):
        raise ConfigError("--wait: standard input ended, and nobody said how to go on.")
    os.environ.clear()
    os.environ.update(json.loads(told))


def take_token() -> str:
    """The token out of the environment; it is overwritten where `/proc/PID/environ` and `ps` read
    it, and no child inherits it."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    if there := getenv(TOKEN.encode()):
        ctypes.memset(there, ord("-"), len(ctypes.string_at(there)))
    return os.environ.pop(TOKEN, "")


class Server(uvicorn.Server):
    """uvicorn, but signals are not its business: the running job is finished or left first."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def stop_on_signals(stop: asyncio.Event) -> None:
    """SIGTERM and SIGINT ask to stop; a second SIGINT ends the process on the spot."""
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, interrupt)


def make_server(app: ASGIApp) -> Server:
    """uvicorn over `app`, with limits to its connections."""
    strangers = doors.Strangers(min(doors.MOST_STRANGERS, doors.raise_descriptor_limit() // 2))
    doors.handle_loop_errors(asyncio.get_running_loop())
    return Server(
        uvicorn.Config(
            app,
            http=cast(type[doors.Connection], partial(doors.Connection, strangers)),
            ws="none",
            backlog=doors.BACKLOG,
            timeout_keep_alive=doors.KEEP_ALIVE_SECONDS,
            log_config=None,
            access_log=False,
        )
    )


def limits_of(options: argparse.Namespace) -> Limits:
    return Limits(
        lease=options.lease,
        idle=options.idle,
        budget=options.budget,
        deadline=options.deadline,
        price_per_hour=options.price or 0.0,
    )


def settings_of(options: argparse.Namespace, name: str) -> Settings:
    """Makes the folder of the server's state."""
    from .steps.runtime import Settings

    home = Path(os.environ.get("ART_CLOUD_HOME") or platformdirs.user_data_dir("art-cloud"))
    return Settings(
        state=make_state_folder(options.state or home / "servers" / name),
        store=options.store or (home / "store").as_uri(),
        engine=options.engine,
        vllm_python=options.vllm_python,
        placement=options.placement,
        name=name,
        durability=options.durability,
        read_only=options.read_only,
        max_bytes=options.max_body << 20,
    )


def seconds_spent(options: argparse.Namespace) -> float:
    """For which the machine, or those before it, was paid for already."""
    by_this_clock = 0.0 if options.launched is None else time.time() - options.launched
    return max(by_this_clock, float(options.spent))


async def serve(options: argparse.Namespace, token: str) -> None:
    name = check_name(options.name, "name")
    began, limits, launched_ago = time.monotonic(), limits_of(options), seconds_spent(options)
    if limits.are_over(launched_ago):
        log.warning(
            "%s ends: what its budget or its deadline allows is over. By this machine's clock it "
            "was launched %s ago: if that can't be, set this clock, or that of whoever launched it",
            name,
            words(launched_ago),
        )
        return
    watchdog = Watchdog(options.stall)
    watchdog.end_in(min(BOOT_SECONDS, limits.life - launched_ago), "it does not come up")
    listener = listen(options.host, options.port)
    url = "http://{}:{}".format(*listener.getsockname())

    # after the cheap checks, since these import torch
    from .api.app import make_app
    from .steps.jobs import Jobs
    from .steps.runtime import Runtime

    stop = asyncio.Event()
    settings = settings_of(options, name)
    state = settings.state
    journal = open_journal(state, read_only=options.read_only)  # first: it keeps others out
    jobs = Jobs(journal)
    runtime = Runtime(settings, jobs.note_stored)
    guardian = Guardian(
        limits,
        work=lambda: at_work(jobs, runtime.compute),
        warn=jobs.warn,
        name=name,
        launched_ago=launched_ago + time.monotonic() - began,
        stall=options.stall,
    )
    server = make_server(make_app(runtime, jobs, guardian, token=token))
    if options.model:
        await runtime.compute.open(whole_path(options.model))
    await runtime.programs.reopen(journal.models(), journal.repeated())

    stop_on_signals(stop)
    serving = asyncio.create_task(server.serve([listener]))
    guardian.touch()
    watchdog.end_in(guardian.life_left, "its money or its time is up")
    watchdog.beat({})
    _write_endpoint(endpoint := state / "endpoint.json", name, url)
    log.info("art-server %s listens on %s, store %s", __version__, url, runtime.store.url)
    beating = asyncio.create_task(_beat(watchdog, lambda: at_work(jobs, runtime.compute)))
    grace = GRACE_SECONDS
    try:
        grace = await _until_stopped(serving, stop, guardian, runtime)
        log.info("stopping")
    finally:
        closing = min(grace + CLOSING_SECONDS, guardian.life_left)
        watchdog.end_in(closing, "it does not come to its end")
        endpoint.unlink(missing_ok=True)
        await jobs.stop(grace)
        await runtime.models.close(grace / 2)
        await _stop_serving(server, serving, runtime, min(ANSWERING_SECONDS, grace / 4))
        beating.cancel()
        journal.close()
    log.info("stopped")


def at_work(jobs: Jobs, compute: Compute) -> dict[str, int]:
    """What the server is busy with, each with a number that changes whenever it moves."""
    found = {}
    trained = jobs.moved + compute.moved
    if (job := jobs.current) is not None:
        found[f"the {job.kind} of {job.name} (call {job.id})"] = trained
    if compute.sampling:
        stats = compute.stats()
        # requests that wait for the trainer to leave the memory move as it does
        found["what is sampled"] = stats.moved + (0 if stats.running else trained)
    return found


async def _beat(watchdog: Watchdog, work: Callable[[], dict[str, int]]) -> None:
    while True:
        watchdog.beat(work())
        await asyncio.sleep(BEAT_SECONDS)


async def _until_stopped(
    serving: asyncio.Task[None], stop: asyncio.Event, guardian: Guardian, runtime: Runtime
) -> float:
    """Seconds that the running job may still take, once the server has to end.

    Raises `RivalError` if that is because other servers train all of its models, and what ended its
    engine if that has ended for good.
    """
    stopped = asyncio.create_task(stop.wait())
    watching = asyncio.create_task(guardian.watch())
    fenced = asyncio.create_task(runtime.models.all_fenced())
    dead = asyncio.create_task(runtime.compute.engine_ended())
    try:
        ends = [serving, stopped, watching, fenced, dead]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if dead.done():
            raise await dead
        if fenced.done():
            raise RivalError(await fenced)
        return await watching if watching.done() else GRACE_SECONDS
    finally:
        stopped.cancel()
        watching.cancel()
        fenced.cancel()
        dead.cancel()


async def _stop_serving(
    server: Server, serving: asyncio.Task[None], runtime: Runtime, patience: float
) -> None:
    server.should_exit = True
    await asyncio.wait([serving], timeout=patience)
    await runtime.close()  # ends the requests that are left
    await asyncio.wait([serving], timeout=1)
    server.force_exit = True  # whoever neither sends nor reads on does not keep the server
    await serving


def _write_endpoint(path: Path, name: str, url: str) -> None:
    content = {
        "name": name,
        "url": url,
        "pid": os.getpid(),
        "process": identity_of(os.getpid()),
        "mark": os.environ.get(MARK),
        "version": __version__,
        "started_at": datetime.now(UTC).isoformat(),
    }
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content))
    partial.replace(path)


def main() -> None:
    options = parse_arguments()
    serve_in_a_child()
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)
    for noisy in ("boto3", "botocore", "httpx", "transformers", "uvicorn.access", "uvicorn.error"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # "Invalid HTTP request received", of whoever connects
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    os.umask(0o077)
    try:
        if options.wait:
            wait_for_environment()
        token = take_token()
        if not token:
            raise ConfigError(
                f"No token: set {TOKEN} to a secret that clients must send, for example "
                f"{TOKEN}=$(openssl rand -hex 32). There is no server without one."
            )
        os.environ.setdefault(MARK, uuid4().hex)  # before anything is started
        asyncio.run(serve(options, token))
    except ArtCloudError as error:
        print(f"art-server: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
