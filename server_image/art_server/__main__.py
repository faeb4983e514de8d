"""`art-server`: serve a base model and its adapters on loopback, and train them.

The token that clients must send is read from the environment variable ART_CLOUD_TOKEN.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import platformdirs
import uvicorn

from art_cloud._version import __version__
from art_cloud.errors import ArtCloudError, ConfigError
from art_cloud.names import check_name, whole_path

log = logging.getLogger("art_server")

TOKEN = "ART_CLOUD_TOKEN"  # noqa: S105
GRACE_SECONDS = 30.0
"""How long the running job may take to finish once the server was asked to stop."""
ANSWERING_SECONDS = 5.0
"""How long requests may take to finish then, before they are ended."""
JOURNAL_MIB = 900
"""The largest body that SQLite keeps: 1e9 bytes."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("art-server", description=__doc__)
    parser.add_argument("--model", help="base model: a folder or a Hugging Face name; without it, "
                        "the first model that is registered decides")  # fmt: skip
    parser.add_argument("--name", default="server", help="of this cluster")
    parser.add_argument("--port", type=_port, default=0, help="on 127.0.0.1; 0: any free one")
    parser.add_argument("--store", help="URL or folder where steps are kept")
    parser.add_argument("--state", type=Path, help="folder for the journal and the cache")
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--vllm-python", metavar="PATH", help="the Python that has vLLM; without "
                        "it, $ART_VLLM_PYTHON or this one")  # fmt: skip
    parser.add_argument("--placement", choices=["resident", "sleep", "separate"],
                        help="of trainer and vLLM on GPUs; without it, what fits")  # fmt: skip
    parser.add_argument("--idle", type=float, metavar="SECONDS", default=math.inf,
                        help="end when nothing happened for so long")  # fmt: skip
    parser.add_argument("--max-body", type=_mebibytes, default=512, metavar="MIB",
                        help=f"largest request that is taken; at most {JOURNAL_MIB}")  # fmt: skip
    parser.add_argument("--version", action="version", version=__version__)
    return parser.parse_args(arguments)


def _port(text: str) -> int:
    if not 0 <= (port := int(text)) <= 65535:
        raise argparse.ArgumentTypeError(f"{port} is not between 0 and 65535")
    return port


def _mebibytes(text: str) -> int:
    if not 1 <= (size := int(text)) <= JOURNAL_MIB:
        raise argparse.ArgumentTypeError(f"{size} is not between 1 and {JOURNAL_MIB}")
    return size


def listen(port: int) -> socket.socket:
    """A listening socket on loopback; `ConfigError` if the port is taken."""
    # asyncio sets TCP_NODELAY only where the protocol is named: 40 ms an answer
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen(2048)
    except OSError as error:
        raise ConfigError(
            f"Port {port} on 127.0.0.1 can't be used: {error.strerror}. Choose another --port, or "
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


async def serve(options: argparse.Namespace, token: str) -> None:
    name = check_name(options.name, "name")
    listener = listen(options.port)
    url = "http://{}:{}".format(*listener.getsockname())

    # after the cheap checks, since these import torch
    from .app import make_app
    from .guardian import Guardian
    from .jobs import Jobs, Journal
    from .programs import Programs
    from .runtime import Runtime, Settings

    home = Path(os.environ.get("ART_CLOUD_HOME") or platformdirs.user_data_dir("art-cloud"))
    state = make_state_folder(options.state or home / "servers" / name)
    store = options.store or (home / "store").as_uri()
    max_bytes = options.max_body << 20

    stop = asyncio.Event()
    journal = Journal(state / "journal.sqlite")  # first: it keeps a second server out of the folder
    runtime = Runtime(
        Settings(
            state=state,
            store=store,
            engine=options.engine,
            vllm_python=options.vllm_python,
            placement=options.placement,
        )
    )
    programs = Programs(runtime, max_bytes)
    jobs = Jobs(journal, programs.by_kind())
    guardian = Guardian(
        options.idle, busy=lambda: jobs.current is not None or runtime.sampling, stop=stop.set
    )
    app = make_app(runtime, jobs, token=token, max_bytes=max_bytes, touch=guardian.touch)
    server = Server(uvicorn.Config(app, log_config=None, access_log=False))
    if options.model:
        await runtime.open_base(whole_path(options.model))
    await programs.reopen(journal.models())

    stop_on_signals(stop)
    serving = asyncio.create_task(server.serve([listener]))
    watching = asyncio.create_task(guardian.watch())
    stopped = asyncio.create_task(stop.wait())
    endpoint = state / "endpoint.json"
    _write_endpoint(endpoint, name, url)
    log.info("art-server %s listens on %s, store %s", __version__, url, runtime.store.url)
    try:
        await asyncio.wait([serving, stopped], return_when=asyncio.FIRST_COMPLETED)
        log.info("stopping")
    finally:
        endpoint.unlink(missing_ok=True)
        watching.cancel()
        stopped.cancel()
        await jobs.stop(GRACE_SECONDS)
        server.should_exit = True
        await asyncio.wait([serving], timeout=ANSWERING_SECONDS)
        await runtime.close()  # ends the requests that are left
        await asyncio.wait([serving], timeout=1)
        server.force_exit = True  # whoever neither sends nor reads on does not keep the server
        await serving
        journal.close()
    log.info("stopped")


def _write_endpoint(path: Path, name: str, url: str) -> None:
    content = {
        "name": name,
        "url": url,
        "pid": os.getpid(),
        "version": __version__,
        "started_at": datetime.now(UTC).isoformat(),
    }
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content))
    partial.replace(path)


def main() -> None:
    options = parse_arguments()
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    for noisy in ("httpx", "transformers", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        token = os.environ.pop(TOKEN, "")
        if not token:
            raise ConfigError(
                f"No token: set {TOKEN} to a secret that clients must send, for example "
                f"{TOKEN}=$(openssl rand -hex 32). There is no server without one."
            )
        asyncio.run(serve(options, token))
    except ArtCloudError as error:
        print(f"art-server: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
