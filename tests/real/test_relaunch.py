"""A machine is lost under a running loop: the loop sees a pause, and the history has no gap."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

import openai
import psutil
import pytest

import art_cloud as art
from art_cloud.clusters import attached, fleet, relaunch
from art_cloud.clusters.providers import get_provider
from art_cloud.clusters.registry import Registry
from art_cloud.shared.errors import AuthError, ServerUnavailableError
from art_cloud.store.checkpoints import Checkpoints
from art_cloud.store.opening import open_store

NAME = "lost"
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True)
async def cluster_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Path]:
    home = tmp_path / "home"
    monkeypatch.setenv("ART_CLOUD_HOME", str(home))
    monkeypatch.setenv("ART_PROGRESS", "1")
    yield home
    for one in await fleet.status():
        await fleet.down(one.name)


Squatter = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def lose_the_machine(home: Path) -> None:
    """Its processes and its disk."""
    [instance] = await get_provider("local").list()
    process = psutil.Process(int(instance.detail.removeprefix("pid ")))
    os.killpg(process.pid, signal.SIGKILL)
    while await get_provider("local").list():
        await asyncio.sleep(0.02)
    shutil.rmtree(home / "clusters" / NAME)


async def rollout(model: art.TrainableModel[None], reward: float) -> art.Trajectory:
    answer = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=MESSAGES, max_tokens=12
    )
    return art.Trajectory(messages_and_choices=[*MESSAGES, answer.choices[0]], reward=reward)


async def group_of(model: art.TrainableModel[None]) -> list[art.TrajectoryGroup]:
    return await art.gather_trajectory_groups(
        [art.TrajectoryGroup(rollout(model, float(n % 2)) for n in range(4))]
    )


async def test_the_loop_sees_a_pause(
    cluster_home: Path, tiny_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = art.TrainableModel(name="agent", project="lost", base_model=str(tiny_model))
    async with art.up("local", name=NAME) as backend:
        await model.register(backend)
        assert (await backend.train(model, await group_of(model))).step == 1

        await lose_the_machine(cluster_home)
        groups = await group_of(model)  # with the client that was made before
        assert {sample.policy for g in groups for t in g for sample in t.samples()} == {
            "lost/agent@1"
        }

        training = asyncio.create_task(backend.train(model, groups))
        await lose_the_machine(cluster_home)
        assert (await training).step == 2
        said = " ".join(capfd.readouterr().err.split())
        assert "lost is gone" in said
        assert "Starting it again, 2 of at most 3 times." in said
    steps = Checkpoints(open_store((cluster_home / "store").as_uri()), model.full_name)
    assert steps.steps() == [0, 1, 2]
    assert await get_provider("local").list() == []


async def take(port: int | None, squat: Squatter) -> asyncio.Server:
    """A server at the port; what was killed gives it back a moment after it is no process more."""
    async with asyncio.timeout(30):
        while True:
            try:
                return await asyncio.start_server(squat, "127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_who_takes_the_port_of_a_lost_server_hears_nothing_of_the_next(
    cluster_home: Path, tiny_model: Path
) -> None:
    model = art.TrainableModel(name="agent", project="lost", base_model=str(tiny_model))
    heard: set[str] = set()

    async def squat(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        heard.update(
            line.partition(": Bearer ")[2]
            for line in head.splitlines()
            if line.lower().startswith("authorization: bearer ")
        )
        writer.close()

    async with art.up("local", name=NAME) as backend:
        await model.register(backend)
        port, before = urlsplit(backend.url).port, backend._token
        await lose_the_machine(cluster_home)
        async with await take(port, squat):
            assert await rollout(model, 0.0)
            assert (await backend.train(model, await group_of(model))).step == 1
        assert heard == {before}
        record = Registry().get(NAME)
        assert record is not None
        assert record.spec.token.get_secret_value() == backend._token == model.inference_api_key
        with pytest.raises(AuthError):
            await art.connect(backend.url, before)
        async with art.connect(name=NAME) as other:
            assert (await other.info()).steps_made == 1


BLOCKED = """
import asyncio, sys, time
import art_cloud as art
from art_cloud.clusters import attached

attached.PING_SECONDS, attached.STUCK_SECONDS = 0.5, 1.0

async def main():
    options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
    async with art.up(sys.argv[1], name="blocked", lease=LEASE, on_loss="raise", **options) as up:
        started = (await up.info()).started_at
        time.sleep(3 * LEASE)  # a reward function that lets nothing else run
        assert (await up.info()).started_at == started
        print("the same server")

asyncio.run(main())
"""
"""A script whose lease is shorter than what it blocks its event loop for."""


@pytest.mark.slow
async def test_a_script_that_blocks_its_event_loop_is_a_client(cluster_home: Path) -> None:
    script = BLOCKED.replace("LEASE", "5")
    done = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script, "local"), stdout=asyncio.subprocess.PIPE
    )
    said, _ = await done.communicate()
    assert (said.decode(), done.returncode) == ("the same server\n", 0)


async def test_a_lease_is_not_renewed_when_the_event_loop_is_closed(
    cluster_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that goes on, as a notebook, has no client once its loop has ended."""
    monkeypatch.setattr(attached, "PING_SECONDS", 0.2)

    async def forget() -> None:
        await art.up("local", name=NAME, lease=4)

    await asyncio.to_thread(asyncio.run, forget())
    async with asyncio.timeout(120):
        while await get_provider("local").list():
            await asyncio.sleep(0.2)


async def test_a_stream_that_breaks_says_what_to_do(cluster_home: Path, tiny_model: Path) -> None:
    model = art.TrainableModel(name="agent", project="lost", base_model=str(tiny_model))
    async with art.up("local", name=NAME) as backend:
        await model.register(backend)
        stream = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=MESSAGES, max_tokens=200, stream=True
        )
        await anext(aiter(stream))
        await lose_the_machine(cluster_home)
        with pytest.raises(openai.APIConnectionError, match="in the middle of an answer"):
            async for _ in stream:
                pass
        assert await rollout(model, 0.0)


async def test_what_is_not_brought_back(
    cluster_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with art.up("local", name=NAME) as backend:
        await fleet.down(NAME)
        with pytest.raises(ServerUnavailableError, match="It was ended: art-cloud down"):
            await backend.info()

    async with art.up("local", name=NAME, on_loss="raise") as backend:
        await lose_the_machine(cluster_home)
        with pytest.raises(ServerUnavailableError, match=r"gone\. Start it again with art\.up"):
            await backend.info()

    monkeypatch.setattr(relaunch, "MAX_RELAUNCHES", 0)
    async with art.up("local", name=NAME) as backend:
        await lose_the_machine(cluster_home)
        with pytest.raises(ServerUnavailableError, match="started again 0 times already"):
            await backend.info()
