"""The runtime and its programs in this process, with faults where another process has none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from art_server.steps.programs import Programs
from art_server.steps.runtime import Runtime, Settings

from art_cloud.shared.config import LoRAConfig
from art_cloud.shared.errors import (
    ConfigError,
    ConflictError,
    NotFoundError,
    RivalError,
    StoreUnavailableError,
)
from art_cloud.shared.names import ModelName
from art_cloud.shared.protocol import JobInfo, JobKind, RegisterRequest, StepResult
from art_cloud.shared.wire import encode_batch
from art_cloud.store.base import Blob

from ..rigs.synthetic import batch

NAME = ModelName("p", "m")
STEPS = 10
CHAT = {"messages": [{"role": "user", "content": "Go on."}], "max_tokens": 2, "model": str(NAME)}


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[Runtime]:
    state = tmp_path / "state"
    state.mkdir()
    runtime = Runtime(Settings(state=state, store=str(tmp_path / "store")))
    yield runtime
    await runtime.close()


@pytest.fixture
async def programs(runtime: Runtime, tiny_model: Path) -> Programs:
    programs = runtime.programs
    body = RegisterRequest(base_model=str(tiny_model), lora=LoRAConfig(rank=4)).model_dump_json()
    await run(programs, "register", body.encode())
    return programs


async def run(programs: Programs, kind: JobKind, body: bytes, job: str | None = None) -> StepResult:
    info = JobInfo(id=job or uuid4().hex, kind=kind, project="p", model="m", state="running")
    return await programs.run(info, body, lambda data: None)


def steps(runtime: Runtime) -> list[int]:
    return runtime.models.checkpoints(NAME).steps()


async def test_a_step_that_cannot_be_served_is_not_counted(
    runtime: Runtime, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = runtime.compute.engine.load

    async def refuse(policy: str, adapter: Path) -> None:
        raise ConfigError("The engine is out of sorts.")

    monkeypatch.setattr(runtime.compute.engine, "load", refuse)
    body = encode_batch(batch(NAME, 1, groups=1))
    with pytest.raises(ConfigError, match="out of sorts"):
        await run(programs, "train", body)
    assert steps(runtime) == [0]
    assert runtime.policies.loaded() == ["p/m@0"]
    monkeypatch.setattr(runtime.compute.engine, "load", load)
    assert (await run(programs, "train", body)).step == 1
    async with runtime.policies.asked_for(str(NAME)) as policy:
        assert policy == "p/m@1"
        assert (await runtime.compute.engine.create("chat/completions", CHAT, policy))[
            "model"
        ] == policy


async def test_a_step_that_breaks_half_way_leaves_no_trace(
    runtime: Runtime, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights were changed already when saving failed: the next step starts from the store."""
    body = encode_batch(batch(NAME, 1, groups=1))
    save_optimizer = runtime.compute.trainer.save_optimizer

    def break_down(name: str, folder: Path) -> None:
        raise RuntimeError("The saving broke.")

    monkeypatch.setattr(runtime.compute.trainer, "save_optimizer", break_down)
    with pytest.raises(RuntimeError, match="saving broke"):
        await run(programs, "train", body)
    assert steps(runtime) == [0]
    assert list(runtime.policies.cache.rglob("000001-*")) == []
    assert runtime.policies.loaded() == runtime.compute.engine.policies() == ["p/m@0"]
    monkeypatch.setattr(runtime.compute.trainer, "save_optimizer", save_optimizer)
    await run(programs, "train", body)
    after_failure = runtime.models.newest(NAME)

    assert (after_failure.step, steps(runtime)) == (1, [0, 1])
    undisturbed = await _train_again_from_step_0(runtime, body)
    assert after_failure.files == undisturbed


async def _train_again_from_step_0(runtime: Runtime, body: bytes) -> dict[str, Blob]:
    """The files that the step has when nothing goes wrong on the way."""
    other = Runtime(
        Settings(
            state=runtime.settings.state.with_name("state-2"),
            store=str(runtime.settings.state.with_name("store-2")),
        )
    )
    try:
        programs = other.programs
        request = RegisterRequest(base_model=runtime.compute.base.name, lora=LoRAConfig(rank=4))
        await run(programs, "register", request.model_dump_json().encode())
        await run(programs, "train", body)
        return other.models.newest(NAME).files
    finally:
        await other.close()


async def test_the_same_call_is_found_in_the_store_without_a_journal(
    runtime: Runtime, programs: Programs
) -> None:
    """The server and its disk are gone, the store is not; the client sends its call again."""
    body, call = encode_batch(batch(NAME, 1, groups=1)), uuid4().hex
    first = await run(programs, "train", body, call)
    again = Runtime(replace(runtime.settings, state=runtime.settings.state.with_name("state-2")))
    try:
        await again.programs.reopen([NAME], set())
        assert await run(again.programs, "train", body, call) == first
        assert steps(again) == [0, 1]
    finally:
        await again.close()


async def test_a_step_that_was_given_up_and_is_there_all_the_same_has_no_rival(
    runtime: Runtime, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store took the manifest, and its answer never came: nobody knows, until it is asked."""
    create = runtime.store.create
    body, call = encode_batch(batch(NAME, 1, groups=1)), uuid4().hex

    def lose_the_answer(key: str, data: bytes) -> bool:
        created = create(key, data)
        if "/steps/" in key:
            raise StoreUnavailableError("The store did not answer.")
        return created

    with monkeypatch.context() as patch:
        patch.setattr("art_server.steps.publishing.STORE_SECONDS", 0.0)
        patch.setattr(runtime.store, "create", lose_the_answer)
        with pytest.raises(StoreUnavailableError, match="came there all the same is not known"):
            await run(programs, "train", body, call)
    assert runtime.models.newest(NAME).step == 0
    with pytest.raises(ConflictError, match=f"{call} made it.*nothing is left to do") as told:
        await run(programs, "train", body)
    assert not isinstance(told.value, RivalError)
    assert (runtime.models.newest(NAME).step, steps(runtime)) == (1, [0, 1])
    assert (await run(programs, "train", body, call)).step == 1
    assert (await run(programs, "train", body)).step == 2


async def test_requests_for_more_steps_than_stay_loaded_at_once(
    runtime: Runtime, programs: Programs
) -> None:
    """Loading and unloading under each other's feet, with requests that are given up."""
    body = encode_batch(batch(NAME, 1, groups=1))
    for _ in range(STEPS):
        await run(programs, "train", body)

    async def ask(number: int) -> None:
        name = f"{NAME}@{number % (STEPS + 1)}"
        async with runtime.policies.asked_for(name) as policy:
            patience = 0.001 if number % 5 == 0 else None
            answering = runtime.compute.engine.create("chat/completions", CHAT, policy)
            with contextlib.suppress(TimeoutError):
                answer: dict[str, Any] = await asyncio.wait_for(answering, patience)
                assert answer["model"] == name

    await asyncio.gather(*(ask(number) for number in range(40)))
    assert set(runtime.policies._in_use.values()) == {0}
    assert (
        runtime.policies._folders.keys()
        == runtime.policies._in_use.keys()
        == set(runtime.policies.loaded())
    )
    assert sorted(runtime.policies.loaded()) == runtime.compute.engine.policies()
    assert len(runtime.policies.loaded()) < STEPS
    with pytest.raises(NotFoundError, match=f"no step {STEPS + 1}"):
        await runtime.policies.asked_for(f"{NAME}@{STEPS + 1}").__aenter__()
