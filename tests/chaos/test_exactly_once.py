"""Killed at every named point of a step, on either side of the store: each step happens once.

A server is killed at a point, and started again with another point to be killed at, on its disk or
on a new one, until all points were tried. The client is one script's, and notices nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest

import art_cloud as art
from art_cloud.rollouts.batch import make_batch
from art_cloud.shared.errors import StoreUnavailableError
from art_cloud.shared.names import ModelName
from art_cloud.shared.protocol import JobInfo
from art_cloud.shared.wire import encode_batch
from art_cloud.store.base import Store
from art_cloud.store.checkpoints import Checkpoints, Manifest
from art_cloud.store.opening import open_store

from ..rigs.fault_proxy import NONE, Certificate, Fault, FaultProxy
from ..rigs.s3_servers import S3Server
from ..rigs.server_process import ServerProcess
from ..rigs.synthetic import as_groups, batch
from .faults import AT_THE_STORE, DONE_BEFORE_BLOBS, POINTS, kill_at

NAME = ModelName("once", "agent")
STEPS = 24
"""Of the undisturbed run: more than any of the others makes."""
TIMINGS = {"seconds", "tokens_per_second"}
Property = Callable[[str, object], None]


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from art_server.tiny_model import make_tiny_model

    return str(make_tiny_model(tmp_path_factory.mktemp("base"), hidden_size=64, layers=1))


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, base_model: str
) -> list[dict[str, object]]:
    """The history of a run in which nothing went wrong."""
    server = ServerProcess(tmp_path_factory.mktemp("undisturbed"))

    async def run() -> None:
        async with server.backend() as backend:
            model = await registered(backend, base_model)
            for step in range(STEPS):
                await train(backend, model, step)

    with server:
        asyncio.run(run())
    return [comparable(manifest) for manifest in history(open_store(str(server.store)))]


async def registered(backend: art.Backend, base_model: str) -> art.TrainableModel:
    model = art.TrainableModel(
        name=NAME.model, project=NAME.project, base_model=base_model, lora=art.LoRAConfig(rank=4)
    )
    await model.register(backend)
    return model


async def train(backend: art.Backend, model: art.TrainableModel, step: int) -> art.TrainResult:
    """The step after `step`, always from the same batch."""
    whole = batch(NAME, step, groups=2, length=600)
    result = await backend.train(model, as_groups(whole), whole.config)
    assert result.step == step + 1
    return result


def history(store: Store) -> list[Manifest]:
    return Checkpoints(store, NAME).manifests()


def comparable(manifest: Manifest) -> dict[str, object]:
    """All that two runs have in common: content by its hash (weights, moments), metrics, parent."""
    return manifest.model_dump(exclude={"call_id", "created_at", "metrics", "writer"}) | {
        "metrics": {k: v for k, v in manifest.metrics.items() if k not in TIMINGS}
    }


def check_history(
    store: Store, made: int, undisturbed: list[dict[str, object]], record_property: Property
) -> None:
    """Each of the steps that were made is there once, as if nothing had happened."""
    found = history(store)
    record_property("steps lost", made + 1 - len({manifest.step for manifest in found}))
    record_property("steps doubled", len(found) - len({manifest.call_id for manifest in found}))
    assert [manifest.step for manifest in found] == list(range(made + 1))
    assert len({manifest.call_id for manifest in found}) == made + 1
    assert [comparable(manifest) for manifest in found] == undisturbed[: made + 1]


@contextlib.asynccontextmanager
async def killed_at(
    server: ServerProcess, points: Sequence[str], *, same_disk: bool
) -> AsyncIterator[list[str]]:
    """The server, killed at one point after the other; yields those that are still to come."""
    left = list(points)

    def start() -> None:
        server.prepare = partial(kill_at, left[0]) if left else None
        server.start()

    async def restart() -> None:
        while left:
            await asyncio.to_thread(server.process.join)
            if not left:
                return
            assert server.process.exitcode == -signal.SIGKILL, server.output
            del left[0]
            if not same_disk:
                server.lose_the_disk()
            await asyncio.to_thread(start)

    await asyncio.to_thread(start)
    restarting = asyncio.create_task(restart())
    try:
        yield left
    finally:
        left.clear()
        server.kill()
        await restarting
        server.kill()


@pytest.fixture
def bucket(moto: S3Server) -> Iterator[tuple[str, dict[str, str]]]:
    """The URL of an empty bucket, and what it takes to open it."""
    name = f"chaos-{uuid4().hex[:12]}"
    moto.client().create_bucket(Bucket=name)
    with pytest.MonkeyPatch.context() as monkeypatch:
        for key, value in moto.env.items():
            monkeypatch.setenv(key, value)
        yield f"s3://{name}/art", moto.env


@pytest.mark.slow
@pytest.mark.parametrize("same_disk", [True, False], ids=["same disk", "new disk"])
@pytest.mark.parametrize("durability", ["sync", "async"])
async def test_killed_at_every_point(
    tmp_path: Path,
    base_model: str,
    undisturbed: list[dict[str, object]],
    durability: str,
    same_disk: bool,
    record_property: Property,
) -> None:
    points = [*POINTS, *([DONE_BEFORE_BLOBS] if durability == "async" else [])]
    server = ServerProcess(tmp_path, "--durability", durability)
    made = await run(server, base_model, points, same_disk=same_disk)
    record_property("faults tried", len(points))
    check_history(open_store(str(server.store)), made, undisturbed, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["sync", "async"])
async def test_killed_at_the_points_near_an_s3_store(
    tmp_path: Path,
    base_model: str,
    undisturbed: list[dict[str, object]],
    bucket: tuple[str, dict[str, str]],
    durability: str,
    record_property: Property,
) -> None:
    points = [*AT_THE_STORE, *([DONE_BEFORE_BLOBS] if durability == "async" else [])]
    url, environment = bucket
    server = ServerProcess(tmp_path, "--durability", durability)
    server.store_url, server.environment = url, environment
    made = await run(server, base_model, points, same_disk=False)
    record_property("faults tried", len(points))
    check_history(open_store(url), made, undisturbed, record_property)


async def test_another_machine_goes_on_from_the_bucket_to_the_same_bits(
    tmp_path: Path,
    base_model: str,
    undisturbed: list[dict[str, object]],
    bucket: tuple[str, dict[str, str]],
    record_property: Property,
) -> None:
    """Some steps, then the machine is gone, its disk too; another one makes the others. Weights,
    moments and metrics are those of a run on one machine."""
    url, environment = bucket
    for machine, steps in (("first", range(3)), ("second", range(3, 6))):
        server = ServerProcess(tmp_path / machine)
        server.store_url, server.environment = url, environment
        with server:
            async with server.backend() as backend:
                model = await registered(backend, base_model)
                assert await model.get_step() == steps.start
                for step in steps:
                    await train(backend, model, step)
                server.kill()
        shutil.rmtree(tmp_path / machine)
    record_property("faults tried", 1)
    check_history(open_store(url), 6, undisturbed, record_property)
    store = open_store(url)
    for manifest in history(store):
        assert {"adapter/adapter_model.safetensors", "optimizer.safetensors"} <= set(manifest.files)
        Checkpoints(store, NAME).fetch(manifest, tmp_path / str(manifest.step))  # by its hashes


async def run(
    server: ServerProcess, base_model: str, points: Sequence[str], *, same_disk: bool
) -> int:
    """Train until the server was killed at all points, and one step more; how many were made."""
    made = 0
    async with (
        killed_at(server, points, same_disk=same_disk) as left,
        server.backend(patience=120) as backend,
    ):
        model = await registered(backend, base_model)
        while left and made < STEPS - 1:
            made = (await train(backend, model, made)).step
        assert not left
        return (await train(backend, model, made)).step


SLOW_DOWN = (
    b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nContent-Length: 76\r\n"
    b"Connection: close\r\n\r\n<Error><Code>SlowDown</Code><Message>Reduce your request rate"
    b"</Message></Error>"
)
FAULTS = (
    Fault(refuse=True),
    Fault(delay=0.1),
    Fault(cut_up=2000),
    Fault(cut_down=60),
    Fault(stall_down=60),
    Fault(answer=SLOW_DOWN),
)


def be_impatient() -> None:
    from art_server.steps import publishing

    from art_cloud.store import s3

    s3.READ_SECONDS, s3.ATTEMPTS = 1, 2
    publishing.FIRST_PAUSE, publishing.STORE_SECONDS = 0.05, 20.0


@pytest.mark.slow
async def test_a_store_that_misbehaves_while_steps_are_made(
    tmp_path: Path,
    base_model: str,
    undisturbed: list[dict[str, object]],
    moto: S3Server,
    bucket: tuple[str, dict[str, str]],
    record_property: Property,
) -> None:
    """Refused, cut, stalled, 503: retried. Away for a while: waited for, and said. For longer: the
    job fails, the trainer is as before, and the next step is the right one."""
    url, environment = bucket
    folder, rng, tried = moto.ca.parent, random.Random(5), list[Fault]()
    server = ServerProcess(tmp_path)
    server.prepare = be_impatient

    def fault(connection: int) -> Fault:
        chosen = rng.choice((*[NONE] * 9, *FAULTS))
        if chosen != NONE:
            tried.append(chosen)
        return chosen

    certificate = Certificate(moto.ca, folder / "server.pem", folder / "server.key")
    with FaultProxy(moto.endpoint_url, certificate) as proxy:
        server.store_url = url
        server.environment = environment | {"AWS_ENDPOINT_URL": proxy.url}
        with server:
            async with server.backend() as backend:
                model = await registered(backend, base_model)
                proxy.fault = fault
                for step in range(3):
                    await train(backend, model, step)
                proxy.fault = lambda connection: NONE

                proxy.stop()
                said = await until_the_store_is_missed(server, 3, proxy)
                assert "the store does not answer, trying again: " in said

                proxy.stop()
                with pytest.raises(StoreUnavailableError, match="It was tried for 20 s"):
                    await train(backend, model, 4)
                proxy.start()
                await train(backend, model, 4)
    assert len(tried) > 5
    record_property("faults tried", len(tried) + 2)
    check_history(open_store(url), 5, undisturbed, record_property)


async def until_the_store_is_missed(server: ServerProcess, step: int, proxy: FaultProxy) -> str:
    """Make a step; bring the store back once the job says that it is away. What it said."""
    client, said = server.client(), list[str]()
    whole = batch(NAME, step, groups=2, length=600)
    body = encode_batch(make_batch(NAME, as_groups(whole), whole.config))
    sent = await client.call("POST", f"models/{NAME}/train", body, call_id=uuid4().hex)
    job = JobInfo.model_validate_json(sent)
    async for event in client.events(job.id):
        phase = str(event.data.get("phase"))
        if phase.startswith("the store does not answer"):
            said.append(phase)
            if len(said) == 1:
                proxy.start()
    ended = JobInfo.model_validate_json(await client.call("GET", f"jobs/{job.id}"))
    assert ended.result, ended.error
    assert ended.result.step == step + 1
    await client.close()
    return said[0]
