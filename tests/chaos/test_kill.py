"""`kill -9` at any moment: each step happens once, and comes out the same to the bit."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from uuid import uuid4

import httpx
import pytest

from art_cloud.client.http import ServerClient
from art_cloud.shared.config import LoRAConfig, SFTConfig
from art_cloud.shared.names import ModelName
from art_cloud.shared.protocol import (
    CALL_ID,
    JobEvent,
    JobInfo,
    RegisterRequest,
    SFTExample,
    SFTRequest,
    StepResult,
)
from art_cloud.shared.wire import encode_batch
from art_cloud.store.checkpoints import Checkpoints, Manifest
from art_cloud.store.opening import open_store

from ..rigs.server_process import ServerProcess
from ..rigs.synthetic import batch

NAME = ModelName("chaos", "agent")
MODEL = f"models/{NAME}"
TRAIN_STEPS = 8
TIMINGS = {"seconds", "tokens_per_second"}

Calls = list[tuple[str, str, bytes]]


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Calls:
    """Register, several steps of GRPO of three micro-batches, one of SFT, one more of GRPO."""
    from art_server.tiny_model import make_tiny_model

    base = tmp_path_factory.mktemp("base")
    make_tiny_model(base, hidden_size=64, layers=1)
    register = RegisterRequest(base_model=str(base), lora=LoRAConfig(rank=8))
    sft = SFTRequest(
        examples=[
            SFTExample(
                messages=[
                    {"role": "user", "content": f"What is {n} and {n}?"},
                    {"role": "assistant", "content": f"The answer is {2 * n}."},
                ]
            )
            for n in range(12)
        ],
        config=SFTConfig(batch_size=2),
    )

    def train(seed: int) -> tuple[str, str, bytes]:
        whole = batch(NAME, seed, groups=4, length=800)
        return ("POST", f"{MODEL}/train", encode_batch(whole))

    return [
        ("PUT", MODEL, register.model_dump_json().encode()),
        *(train(seed) for seed in range(TRAIN_STEPS)),
        ("POST", f"{MODEL}/sft", sft.model_dump_json().encode()),
        train(TRAIN_STEPS),
    ]


def history(store: Path) -> list[Manifest]:
    checkpoints = Checkpoints(open_store(store.as_uri()), NAME)
    return [checkpoints.read(step) for step in checkpoints.steps()]


def comparable(manifest: Manifest) -> dict[str, object]:
    """All that two runs of the same calls have in common: content by its hash, metrics, parent."""
    return manifest.model_dump(exclude={"call_id", "created_at", "metrics", "writer"}) | {
        "metrics": {k: v for k, v in manifest.metrics.items() if k not in TIMINGS}
    }


async def submit(client: ServerClient, call: tuple[str, str, bytes], id_: str) -> JobInfo:
    method, path, body = call
    sent = await client.call(method, path, body, call_id=id_)
    return JobInfo.model_validate_json(sent)


async def result(client: ServerClient, job: str) -> StepResult:
    ended = JobInfo.model_validate_json(await client.call("GET", f"jobs/{job}"))
    assert ended.error is None
    assert ended.result is not None
    return ended.result


@contextlib.asynccontextmanager
async def client_of(server: ServerProcess) -> AsyncIterator[ServerClient]:
    client = server.client()
    try:
        yield client
    finally:
        await client.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, calls: Calls) -> list[Manifest]:
    """The history of a run in which nothing went wrong."""
    server = ServerProcess(tmp_path_factory.mktemp("undisturbed"))

    async def run() -> None:
        async with client_of(server) as client:
            for call in calls:
                job = await submit(client, call, uuid4().hex)
                [*_] = [event async for event in client.events(job.id)]
                await result(client, job.id)

    with server:
        asyncio.run(run())
    return history(server.store)


async def test_killed_at_every_moment_of_a_job(
    tmp_path: Path, calls: Calls, undisturbed: list[Manifest]
) -> None:
    """Killed and started again during every job, at another moment each; the same client follows
    its jobs through all of it."""
    server = ServerProcess(tmp_path)
    kills: list[str] = []

    async def kill(moment: str) -> None:
        kills.append(moment)
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)

    async def when_answered(client: ServerClient, call: tuple[str, str, bytes], id_: str) -> None:
        """Right after the call was journaled."""
        await submit(client, call, id_)
        await kill("answered")

    def at_progress(number: int) -> Callable[..., Awaitable[None]]:
        async def after_events(
            client: ServerClient, call: tuple[str, str, bytes], id_: str
        ) -> None:
            await submit(client, call, id_)
            seen = 0
            async for event in client.events(id_):
                seen += event.type == "progress"
                if seen == number or event.type == "done":
                    await kill(f"progress {number}")
                    return

        return after_events

    def after(seconds: float) -> Callable[..., Awaitable[None]]:
        """Whatever happens then: perhaps the end of the step, perhaps between blob and manifest."""

        async def delayed(client: ServerClient, call: tuple[str, str, bytes], id_: str) -> None:
            await submit(client, call, id_)
            await asyncio.sleep(seconds)
            await kill(f"after {seconds:.3f} s")

        return delayed

    async def before_the_answer(
        client: ServerClient, call: tuple[str, str, bytes], id_: str
    ) -> None:
        """The connection breaks while the call is being made: nobody knows whether it came."""
        sending = asyncio.create_task(submit(client, call, id_))
        await asyncio.sleep(0)
        await kill("unanswered")
        await sending

    async def twice(client: ServerClient, call: tuple[str, str, bytes], id_: str) -> None:
        """The second time while the job runs again."""
        await at_progress(1)(client, call, id_)
        await at_progress(1)(client, call, id_)

    rng = random.Random(7)
    moments = [
        *(at_progress(1), when_answered, at_progress(1), at_progress(2), at_progress(3)),
        *(before_the_answer, twice),
        *(after(rng.uniform(0.0, 0.4)) for _ in range(2)),
        *(at_progress(3), when_answered),
    ]
    assert len(moments) == len(calls)
    await asyncio.to_thread(server.start)
    try:
        async with client_of(server) as client:
            for moment, call in zip(moments, calls, strict=True):
                id_ = uuid4().hex
                await moment(client, call, id_)
                events = [event async for event in client.events(id_)]
                assert [event.number for event in events] == list(range(1, len(events) + 1))
                assert events[-1].type == "done"
                repeated = await submit(client, call, id_)
                assert repeated.result == await result(client, id_)
        print(f"kill points: {len(kills)}: {', '.join(kills)}")
        assert [comparable(m) for m in history(server.store)] == [
            comparable(m) for m in undisturbed
        ]
    finally:
        server.kill()


async def test_a_call_whose_answer_was_lost_counts_once(tmp_path: Path, calls: Calls) -> None:
    register, train, *_ = calls
    with ServerProcess(tmp_path) as server:
        async with client_of(server) as client, server.http() as http:
            job = await submit(client, register, uuid4().hex)
            [*_] = [event async for event in client.events(job.id)]

            id_ = uuid4().hex
            method, path, body = train
            with pytest.raises(httpx.ReadTimeout):
                await http.request(
                    method,
                    f"/art/v1/{path}",
                    content=body,
                    headers={CALL_ID: id_},
                    timeout=httpx.Timeout(30, read=1e-6),
                )
            several = await asyncio.gather(*(submit(client, train, id_) for _ in range(4)))
            assert {info.id for info in several} == {id_}
            [*_, last] = [event async for event in client.events(id_)]
            assert last.type == "done"
        assert [manifest.call_id for manifest in history(server.store)] == ["init", id_]


async def test_told_to_end_in_the_middle_of_a_step(
    tmp_path: Path, calls: Calls, undisturbed: list[Manifest]
) -> None:
    """SIGTERM: the step is finished, or left to the next start. Either way it happens once."""
    register, train, *_ = calls
    server = ServerProcess(tmp_path).start()
    try:
        async with client_of(server) as client:
            job = await submit(client, register, uuid4().hex)
            [*_] = [event async for event in client.events(job.id)]
            id_, seen = uuid4().hex, list[JobEvent]()
            await submit(client, train, id_)
            async for event in client.events(id_):
                if event.type == "progress" and not any(e.type == "progress" for e in seen):
                    server.process.terminate()
                seen.append(event)
                if event.type == "done":
                    break
            assert await asyncio.to_thread(server.ended) == 0
            assert not (server.state / "endpoint.json").exists()
            await asyncio.to_thread(server.start)
            assert (await result(client, id_)).step == 1
        assert [comparable(m) for m in history(server.store)] == [
            comparable(m) for m in undisturbed[:2]
        ]
    finally:
        server.kill()
