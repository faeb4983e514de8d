"""Modal's servers that scale to zero: deployed by the real `modal deploy`, run by its real
container entrypoint, on a control plane on loopback."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import modal
import psutil
import pytest

import art_cloud as art
from art_cloud.clusters import fleet, sweep
from art_cloud.clusters.providers import get_provider
from art_cloud.clusters.spec import ClusterSpec
from art_cloud.shared.errors import AuthError, ConfigError, LaunchError

from ..rigs.modal_plane import ModalPlane, modal_plane
from ..rigs.waiting import until

ROOT = Path(__file__).parents[2]
NAME = "agent"
UNTIL_SECONDS = 240.0
COMPLETIONS = "/v1/chat/completions"
WINDOW = 8.0
"""Seconds without a request, after which the plane ends a container."""


@pytest.fixture
def plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModalPlane]:
    monkeypatch.setenv("ART_CLOUD_HOME", str(tmp_path / "home"))
    with modal_plane(tmp_path, monkeypatch) as plane:
        yield plane
        assert plane.servers == []


async def rollout(model: art.TrainableModel[Any], reward: float) -> art.Trajectory:
    messages: art.Messages = [{"role": "user", "content": "hello"}]
    answer = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_tokens=4
    )
    return art.Trajectory(messages_and_choices=[*messages, answer.choices[0]], reward=reward)


async def group(model: art.TrainableModel[Any]) -> list[art.TrajectoryGroup]:
    return await art.gather_trajectory_groups(
        [art.TrajectoryGroup(rollout(model, float(number)) for number in range(2))]
    )


@pytest.mark.slow
async def test_from_zero_to_zero_and_back(
    plane: ModalPlane, tiny_model: Path, tmp_path: Path
) -> None:
    model = art.TrainableModel(name="agent", project="modal", base_model=str(tiny_model))
    store = (tmp_path / "store").as_uri()
    async with art.up(
        "modal", name=NAME, gpu="H100", serverless=True, store=store, idle=WINDOW
    ) as backend:
        [server] = plane.servers
        assert server.function.autoscaler_settings.max_containers == 1
        await model.register(backend)
        assert (await backend.train(model, await group(model))).step == 1

        await until(lambda: len(server.codes) == server.starts)
        starts = server.starts
        [found] = await fleet.status()
        assert (found.name, found.state) == (NAME, "asleep")
        assert server.starts == starts  # to look wakes nobody

        groups = await group(model)
        assert server.starts == starts + 1
        assert await model.get_step() == 1

        training = asyncio.create_task(backend.train(model, groups))
        await until(lambda: server.requests > 0)
        await asyncio.to_thread(plane.scale_down, server)
        assert (await training).step == 2
        assert await model.get_step() == 2

        lines = [line async for line in fleet.logs(NAME)]
        for word in ("listens on", "stopped"):
            assert sum(word in line for line in lines) >= starts
        assert set(server.codes) == {0}
        assert backend._token not in "\n".join(lines)
    assert await fleet.status() == []
    assert plane.control.environments.keys().isdisjoint(plane.control.secrets.values())


@pytest.mark.slow
async def test_inference_scales_out_and_one_server_trains(
    plane: ModalPlane, tiny_model: Path, tmp_path: Path
) -> None:
    model = art.TrainableModel(name="agent", project="modal", base_model=str(tiny_model))
    store = (tmp_path / "store").as_uri()
    async with art.up(
        "modal", name=NAME, gpu="H100", serverless=True, replicas=2, snapshot=True, store=store
    ) as backend:
        trains, answers = plane.servers
        await model.register(backend)
        assert (await backend.train(model, await group(model))).step == 1
        assert await fleet.status()

        async def ask_many() -> set[str]:
            rollouts = await asyncio.gather(*(rollout(model, 0.0) for _ in range(40)))
            return {one.samples()[0].policy for one in rollouts}

        async with asyncio.timeout(UNTIL_SECONDS):
            while answers.starts < 2:
                assert await ask_many() == {"modal/agent@1"}
        await until(lambda: [one.listens for one in answers.containers] == [True, True])
        assert (await backend.train(model, await group(model))).step == 2
        before = [one.asked[COMPLETIONS] for one in answers.containers]
        assert await ask_many() == {"modal/agent@2"}
        after = [one.asked[COMPLETIONS] for one in answers.containers]
        assert all(then < now for then, now in zip(before, after, strict=True))
        assert COMPLETIONS not in trains.containers[0].asked
        assert trains.starts == 1
        assert plane.calls["ContainerCheckpoint"] == 3

        await asyncio.to_thread(plane.scale_down, trains)
        [found] = await fleet.status()
        assert (found.state, trains.starts) == ("asleep", 1)
        assert found.detail.endswith("containers: 2")
        await ask_many()
        assert trains.starts == 1
    assert await fleet.status() == []


async def test_nobody_wakes_it_without_a_proxy_token(plane: ModalPlane, tmp_path: Path) -> None:
    async def up() -> art.Backend:
        return await art.up("modal", name=NAME, gpu="H100", serverless=True, store=str(tmp_path))

    with pytest.MonkeyPatch.context() as without:
        without.delenv("MODAL_PROXY_TOKEN_ID")
        with pytest.raises(ConfigError, match="proxy-tokens create"):
            await up()
    assert plane.calls["FunctionCreate"] == 0

    plane.proxy_token = ("wk-another", "ws-another")
    with pytest.raises(AuthError, match="a proxy token of your workspace"):
        await up()
    assert plane.servers == []
    assert plane.calls["ContainerHello"] == 0


async def test_what_modal_refuses_to_deploy(plane: ModalPlane, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="not-there"):
        await art.up(
            "modal", name=NAME, gpu="H100", serverless=True, image="registry.test/not-there:1",
            store=str(tmp_path),
        )  # fmt: skip
    with pytest.raises(ConfigError, match="at most 48 letters"):
        await art.up(
            "modal", name=60 * "n", gpu="H100", serverless=True, store=str(tmp_path)
        )  # fmt: skip
    assert await fleet.status() == []


async def test_given_up_while_there_is_no_capacity(plane: ModalPlane, tmp_path: Path) -> None:
    async def up() -> None:
        await art.up("modal", name=NAME, gpu="H100", serverless=True, store=str(tmp_path))

    plane.capacity = False
    waiting = asyncio.create_task(up())
    await until(lambda: any(server.refusals for server in plane.servers))
    [found] = await fleet.status()
    assert found.state == "asleep"
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await fleet.status() == []
    assert plane.control.environments.keys().isdisjoint(plane.control.secrets.values())


async def test_deployed_by_hand(plane: ModalPlane) -> None:
    async def run_modal(*arguments: str, **variables: str) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "modal", *arguments),
            env=os.environ | variables,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await process.communicate()
        assert process.returncode == 0, said.decode()

    await run_modal("secret", "create", "art-serverless-mine", "ART_CLOUD_TOKEN=of-my-own")
    wanted = {"name": "mine", "gpu": "L4", "flags": ["--name", "mine"]}
    await run_modal(
        "deploy", str(ROOT / "launch/modal/app.py"), ART_CLOUD_DEPLOY=json.dumps(wanted)
    )
    [found] = await fleet.status()
    assert (found.name, found.state, found.recorded) == ("mine", "asleep", False)
    [kept], failures = await sweep.look()
    assert (kept.kept, failures) == ("it costs nothing until somebody wakes it", [])
    await fleet.down("mine")
    assert await fleet.status() == []
    assert plane.control.environments.keys().isdisjoint(plane.control.secrets.values())


async def test_its_app_is_stopped_from_outside(plane: ModalPlane, tmp_path: Path) -> None:
    provider, options = get_provider("modal"), {"gpu": "H100", "serverless": True}
    spec = ClusterSpec.model_validate(
        {"provider": "modal", "store": str(tmp_path), "options": options}
    )
    await provider.launch(spec, NAME)
    app = await modal.App.lookup.aio(f"art-serverless-{NAME}")
    await app.stop.aio()
    assert await provider.list() == []
    with pytest.raises(LaunchError, match="nothing is left of it"):
        await provider.endpoint(NAME)
    await provider.terminate(NAME)
    assert plane.control.environments.keys().isdisjoint(plane.control.secrets.values())


async def test_killed_while_it_is_deployed(plane: ModalPlane, tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from art_cloud.cli.main import main; main()"),
        *("up", "modal", "--serverless", "--name", NAME),
        *("-o", "gpu=H100", "--store", str(tmp_path / "store")),
    )
    await until(lambda: plane.calls["AppCreate"] > 0)
    deploying = psutil.Process(process.pid).children()
    process.kill()
    await process.wait()
    await asyncio.to_thread(psutil.wait_procs, deploying, 30)
    assert not any(one.is_running() for one in deploying)
    await fleet.down(NAME)
    assert await fleet.status() == []
