"""From training to serving: an adapter is pulled, and stock vLLM serves it as the page says."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from typer.testing import CliRunner

import art_cloud as art
from art_cloud.cli.main import app

from ..contract.engines import vllm_python
from ..rigs.server_process import ServerProcess
from ..rigs.synthetic import as_groups, batch
from ..rigs.waiting import wait_until

pytestmark = pytest.mark.xdist_group("vllm")

MESSAGES: Any = [{"role": "user", "content": "Your move?"}]
EXACT = ("--dtype", "float32", "--max-model-len", "512", "--kv-cache-memory-bytes", "134217728")
"""The precision of the server under test, and what fits on this machine."""
START_SECONDS = 300.0


@contextmanager
def stock_vllm(command: str, folder: Path) -> Iterator[str]:
    """Run `vllm serve ...` in `folder`; its URL.

    vLLM's build for a CPU is of another name than its `vllm` command looks for: what that command
    runs is started by itself.
    """
    program, serve, base, *arguments = shlex.split(command)
    assert (program, serve) == ("vllm", "serve")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (folder / "vllm.log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(vllm_python(), "-m", "vllm.entrypoints.launchers.api_server.entry"),
                *("--model", base, *arguments, *EXACT, "--host", "127.0.0.1", "--port", str(port)),
            ],
            cwd=folder,
            stdout=log,
            stderr=log,
            process_group=0,
            env=os.environ
            | {
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_NO_USAGE_STATS": "1",
                "TORCHDYNAMO_DISABLE": "1",
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
            },
        )
    url = f"http://127.0.0.1:{port}"

    def healthy() -> bool:
        assert process.poll() is None, (folder / "vllm.log").read_text()
        try:
            return httpx.get(f"{url}/health", trust_env=False).is_success
        except httpx.TransportError:
            return False

    try:
        wait_until(healthy, START_SECONDS)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # its engine is a process of its own
        process.wait()


@pytest.mark.slow
async def test_stock_vllm_serves_what_was_trained(
    server: ServerProcess,
    backend: art.Backend,
    model: art.TrainableModel,
    client: openai.AsyncOpenAI,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Greedy answers of both are the same, token for token, and are not those of the base."""
    vllm_python()
    for seed in range(3):
        await backend.train(model, as_groups(batch(model.full_name, seed)), learning_rate=0.05)
    monkeypatch.chdir(tmp_path)
    pulled = CliRunner().invoke(
        app,
        ["checkpoints", "pull", str(model.full_name), "--to", "best", "--store", str(server.store)],
    )
    assert pulled.exit_code == 0, pulled.output
    printed = re.search(r"^Serve it: (.*)$", pulled.stdout, re.MULTILINE)
    assert printed

    async def greedy(to: openai.AsyncOpenAI, name: str) -> str:
        answer = await to.chat.completions.create(
            model=name, messages=MESSAGES, max_tokens=24, temperature=0
        )
        return str(answer.choices[0].message.content)

    with stock_vllm(printed[1], tmp_path) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as vllm:
            served = await greedy(vllm, model.name)
            base = await greedy(vllm, model.base_model)
    assert served == await greedy(client, model.get_inference_name(3))
    assert served != base
