"""`art-server --engine vllm` for benchmarks, and a way to the very vLLM behind it."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
from art_server.inference.vllm.process import VllmSettings, find_python
from art_server.tiny_model import make_tiny_model

import art_cloud as art
from art_cloud.shared.protocol import Durability

ROOT = Path(__file__).parents[1]
STARTING_SECONDS = 180.0
STOCK = "vllm.entrypoints.launchers.api_server.entry"


def _serve(scratch: Path, arguments: list[str], token: str) -> None:
    """The server, which also says where its vLLM is, when an optimizer step has ended, and how long
    the canary took (seconds)."""
    from art_server.__main__ import main
    from art_server.inference.vllm.process import VllmProcess
    from art_server.steps.canary import Canary
    from art_server.training import Trainer

    start, optim_step, sample = VllmProcess.start, Trainer.optim_step, Canary.sample

    async def start_and_tell(self: VllmProcess) -> None:
        await start(self)
        note = {"socket": str(self.address), "key": self.key}
        (scratch / "vllm.json").write_text(json.dumps(note))

    def step_and_tell(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        metrics = optim_step(self, *args, **kwargs)
        (scratch / "stepped").write_text(repr(time.monotonic()))
        return metrics

    async def sample_and_tell(self: Canary, *args: Any) -> Any:
        started = time.monotonic()
        sampled = await sample(self, *args)
        (scratch / "canary").write_text(repr(time.monotonic() - started))
        return sampled

    Canary.sample = sample_and_tell
    VllmProcess.start = start_and_tell
    Trainer.optim_step = step_and_tell
    with (scratch / "server.log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ["ART_CLOUD_TOKEN"] = token
    sys.argv = ["art-server", *arguments]
    main()


class Servers:
    """`gateway` and `vllm` are sessions of one kind; `policy` and `alias` name the same adapter."""

    gateway: aiohttp.ClientSession
    vllm: aiohttp.ClientSession
    backend: art.Backend
    policy: str
    alias: str

    def __init__(self, scratch: Path, durability: Durability = "sync") -> None:
        scratch.mkdir(exist_ok=True)
        self.scratch = scratch
        self.folder = make_tiny_model(scratch / "tiny")
        self.model = art.TrainableModel(name="bench", project="bench", base_model=str(self.folder))
        os.environ.setdefault("ART_VLLM_PYTHON", str(ROOT / ".venv-vllm" / "bin" / "python"))
        token = secrets.token_hex(16)
        state = scratch / "state"
        arguments = ["--engine", "vllm", "--model", str(self.folder), "--state", str(state)]
        arguments += ["--store", str(scratch / "store"), "--durability", durability]
        self._token, self._endpoint = token, state / "endpoint.json"
        self._process = multiprocessing.get_context("spawn").Process(
            target=_serve, args=(scratch, arguments, token)
        )

    async def __aenter__(self) -> Servers:
        self._process.start()
        give_up = time.monotonic() + STARTING_SECONDS
        while not self._endpoint.exists():
            assert self._process.is_alive(), self._log()
            assert time.monotonic() < give_up, self._log()
            await asyncio.sleep(0.1)
        url = json.loads(self._endpoint.read_text())["url"]
        note = json.loads((self.scratch / "vllm.json").read_text())
        self.gateway = _session(
            url, self._token, aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
        )
        self.vllm = _session(
            "http://vllm", note["key"], aiohttp.UnixConnector(note["socket"], limit=0)
        )
        self.backend = art.Backend(url, self._token)
        await self.model.register(self.backend)
        self.policy = self.model.get_inference_name()
        async with self.vllm.get("/v1/models") as answer:
            names = [one["id"] for one in (await answer.json())["data"]]
        self.alias = next(name for name in names if name.startswith(self.policy))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.gateway.close()
        await self.vllm.close()
        self._process.terminate()
        await asyncio.to_thread(self._process.join, 60)

    def _log(self) -> str:
        return (self.scratch / "server.log").read_text()


class StockVllm:
    """vLLM as it comes, on a socket of its own, with the flags and variables that ours has."""

    def __init__(self, scratch: Path, model: Path) -> None:
        scratch.mkdir(exist_ok=True)
        self._log, socket = scratch / "vllm.log", scratch / "socket"
        settings = VllmSettings(
            find_python(None), str(model), "float32", 2048, slots=4, kv_cache_bytes=2**28
        )
        python, dash_p, _, *flags = settings.command(socket)
        self._command = [python, dash_p, "-m", STOCK, *flags]
        self._environment = settings.environment(os.environ)
        self._socket = socket

    async def __aenter__(self) -> aiohttp.ClientSession:
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, env=self._environment, stdout=log, stderr=subprocess.STDOUT
            )
        connector = aiohttp.UnixConnector(str(self._socket), limit=0)
        self._session = _session("http://vllm", "", connector)
        give_up = time.monotonic() + STARTING_SECONDS
        while not await self._healthy():
            assert self._process.returncode is None, self._log.read_text()
            assert time.monotonic() < give_up, self._log.read_text()
            await asyncio.sleep(0.1)
        return self._session

    async def _healthy(self) -> bool:
        try:
            async with self._session.get("/health") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()
        self._process.terminate()
        await self._process.wait()


def _session(url: str, token: str, connector: aiohttp.BaseConnector) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        url,
        connector=connector,
        headers={"Authorization": f"Bearer {token}"},
        timeout=aiohttp.ClientTimeout(total=None),
    )
