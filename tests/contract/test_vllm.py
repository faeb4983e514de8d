"""What only holds of vLLM: it is a process of its own, that sleeps, dies and comes back."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
import torch
from art_server.inference import VllmEngine
from art_server.steps.canary import TOLERANCES

from art_cloud.shared.errors import ConfigError, ServerUnavailableError

from ..rigs.waiting import until
from .engines import ENGINES, EXACT, Reference, chat, make_adapter

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("vllm")]

CHAT = "chat/completions"


@pytest.fixture(scope="module")
def adapters(tiny_model, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return {f"p/m@{n}": make_adapter(tiny_model, root / str(n), n) for n in range(3)}


@pytest.fixture(scope="module")
def reference(tiny_model, adapters):
    return Reference.load(tiny_model, adapters)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tiny_model):
    engine = ENGINES["vllm"](tiny_model)
    await engine.start()
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(started: VllmEngine, adapters):
    for policy in started.policies():
        await started.unload(policy)
    await started.load("p/m@0", adapters["p/m@0"])
    return started


async def running(engine: VllmEngine) -> float:
    """Requests that vLLM itself is busy with."""
    async with engine._session.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return sum(float(line.split()[-1]) for line in lines if line.startswith(names))


async def test_a_request_whose_client_went_away_ends_in_vllm_too(engine):
    endless = chat(max_tokens=450, ignore_eos=True, n=8)
    task = asyncio.create_task(engine.create(CHAT, endless, None))
    while not await running(engine):
        assert not task.done()
    task.cancel()
    await asyncio.wait([task])
    while await running(engine):
        await asyncio.sleep(0.01)
    assert engine.stats().tokens_generated < 8 * 450


async def test_a_swap_loses_none_of_32_in_flight(engine, adapters, reference):
    body = chat(max_tokens=60, ignore_eos=True)
    old = [asyncio.create_task(engine.create(CHAT, body, "p/m@0")) for _ in range(32)]
    await until(lambda: engine.stats().running == 32)
    await engine.load("p/m@1", adapters["p/m@1"])
    new = [asyncio.create_task(engine.create(CHAT, body, "p/m@1")) for _ in range(32)]
    await engine.unload("p/m@0")
    for policy, tasks in (("p/m@0", old), ("p/m@1", new)):
        for answer in await asyncio.gather(*tasks):
            sample = answer["choices"][0]["sample"]
            assert sample["policy"] == answer["model"] == policy
            assert len(sample["completion_ids"]) == 60
            assert reference.error(sample) < EXACT


@pytest.mark.parametrize("alias", ["reused", "new"])
async def test_other_weights_under_the_name_and_path_of_former_ones(
    engine, adapters, reference, tmp_path, alias
):
    """vLLM's prefix cache goes by name and path: where both come again, its answer is of neither
    weights, and by more than the canary lets pass. So no alias does."""
    folder, prompt = tmp_path / "adapter", {"model": "m", "prompt": list(range(10, 310))}
    for source in ("p/m@1", "p/m@2"):
        shutil.copytree(adapters[source], folder, dirs_exist_ok=True)
        await engine.load("p/again@1", folder)
        answer = await engine.create("completions", prompt, "p/again@1")
        await engine.unload("p/again@1")
        if alias == "reused":
            engine._loads -= 1
    engine._loads += 2  # further tests get new ones
    error = reference.error(answer["choices"][0]["sample"] | {"policy": source})
    assert error < EXACT if alias == "new" else error > TOLERANCES[torch.float32]


async def test_it_sleeps_while_the_memory_is_the_trainers(engine):
    body = chat(max_tokens=100, ignore_eos=True)
    before = asyncio.create_task(engine.create(CHAT, body, None))
    await until(lambda: engine.stats().running == 1)
    async with engine.asleep():
        assert before.done()
        async with engine._session.get("/is_sleeping") as response:
            assert (await response.json()) == {"is_sleeping": True}
        meanwhile = asyncio.create_task(engine.create(CHAT, body, "p/m@0"))
        await until(lambda: engine.stats().waiting == 1)
        assert "trainer" in engine.stats().reason
    assert len((await meanwhile)["choices"][0]["sample"]["completion_ids"]) == 100
    assert len((await before)["choices"][0]["sample"]["completion_ids"]) == 100
    assert engine.stats().reason is None


@pytest.mark.slow
async def test_it_starts_again_for_a_higher_rank(engine, tiny_model, tmp_path, reference):
    wide = make_adapter(tiny_model, tmp_path / "wide", 5, rank=20)
    await engine.load("p/wide@1", wide)
    answer = await engine.create(CHAT, chat(), "p/wide@1")
    assert (
        Reference.load(tiny_model, {"p/wide@1": wide}).error(answer["choices"][0]["sample"]) < EXACT
    )
    answer = await engine.create(CHAT, chat(), "p/m@0")
    assert reference.error(answer["choices"][0]["sample"]) < EXACT
    too_wide = make_adapter(tiny_model, tmp_path / "too-wide", 5, rank=513)
    with pytest.raises(ConfigError, match="513"):
        await engine.load("p/wide@2", too_wide)


@pytest.mark.parametrize("victim", ["server", pytest.param("engine core", marks=pytest.mark.slow)])
async def test_it_comes_back_with_its_adapters_when_it_is_killed(engine, reference, victim):
    endless = chat(max_tokens=450, ignore_eos=True)
    lost = [asyncio.create_task(engine.create(CHAT, endless, "p/m@0")) for _ in range(4)]
    await until(lambda: engine.stats().running == 4)
    server = psutil.Process(engine._process.pid)
    [core] = [child for child in server.children() if "EngineCore" in "".join(child.cmdline())]
    os.kill(server.pid if victim == "server" else core.pid, signal.SIGKILL)
    for task in lost:
        with pytest.raises(ServerUnavailableError, match="send the request again"):
            await task
    answer = await engine.create(CHAT, chat(), "p/m@0")  # waits
    assert reference.error(answer["choices"][0]["sample"]) < EXACT
    assert engine._process.pid != server.pid
    assert not psutil.pid_exists(core.pid) or core.status() == psutil.STATUS_ZOMBIE


async def test_a_model_that_is_not_there_is_a_clear_error(tiny_model, tmp_path):
    engine = ENGINES["vllm"](tiny_model)
    engine._process.settings = engine.settings = engine.settings.__class__(
        **{**vars(engine.settings), "model": str(tmp_path / "nothing")}
    )
    with pytest.raises(ServerUnavailableError, match=r"(?s)exit code.*nothing"):
        await engine.start()
    assert not Path(engine._process.address).parent.exists()
