"""A model that somebody else begins while a server registers it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import pytest
from art_server.steps.models import ModelState
from art_server.steps.programs import Programs
from art_server.steps.runtime import Runtime, Settings

from art_cloud.shared.config import LoRAConfig
from art_cloud.shared.errors import ConflictError
from art_cloud.shared.names import ModelName
from art_cloud.shared.protocol import JobInfo, JobKind, RegisterRequest, StepResult
from art_cloud.shared.wire import encode_batch
from art_cloud.store.checkpoints import Manifest

from ..rigs.synthetic import batch

ORIGIN, NAME = ModelName("games", "origin"), ModelName("games", "agent")


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[Runtime]:
    (tmp_path / "state").mkdir()
    runtime = Runtime(Settings(state=tmp_path / "state", store=str(tmp_path / "store")))
    yield runtime
    await runtime.close()


class Server:
    """Its programs, without HTTP."""

    def __init__(self, runtime: Runtime, base_model: Path) -> None:
        self.programs = runtime.programs
        self.base_model = str(base_model)

    async def run(self, kind: JobKind, name: ModelName, body: bytes) -> StepResult:
        info = JobInfo(
            id=uuid4().hex, kind=kind, project=name.project, model=name.model, state="running"
        )
        return await self.programs.run(info, body, lambda data: None)

    async def register(self, name: ModelName, rank: int = 2) -> StepResult:
        request = RegisterRequest(base_model=self.base_model, lora=LoRAConfig(rank=rank))
        return await self.run("register", name, request.model_dump_json().encode())

    async def train(self, name: ModelName) -> StepResult:
        return await self.run("train", name, encode_batch(batch(name, 1, groups=1)))


async def test_a_server_goes_on_from_what_a_fork_began_meanwhile(
    runtime: Runtime, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(runtime, tiny_model)
    await server.register(ORIGIN)
    assert (await server.train(ORIGIN)).step == 1

    def make_then_fork(self: Programs, model: ModelState, request: RegisterRequest) -> Manifest:
        draft = make(self, model, request)
        if not model.checkpoints.steps():
            runtime.models.checkpoints(ORIGIN).fork(model.name)
        return draft

    make = Programs._make_step_0
    monkeypatch.setattr(Programs, "_make_step_0", make_then_fork)
    assert (await server.register(NAME)).step == 1
    steps = runtime.models.checkpoints(NAME)
    assert steps.steps() == [1]
    async with runtime.policies.asked_for(str(NAME)) as policy:
        assert policy == f"{NAME}@1"
    assert f"{NAME}@0" not in runtime.policies.loaded()

    # one optimizer step was made already: what is trained now is the fork, not the step 0 that lost
    assert (await server.train(NAME)).step == 2
    made, there = steps.read(2), runtime.models.checkpoints(ORIGIN).read(1)
    assert made.parent is not None
    assert made.parent.step == 1
    assert (await server.train(ORIGIN)).step == 2
    assert made.files == runtime.models.checkpoints(ORIGIN).read(2).files != there.files

    with pytest.raises(ConflictError, match="Use the same, or another name"):
        await server.register(ModelName("games", "third"), rank=3)
    assert runtime.models.checkpoints(ModelName("games", "third")).steps() == [2]  # the fork
