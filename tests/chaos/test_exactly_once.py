"""Killed at every named point of a step, on either side of the store: each step happens once.

A server is killed at a point, and started again with another point to be killed at, on its disk or
on a new one, until all points were tried. The client is one script's, and notices nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest

import art_cloud as art
from art_cloud.checkpoints import Checkpoints, Manifest
from art_cloud.names import ModelName
from art_cloud.store import Store, open_store

from ..s3_servers import S3Server
from ..server_process import ServerProcess
from ..synthetic import as_groups, batch
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
