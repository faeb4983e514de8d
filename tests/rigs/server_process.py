"""The real server as a process of its own, for tests that talk to it, end it, kill it.

Servers are forked from a process that has imported torch and transformers already: what takes ten
seconds of a processor is done once for each worker of pytest.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import resource
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import httpx

import art_cloud as art
from art_cloud.client.http import ServerClient
from art_cloud.shared.protocol import VERSION, ServerInfo
from art_cloud.shared.version import __version__

from .waiting import wait_until

TOKEN = "a-token-for-tests"
CLONE_NEWNET = 0x40000000
STARTING_SECONDS, ENDING_SECONDS = 300.0, 60.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["art_server.api.app", "art_server.steps.programs", "transformers.models.qwen3.modeling_qwen3"]
)


def _main(
    log: Path,
    arguments: list[str],
    token: str | None,
    largest_file: int | None,
    namespace: str | None,
    environment: dict[str, str],
    prepare: Callable[[], None] | None,
) -> None:
    from art_server.__main__ import main
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())  # its own would be of multiprocessing's, lost when killed
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if namespace is not None:
        with open(namespace) as there:
            assert ctypes.CDLL(None).setns(there.fileno(), CLONE_NEWNET) == 0
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))
    os.environ.pop("ART_CLOUD_TOKEN", None)
    if token is not None:
        os.environ["ART_CLOUD_TOKEN"] = token
    os.environ |= environment
    if prepare is not None:
        prepare()
    sys.argv = ["art-server", *arguments]
    main()


def show_as(*command: str) -> None:
    """Have this process be seen as started by `command`: a fork has that of its parent."""
    numbers = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(numbers[45]), int(numbers[46])
    shown = b"".join(os.fsencode(part) + b"\0" for part in command)
    assert len(shown) < end - start
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, shown, len(shown))


class ServerProcess:
    """`art-server` in `folder`: its state and, unless told otherwise, its store.

    It may be ended or killed and started again: state, store and port are kept.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str | Path,
        store: Path | None = None,
        token: str | None = TOKEN,
    ) -> None:
        self.store_url: str | None = None
        """A store that is no folder."""
        self.state = folder / "state"
        self.store = store or folder / "store"
        self.port = 0
        self.log = folder / "server.log"
        self.largest_file: int | None = None
        """Bytes: what a nearly full disk looks like to the process."""
        self.namespace: str | None = None
        """The path of a network namespace to run in."""
        self.environment: dict[str, str] = {}
        """More variables, of the next start."""
        self.prepare: Callable[[], None] | None = None
        """Called in the process before anything else, at the next start."""
        self._arguments = [str(argument) for argument in arguments]
        self._token = token
        self._process: multiprocessing.process.BaseProcess | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self.log.touch()

    def launch(self) -> ServerProcess:
        """Start the process, without waiting for it to listen."""
        arguments = [
            *("--port", str(self.port), "--state", str(self.state)),
            *("--store", self.store_url or str(self.store)),
            *self._arguments,
        ]
        self._process = _context.Process(
            target=_main,
            args=(
                *(self.log, arguments, self._token, self.largest_file, self.namespace),
                *(self.environment, self.prepare),
            ),
        )
        self._process.start()
        return self

    def start(self) -> ServerProcess:
        self.launch()
        wait_until(lambda: self._listens() or not self.process.is_alive(), STARTING_SECONDS)
        assert self._listens(), self.output
        return self

    @property
    def process(self) -> multiprocessing.process.BaseProcess:
        assert self._process is not None
        return self._process

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def output(self) -> str:
        return self.log.read_text()

    def _listens(self) -> bool:
        try:
            endpoint = json.loads((self.state / "endpoint.json").read_text())
        except FileNotFoundError:
            return False
        self.port = int(endpoint["url"].rpartition(":")[2])
        return bool(endpoint["pid"] == self.pid)  # else it is of one that was killed

    def kill(self) -> None:
        self.process.kill()
        self.ended()

    def terminate(self) -> int:
        self.process.terminate()
        return self.ended()

    def ended(self) -> int:
        """The exit code, waited for."""
        self.process.join(ENDING_SECONDS)
        assert self.process.exitcode is not None, self.output
        return self.process.exitcode

    def __enter__(self) -> ServerProcess:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.is_alive():
            self.kill()

    def lose_the_disk(self) -> None:
        """All that the server kept outside of its store."""
        shutil.rmtree(self.state)

    def backend(self, *, patience: float = 60.0) -> art.Backend:
        return art.Backend(self.url, TOKEN, patience=patience)

    def client(self) -> ServerClient:
        """The calls of the client library, one by one."""
        return ServerClient(self.url, TOKEN, patience=60.0)

    def http(self, token: str = TOKEN) -> httpx.AsyncClient:
        """Plain HTTP: nothing is tried again."""
        return httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}", VERSION: __version__},
            timeout=60.0,
            trust_env=False,
        )

    async def info(self) -> ServerInfo:
        async with self.backend() as backend:
            return await backend.info()
