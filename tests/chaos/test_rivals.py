"""Two servers on one store: one goes on, the other is fenced, and each step is there once."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import openai
import psutil
import pytest

import art_cloud as art
from art_cloud.shared.errors import RivalError
from art_cloud.shared.names import ModelName
from art_cloud.shared.protocol import CALL_ID, JobInfo
from art_cloud.shared.wire import encode_batch
from art_cloud.store.checkpoints import Checkpoints, Manifest
from art_cloud.store.opening import open_store

from ..rigs.server_process import TOKEN, ServerProcess
from ..rigs.synthetic import as_groups, batch
from ..rigs.waiting import until, wait_until
from .faults import die, stop_before_the_manifest

NAME = ModelName("rivals", "agent")


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from art_server.tiny_model import make_tiny_model

    return str(make_tiny_model(tmp_path_factory.mktemp("base"), hidden_size=64, layers=1))


def end_at_once_when_there_is(gate: Path) -> None:
    """Shorten the time that a server stays of which all models are fenced, once there is a file,
    which goes then."""
    import threading

    from art_server.steps import models

    def shorten() -> None:
        wait_until(gate.exists, 300)
        models.FENCED_SECONDS = 0.0
        gate.unlink()

    threading.Thread(target=shorten, daemon=True).start()


def server(folder: Path, name: str, *arguments: str) -> ServerProcess:
    return ServerProcess(folder / name, "--name", name, *arguments, store=folder / "store")


def history(folder: Path) -> list[Manifest]:
    return Checkpoints(open_store(str(folder / "store")), NAME).manifests()


async def registered(
    backend: art.Backend, base_model: str, keep: art.Retention | None = None
) -> art.TrainableModel:
    model = art.TrainableModel(
        name=NAME.model,
        project=NAME.project,
        base_model=base_model,
        lora=art.LoRAConfig(rank=4),
        retention=keep,
    )
    await model.register(backend)
    return model


async def train(backend: art.Backend, model: art.TrainableModel, seed: int) -> art.TrainResult:
    whole = batch(NAME, seed, groups=1)
    return await backend.train(model, as_groups(whole), whole.config)


async def test_one_goes_on_and_the_other_is_told_by_whom(tmp_path: Path, base_model: str) -> None:
    first, zombie = server(tmp_path, "first"), server(tmp_path, "zombie")
    gate = tmp_path / "gate"
    zombie.prepare = partial(end_at_once_when_there_is, gate)
    with first, zombie:
        async with first.backend() as here, zombie.backend() as there:
            model, same = await registered(here, base_model), await registered(there, base_model)
            assert (await train(here, model, 1)).step == 1
            with pytest.raises(RivalError, match=r"Step 1 of .* another server \(first on .*Stop"):
                await train(there, same, 2)

            for late in (train(there, same, 3), same.get_step(), ask(zombie, str(NAME))):
                with pytest.raises((RivalError, openai.ConflictError), match="first on"):
                    await late
            await ask(zombie, f"{NAME}@0")
            assert (await train(here, model, 4)).step == 2

            await same.register(there)
            assert (await train(there, same, 5)).step == 3
            with pytest.raises(RivalError, match=r"Step 3 of .*\(zombie on "):
                await train(here, model, 6)
            await model.register(here)
            assert (await train(here, model, 6)).step == 4
            gate.touch()
            await until(lambda: not gate.exists())
            with pytest.raises(RivalError, match=r"\(first on "):
                await train(there, same, 7)
        assert await asyncio.to_thread(zombie.ended) == 1
        assert "Other servers train all models of this one" in zombie.output
        assert first.process.is_alive()
    found = history(tmp_path)
    assert [manifest.step for manifest in found] == [0, 1, 2, 3, 4]
    writers = [manifest.writer.cluster for manifest in found[1:] if manifest.writer]
    assert writers == ["first", "first", "zombie", "first"]
    assert len({manifest.call_id for manifest in found}) == 5


async def test_a_model_that_is_deleted_while_a_server_trains_it(
    tmp_path: Path, base_model: str
) -> None:
    with server(tmp_path, "only") as only:
        async with only.backend() as backend:
            model = await registered(backend, base_model)
            assert (await train(backend, model, 1)).step == 1
            await asyncio.to_thread(Checkpoints(open_store(str(tmp_path / "store")), NAME).end)
            with pytest.raises(RivalError, match="rivals/agent was deleted at"):
                await train(backend, model, 2)
            with pytest.raises(art.ArtCloudError, match="Choose another name"):
                await model.register(backend)
            other = art.TrainableModel[None](name="other", project="rivals", base_model=base_model)
            await other.register(backend)
    assert history(tmp_path) == []


async def test_one_that_was_stopped_right_before_its_manifest_is_told(
    tmp_path: Path, base_model: str
) -> None:
    """It has looked for rivals, and is stopped for as long as another server makes three steps and
    retention removes the very number that it is about to take."""
    stopped, rival = server(tmp_path, "stopped"), server(tmp_path, "rival")
    stopped.prepare = partial(stop_before_the_manifest, 1)
    keep = art.Retention(keep_last=1)
    steps = Checkpoints(open_store(str(tmp_path / "store"), create=True), NAME)
    with stopped, rival:
        process = psutil.Process(stopped.pid)
        async with stopped.backend(patience=300) as late, rival.backend() as there:
            model = await registered(late, base_model, keep)
            same = await registered(there, base_model, keep)
            training = asyncio.create_task(train(late, model, 1))
            await until(lambda: process.status() == psutil.STATUS_STOPPED)
            made = [await train(there, same, seed) for seed in (2, 3, 4)]
            assert [result.step for result in made] == [1, 2, 3]
            await until(lambda: steps.steps() == [0, 3])
            records = steps.records()

            process.resume()
            with pytest.raises(RivalError, match=r"Step 1 of .* another server \(rival on "):
                await training
            assert steps.records() == records
            assert [manifest.step for manifest in records] == [0, 1, 2, 3]
            assert len({manifest.call_id for manifest in records}) == 4
            assert steps.steps() == [0, 3]

            await registered(late, base_model, keep)
            assert (await train(late, model, 5)).step == 4
            await until(lambda: steps.steps() == [0, 4])
    assert [one.writer.cluster for one in steps.records()[1:] if one.writer] == [
        *("rival", "rival", "rival", "stopped")
    ]


async def ask(of: ServerProcess, name: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{of.url}/v1", api_key=TOKEN, max_retries=0) as client:
        await client.completions.create(model=name, prompt="x", max_tokens=1)


@pytest.mark.parametrize("race", [False, True])
async def test_a_call_made_at_both_counts_once(tmp_path: Path, base_model: str, race: bool) -> None:
    """A client moves from one server to the other with a call that the first one carried out."""
    body = encode_batch(batch(NAME, 1, groups=1))
    call = uuid4().hex
    with server(tmp_path, "a") as a, server(tmp_path, "b") as b:

        async def make(at: ServerProcess) -> JobInfo:
            async with at.http() as http:
                path, headers = f"/art/v1/models/{NAME}/train", {CALL_ID: call}
                sent = await http.post(path, content=body, headers=headers)
                assert sent.is_success, sent.text
                client = at.client()
                [*_] = [event async for event in client.events(call)]
                ended = JobInfo.model_validate_json(await client.call("GET", f"jobs/{call}"))
                await client.close()
                return ended

        async with a.backend() as here, b.backend() as there:
            await registered(here, base_model)
            model = await registered(there, base_model)
            if race:
                ended = await asyncio.gather(make(a), make(b))
            else:
                ended = [await make(a), await make(b)]
            assert [(info.error, info.result and info.result.step) for info in ended] == [
                (None, 1)
            ] * 2
            assert (await train(there, model, 2)).step == 2
    assert [manifest.step for manifest in history(tmp_path)] == [0, 1, 2]


async def test_a_step_that_was_served_and_lost_its_number(tmp_path: Path, base_model: str) -> None:
    """Durability async: the rival is found out when the step is stored, behind its job."""
    first = server(tmp_path, "first")
    late = server(tmp_path, "late", "--durability", "async")
    gate = tmp_path / "gate"
    late.prepare = partial(store_once_there_is, gate)
    with first, late:
        async with first.backend() as here, late.backend() as there:
            model, same = await registered(here, base_model), await registered(there, base_model)
            made = await train(there, same, 2)
            assert (made.step, made.durable) == (1, False)
            assert (await there.info()).not_durable == [f"{NAME}@1"]
            assert (await train(here, model, 1)).step == 1
            gate.touch()
            with pytest.raises(RivalError, match="first on"):
                await train(there, same, 3)
            await same.register(there)
            info = await there.info()
            assert info.not_durable == []
            assert (await train(there, same, 4)).step == 2
    writers = [manifest.writer.cluster for manifest in history(tmp_path)[1:] if manifest.writer]
    assert writers == ["first", "late"]


async def test_one_that_was_there_before_is_handed_what_it_lacks(
    tmp_path: Path, base_model: str
) -> None:
    """Durability async. A server that knows the model from earlier takes the place of one that was
    killed with a step that was served only, and gets the call that was on its way there."""
    early = server(tmp_path, "early")
    late = server(tmp_path, "late", "--durability", "async")
    late.prepare = partial(killed_by_the_second_batch, tmp_path / "never")
    with early:
        async with early.backend() as backend:
            await registered(backend, base_model)
    late.port = early.port
    await asyncio.to_thread(late.start)
    backend = late.backend(patience=300)
    model = await registered(backend, base_model)
    made = await train(backend, model, 1)
    assert (made.step, made.durable) == (1, False)
    training = asyncio.create_task(train(backend, model, 2))
    await asyncio.to_thread(late.ended)
    with early:
        result = await training
        await backend.close()
    assert result.step == 2
    assert [manifest.step for manifest in history(tmp_path)] == [0, 1, 2]


def killed_by_the_second_batch(gate: Path) -> None:
    """Nothing comes to the store, and the second call is not journaled any more."""
    from art_server.steps.journal import Journal

    submit, calls = Journal.submit, iter(["register", "train"])

    def die_at_the_third(*args: Any) -> Any:
        if next(calls, None) is None:
            die()
        return submit(*args)

    store_once_there_is(gate)
    Journal.submit = die_at_the_third  # type: ignore[method-assign]


def store_once_there_is(gate: Path) -> None:
    """Let whatever is uploaded wait for a file."""
    import time

    from art_cloud.store.checkpoints import Checkpoints

    upload = Checkpoints.upload

    def wait(self: Checkpoints, *args: object) -> object:
        while not gate.exists():
            time.sleep(0.01)
        return upload(self, *args)  # type: ignore[arg-type]

    Checkpoints.upload = wait  # type: ignore[method-assign,assignment]
