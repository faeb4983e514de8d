"""The canary, with a real trainer and a real engine that is handed the wrong weights."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from uuid import uuid4

import pytest
from art_server.steps.runtime import Runtime, Settings
from safetensors.torch import load_file, save_file

from art_cloud.shared.config import LoRAConfig
from art_cloud.shared.errors import CanaryError
from art_cloud.shared.names import ModelName
from art_cloud.shared.protocol import JobInfo, JobKind, RegisterRequest, StepResult
from art_cloud.shared.wire import encode_batch

from ..rigs.synthetic import batch

NAME = ModelName("canary", "agent")
WEIGHTS = "adapter_model.safetensors"


class Server:
    """The programs of a server, run one by one."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.runtime = Runtime(Settings(state=folder / "state", store=str(folder / "store")))
        self.register = RegisterRequest(base_model=str(model), lora=LoRAConfig(rank=4))

    async def run(self, kind: JobKind, body: bytes) -> StepResult:
        job = JobInfo(id=uuid4().hex, kind=kind, project="canary", model="agent", state="running")
        return await self.runtime.programs.run(job, body, lambda event: None)

    async def train(self, seed: int) -> StepResult:
        return await self.run("train", encode_batch(batch(NAME, seed, learning_rate=1e-2)))

    async def answers(self) -> str:
        """The policy that answers for the model's plain name."""
        async with self.runtime.policies.asked_for(str(NAME)) as policy:
            body = {"model": str(NAME), "prompt": "A fox", "max_tokens": 1}
            answer = await self.runtime.compute.engine.create("completions", body, policy)
        return str(answer["model"])


@pytest.fixture
async def server(tmp_path: Path, tiny_model: Path) -> AsyncIterator[Server]:
    server = Server(tmp_path, tiny_model)
    await server.run("register", server.register.model_dump_json().encode())
    yield server
    await server.runtime.close()


async def test_right_weights_differ_by_rounding_only(server: Server) -> None:
    checkpoints = server.runtime.models.checkpoints(NAME)
    for step in (1, 2):
        result = await server.train(seed=step)
        assert result.step == step
        assert 0 <= result.metrics["canary"] < 1e-4
        assert checkpoints.read(step).metrics["canary"] == result.metrics["canary"]
    assert 0 <= checkpoints.read(0).metrics["canary"] < 1e-4


def doubled(folder: Path, adapter: Path) -> Path:
    """The step's own adapter, with a weight that is twice what was trained."""
    wrong = shutil.copytree(adapter, folder / "wrong")
    weights = load_file(wrong / WEIGHTS)
    name = next(name for name in weights if name.endswith("q_proj.lora_B.weight"))
    save_file({**weights, name: 2 * weights[name]}, wrong / WEIGHTS, {"format": "pt"})
    return wrong


def stale(folder: Path, adapter: Path) -> Path:
    """The adapter of the step before."""
    [step_0] = adapter.parents[1].glob("000000-*")
    return step_0 / "adapter"


@pytest.mark.parametrize("wrong", [doubled, stale])
async def test_wrong_weights_are_caught_and_the_step_is_not_made(
    server: Server,
    tmp_path: Path,
    wrong: Callable[[Path, Path], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = server.runtime.compute.engine
    load = engine.load

    async def load_wrong(policy: str, adapter: Path) -> None:
        await load(policy, wrong(tmp_path, adapter))

    with monkeypatch.context() as patched:
        patched.setattr(engine, "load", load_wrong)
        with pytest.raises(CanaryError, match=r"canary/agent@1: .*serve other"):
            await server.train(seed=1)
    assert server.runtime.models.checkpoints(NAME).steps() == [0]
    assert engine.policies() == [str(NAME.at(0))]
    assert await server.answers() == str(NAME.at(0))

    result = await server.train(seed=1)  # with the right weights, from the step before
    assert result.step == 1
    assert result.metrics["canary"] < 1e-4
    assert await server.answers() == str(NAME.at(1))
    [folder] = (server.runtime.policies.cache / "steps" / str(NAME)).glob("000001-*")
    assert (folder / "adapter" / WEIGHTS).exists()


async def test_a_step_that_is_fetched_again_is_compared_with_what_was_kept_of_it(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, policy = server.runtime, str(NAME.at(1))
    await server.train(seed=1)
    await server.train(seed=2)
    await runtime.policies.unload(policy)
    load = runtime.compute.engine.load

    async def load_wrong(policy: str, adapter: Path) -> None:
        await load(policy, doubled(tmp_path, adapter))

    with monkeypatch.context() as patched:
        patched.setattr(runtime.compute.engine, "load", load_wrong)
        with pytest.raises(CanaryError, match=r"canary/agent@1: .*not served"):
            async with runtime.policies.asked_for(policy):
                pass
    assert policy not in [*runtime.policies.loaded(), *runtime.compute.engine.policies()]
    assert list((runtime.policies.cache / "steps" / str(NAME)).glob("000001-*")) == []

    async with runtime.policies.asked_for(policy) as served:
        assert served == policy
