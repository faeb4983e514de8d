"""A `vllm` server as a process of its own: on a Unix socket that only this user reaches.

It lives in a process group of its own, and never longer than the process that started it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from art_cloud.shared.errors import ConfigError, ServerUnavailableError

log = logging.getLogger("vllm")

MAIN = Path(__file__).with_name("patches.py")
PYTHON = "ART_VLLM_PYTHON"
BASE = "base"
"""The name under which vLLM serves the base model."""
START_SECONDS = 1800.0
"""How long vLLM may take to load a model. Meanwhile, its log says what it does."""
SAY_SECONDS = 5.0
END_SECONDS = 10.0
METRICS_SECONDS = 10.0
KEEP_ALIVE_SECONDS = 300
"""How long an idle connection to vLLM is kept. vLLM keeps it for twice as long, so that it never
closes one while a request is on its way."""
LINE_BYTES = 1 << 20
LAST_LINES = 15

_LINE = re.compile(
    r"(?:\(\S+ pid=\d+\) )*(?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL):? +"
    r"(?:\d\d-\d\d [\d:]+ )?)?(?:\[[\w.]+:\d+\] )?(?P<text>.*)"
)
_TOKENS = re.compile(r"^vllm:(?:prompt|generation)_tokens_total(?:\{[^}]*\})? (\S+)", re.MULTILINE)
_NOISE = re.compile(r"Route: |^[\s█▄▀]*$|█|non-default args|Initializing a V1 LLM engine")


@dataclass(frozen=True)
class VllmSettings:
    """Settings that vLLM is started with. Sizes are in bytes."""

    python: Path
    model: str
    dtype: str
    context_length: int
    slots: int
    """How many adapters vLLM holds at once."""
    max_rank: int = 16
    """The largest rank of an adapter; the engine raises it when one needs more."""
    kv_cache_bytes: int | None = None
    """Bytes for keys and values; None: what `gpu_fraction` leaves."""
    gpu_fraction: float | None = None
    """The share of the GPU's memory for weights, adapters, keys and values; None: on a CPU."""
    gpu: int | None = None
    """Which GPU; None: the first one that is visible."""
    can_sleep: bool = False

    def command(self, socket: Path) -> list[str]:
        command = [str(self.python), "-P", str(MAIN), "--model", self.model, "--uds", str(socket)]
        command += ["--served-model-name", BASE, "--dtype", self.dtype]
        command += ["--max-model-len", str(self.context_length), "--generation-config", "vllm"]
        command += ["--enable-lora", "--max-lora-rank", str(self.max_rank)]
        command += ["--max-loras", str(self.slots), "--max-cpu-loras", str(self.slots)]
        command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
        command += ["--max-logprobs", "21", "--disable-uvicorn-access-log"]
        if self.kv_cache_bytes is not None:
            command += ["--kv-cache-memory-bytes", str(self.kv_cache_bytes)]
        if self.gpu_fraction is not None:
            command += ["--gpu-memory-utilization", f"{self.gpu_fraction:.3f}"]
        else:
            # vLLM dies of a request with a seed whose prompt it cuts into chunks
            # (vllm/v1/worker/gpu_model_runner.py: a CPU's generator has no offset)
            command += ["--no-enable-chunked-prefill"]
            command += ["--max-num-batched-tokens", str(max(4096, self.context_length))]
        if self.can_sleep and self.gpu_fraction is not None:
            command += ["--enable-sleep-mode"]
        return command

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        environment = {
            **given,
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",  # each process imports patches.py
            "VLLM_USE_V2_MODEL_RUNNER": "0",  # patches.py knows V1
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(2 * KEEP_ALIVE_SECONDS),
            "NO_COLOR": "1",
        }
        if self.can_sleep:
            environment["VLLM_SERVER_DEV_MODE"] = "1"
        if self.gpu is not None:
            visible = given.get("CUDA_VISIBLE_DEVICES")
            environment["CUDA_VISIBLE_DEVICES"] = (
                visible.split(",")[self.gpu] if visible else str(self.gpu)
            )
        if self.gpu_fraction is None:
            environment |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # no process for one worker
            environment.setdefault("OMP_NUM_THREADS", "1")  # the trainer is on the same cores
        return environment


def find_python(given: str | None) -> Path:
    """The Python that has vLLM: `given`, else `ART_VLLM_PYTHON`, else this one.

    Raises `ConfigError` that says how to install it.
    """
    if chosen := given or os.environ.get(PYTHON):
        python = Path(chosen).absolute()
        probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
        try:
            found = subprocess.run([python, "-c", probe], capture_output=True, check=False)
        except OSError as error:
            raise ConfigError(f"{python} can't be run ({error.strerror}). {_HOW}") from None
        if found.returncode:
            raise ConfigError(f"{python} has no vllm. {_HOW}")
        return python
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(f"vLLM is not installed here. {_HOW}")
    return Path(sys.executable)


_HOW = (
    "On a GPU machine: pip install 'art-cloud[server,vllm]'. On a CPU, in an environment of its "
    f"own: make .venv-vllm. Then name its Python: --vllm-python, or {PYTHON}."
)


class VllmProcess:
    """One run of the vLLM server. It listens at `address` and asks for `key`."""

    def __init__(self, settings: VllmSettings) -> None:
        self.settings = settings
        self.key = secrets.token_hex(16)
        self._folder = Path(tempfile.mkdtemp(prefix="art-vllm-"))  # short: a socket's path is
        self.address = self._folder / "socket"
        self.said = 0
        """Counts the lines that vLLM wrote and the requests for its health: a start that makes no
        progress is noticed by it."""
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start it and wait until it answers. Raises `ServerUnavailableError` with the end of its
        log if it does not come up."""
        environment = self.settings.environment(os.environ) | {"VLLM_API_KEY": self.key}
        self._process = await asyncio.create_subprocess_exec(
            *self.settings.command(self.address),
            cwd=self._folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
            limit=LINE_BYTES,
        )
        self._reading = asyncio.create_task(self._read())
        log.info("starting (pid %d) with %s", self.pid, self.settings.python)
        try:
            await self._until_healthy()
        except BaseException:
            await self.end()
            raise

    async def wait(self) -> int:
        """Wait until vLLM has ended; return its exit code."""
        assert self._process is not None
        return await self._process.wait()

    async def end(self) -> None:
        """End vLLM: SIGTERM, then SIGKILL to what is left of its process group."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            self._process.terminate()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.wait(), END_SECONDS)
        self.kill()
        await self.wait()
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=1)
            self._reading.cancel()
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            "http://vllm",
            connector=aiohttp.UnixConnector(
                str(self.address), limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS
            ),
            headers={"Authorization": f"Bearer {self.key}"},
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def tokens(self, session: aiohttp.ClientSession) -> float:
        """How many tokens vLLM has read and sampled."""
        timeout = aiohttp.ClientTimeout(total=METRICS_SECONDS)
        async with session.get("/metrics", timeout=timeout) as answer:
            return sum(map(float, _TOKENS.findall(await answer.text())))

    def last_lines(self) -> str:
        return "\n".join(f"  {line}" for line in self._last) or "  (nothing)"

    async def _until_healthy(self) -> None:
        started = said = time.monotonic()
        async with self.session() as session:
            while not await _is_healthy(session):
                now = time.monotonic()
                if self._process is None or self._process.returncode is not None:
                    code = self._process.returncode if self._process else None
                    raise ServerUnavailableError(
                        f"vLLM ended with exit code {code} while it started. Its last lines:\n"
                        f"{self.last_lines()}\nMend what they name, then start it again."
                    )
                if now - started > START_SECONDS:
                    raise ServerUnavailableError(
                        f"vLLM was not ready after {START_SECONDS:.0f} s. Its last lines:\n"
                        f"{self.last_lines()}"
                    )
                if now - said > SAY_SECONDS:
                    said = now
                    self.said += 1
                    doing = self._last[-1] if self._last else "nothing said yet"
                    log.info("not ready yet after %.0f s: %s", now - started, doing)
                await asyncio.sleep(0.1)
        log.info("ready after %.0f s", time.monotonic() - started)

    async def _read(self) -> None:
        """Copy vLLM's output into this process's log."""
        assert self._process is not None
        assert self._process.stdout is not None
        async for raw in self._process.stdout:
            self.said += 1
            match = _LINE.match(raw.decode(errors="replace").rstrip())
            assert match is not None
            text = match["text"]
            if _NOISE.search(text):
                continue
            self._last.append(text)
            level = getattr(logging, match["level"]) if match["level"] else logging.INFO
            log.log(level, "%s", text)


async def _is_healthy(session: aiohttp.ClientSession) -> bool:
    try:
        async with session.get("/health") as answer:
            return answer.status == 200
    except (aiohttp.ClientError, OSError):
        return False
