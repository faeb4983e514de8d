"""The real server over real vLLM: rollouts, steps, and nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import pytest_asyncio

import art_cloud as art
from art_cloud.shared.protocol import POLICY

from ..contract.engines import vllm_python
from ..rigs.server_process import ServerProcess
from ..rigs.waiting import until, wait_until

pytestmark = pytest.mark.xdist_group("vllm")

MESSAGES: Any = [{"role": "user", "content": "Your move?"}]


@pytest.fixture
def server(tiny_model: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    arguments = ["--engine", "vllm", "--vllm-python", vllm_python(), "--model", tiny_model]
    with ServerProcess(tmp_path, *arguments, "--placement", "sleep") as server:
        yield server


@pytest_asyncio.fixture
async def model(server: ServerProcess, tiny_model: Path) -> art.TrainableModel:
    return art.TrainableModel(name="agent", project="game", base_model=str(tiny_model))


def vllm_processes(server: ServerProcess) -> list[psutil.Process]:
    found = psutil.Process(server.pid).children(recursive=True)
    assert any(is_vllm(process) for process in found)
    return found


def is_vllm(process: psutil.Process) -> bool:
    return "inference/vllm/patches.py" in "".join(process.cmdline())


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


async def rollout(client: openai.AsyncOpenAI, model: art.TrainableModel) -> art.Trajectory:
    answer = await client.chat.completions.create(
        model=model.get_inference_name(), messages=MESSAGES, max_tokens=16
    )
    choice = answer.choices[0]
    reward = float(len(choice.message.content or ""))
    return art.Trajectory(messages_and_choices=[*MESSAGES, choice], reward=reward)


async def test_it_learns_from_what_vllm_sampled(
    server: ServerProcess, model: art.TrainableModel
) -> None:
    assert "placement: sleep: asked for" in server.output or "no GPU" in server.output
    async with server.backend() as backend:
        await model.register(backend)
        client = model.openai_client()
        for step in range(2):
            groups = await art.gather_trajectory_groups(
                art.TrajectoryGroup(rollout(client, model) for _ in range(4)) for _ in range(4)
            )
            result = await backend.train(model, groups)
            assert result.step == step + 1
            assert abs(result.metrics["kl_sampler"]) < 1e-3
            assert result.metrics["canary"] < 1e-3
        for name, policy in ((str(model.full_name), 2), (f"{model.full_name}@1", 1)):
            raw = await client.chat.completions.with_raw_response.create(
                model=name, messages=MESSAGES, max_tokens=2
            )
            assert raw.headers[POLICY] == f"{model.full_name}@{policy}"
        info = await backend.info()
        assert info.engine == "vllm"

    processes = vllm_processes(server)
    assert server.terminate() == 0
    await until(lambda: not alive(processes))  # its watchdog ends a moment after it


@pytest.mark.parametrize(
    "victims",
    [
        ["server"],
        pytest.param(["vllm", "server"], marks=pytest.mark.slow),
        pytest.param(["server", "vllm"], marks=pytest.mark.slow),
        pytest.param(["vllm", "restart", "server"], marks=pytest.mark.slow),
    ],
)
async def test_nothing_is_left_whoever_is_killed(server: ServerProcess, victims: list[str]) -> None:
    processes = vllm_processes(server)
    assert any("EngineCore" in "".join(process.cmdline()) for process in processes)
    [vllm] = [process for process in processes if process.ppid() == server.pid and is_vllm(process)]
    [socket] = {
        Path(arguments[arguments.index("--uds") + 1])
        for arguments in (process.cmdline() for process in processes)
        if "--uds" in arguments
    }
    assert socket.exists()
    parent = psutil.Process(server.pid)
    for victim in victims:
        if victim == "server":
            server.process.kill()
        elif victim == "vllm":
            vllm.kill()
        else:
            wait_until(lambda: any(is_vllm(c) for c in alive(parent.children()) if c != vllm))
            processes += parent.children(recursive=True)
    server.ended()
    wait_until(lambda: not alive(processes), 120)
    assert not socket.parent.exists()
