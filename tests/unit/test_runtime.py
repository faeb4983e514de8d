"""The runtime and its programs in this process, with faults where another process has none."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from art_server.inference.adapters import AdapterModel
from art_server.steps import compute
from art_server.steps.programs import Programs
from art_server.steps.runtime import Runtime, Settings
from peft import get_peft_model_state_dict
from safetensors.torch import load_file

from art_cloud.shared.config import LoRAConfig
from art_cloud.shared.errors import (
    ConfigError,
    ConflictError,
    NotFoundError,
    RivalError,
    ServerStoppingError,
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
    await run(programs, "register", registration(str(tiny_model)))
    return programs


def registration(base_model: str) -> bytes:
    request = RegisterRequest(base_model=base_model, lora=LoRAConfig(rank=4))
    return request.model_dump_json().encode()


async def run(
    programs: Programs,
    kind: JobKind,
    body: bytes,
    job: str | None = None,
    name: ModelName = NAME,
) -> StepResult:
    info = JobInfo(
        id=job or uuid4().hex, kind=kind, project=name.project, model=name.model, state="running"
    )
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


async def _train_again_from_step_0(runtime: Runtime, *bodies: bytes) -> dict[str, Blob]:
    """The files that the last step has when nothing goes wrong on the way."""
    state = runtime.settings.state
    other = Runtime(
        Settings(state=state.with_name("state-2"), store=str(state.with_name("store-2")))
    )
    try:
        await run(other.programs, "register", registration(runtime.compute.base.name))
        for body in bodies:
            await run(other.programs, "train", body)
        return other.models.newest(NAME).files
    finally:
        await other.close()


async def test_a_model_that_left_the_trainer_goes_on_to_the_same_bits(
    runtime: Runtime, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer has room for two adapters, and drops the one that was used longest ago."""
    monkeypatch.setattr("art_server.training.trainer.MOST_LEARNERS", 2)
    bodies = [encode_batch(batch(NAME, seed, groups=1)) for seed in (1, 2, 3)]
    second, third = ModelName("p", "second"), ModelName("p", "third")
    register = registration(runtime.compute.base.name)
    trainer = runtime.compute.trainer
    loaded: list[str] = []
    load_state = trainer.load_state

    def load_and_tell(name: str, folder: Path) -> None:
        loaded.append(name)
        load_state(name, folder)

    monkeypatch.setattr(trainer, "load_state", load_and_tell)
    await run(programs, "register", register, name=second)
    await run(programs, "train", bodies[0])
    await run(programs, "register", register, name=third)
    assert str(second) not in trainer
    await run(programs, "train", bodies[1])
    assert loaded == []

    await run(programs, "train", bodies[0], name=second)
    await run(programs, "train", bodies[0], name=third)
    assert str(NAME) not in trainer
    await run(programs, "train", bodies[2])
    assert loaded == [str(second), str(third), str(NAME)]
    assert runtime.models.newest(NAME).files == await _train_again_from_step_0(runtime, *bodies)


async def test_a_base_model_is_opened_beside_the_event_loop(
    runtime: Runtime, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainer and engine are made while requests are answered."""
    loop, waited = asyncio.get_running_loop(), list[bool]()

    def after_the_loop(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            answered = threading.Event()
            loop.call_soon_threadsafe(answered.set)
            waited.append(answered.wait(30))
            return function(*args, **kwargs)

        return call

    for name in ("load_base", "Trainer", "Canary", "make_engine"):
        function = getattr(compute, name)
        monkeypatch.setattr(compute, name, after_the_loop(function))
    await runtime.compute.open(str(tiny_model))
    assert waited == [True] * 4


async def test_trainer_and_engine_take_adapters_at_once(
    runtime: Runtime, programs: Programs, tmp_path: Path
) -> None:
    """PEFT changes all of torch while it adds one: another thread's weights must not suffer."""
    trainer, folder, name = runtime.compute.trainer, tmp_path / "saved", str(NAME)
    await run(programs, "train", encode_batch(batch(NAME, 1, groups=1)))
    trainer.save_state(name, folder)
    weights = load_file(folder / "adapter" / "adapter_model.safetensors")
    model, ended = AdapterModel(runtime.compute.base.model), threading.Event()
    model.load("p/m@0", folder / "adapter")

    def load_all_the_time() -> None:
        while not ended.is_set():
            trainer.load_state(name, folder)

    loading = asyncio.create_task(asyncio.to_thread(load_all_the_time))
    try:
        for step in range(1, 11):
            await asyncio.to_thread(model.load, f"p/m@{step}", folder / "adapter")
            assert model._peft is not None
            there = get_peft_model_state_dict(model._peft, adapter_name=f"policy_{step + 1}")
            assert all(torch.equal(there[key], weights[key]) for key in weights)
            model.unload(f"p/m@{step}")
    finally:
        ended.set()
        await loading
    trainer.save_adapter(name, tmp_path / "again")
    again = load_file(tmp_path / "again" / "adapter" / "adapter_model.safetensors")
    assert all(torch.equal(again[key], weights[key]) for key in weights)


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


async def test_a_repeated_step_that_is_left_to_the_next_server_is_not_given_up(
    runtime: Runtime, programs: Programs
) -> None:
    """Who asks for the plain name is not given the step before it while the server ends."""

    def stop(data: dict[str, Any]) -> None:
        raise ServerStoppingError("The server is stopping.")

    body, job = encode_batch(batch(NAME, 1, groups=1)), uuid4().hex
    info = JobInfo(id=job, kind="train", project="p", model="m", state="running")
    runtime.models.get(NAME).repeat()
    asking = asyncio.create_task(runtime.models.until_known(NAME))
    with pytest.raises(ServerStoppingError):
        await programs.run(info, body, stop)
    assert not asking.done()
    assert (await run(programs, "train", body, job)).step == 1
    async with asyncio.timeout(30):
        await asking


async def test_a_model_that_is_registered_keeps_a_server_of_fenced_ones(
    runtime: Runtime, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("art_server.steps.models.FENCED_SECONDS", 1.0)
    models, other = runtime.models, ModelName("p", "other")
    there = models.newest(NAME)
    ending = asyncio.create_task(models.all_fenced())
    await asyncio.sleep(0)
    models.get(NAME).fence(RivalError("Another server trains p/m."))
    for _ in range(5):  # until it waits for the time to be over
        await asyncio.sleep(0)
    models.state(other).register(there.model_copy(update={"model": "other"}), {})
    await asyncio.sleep(2)
    assert not ending.done()
    models.get(other).fence(RivalError("Another server trains p/other."))
    async with asyncio.timeout(30):
        assert "Another server trains p/m. Another server trains p/other." in await ending


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
