"""The real SkyPilot on an AWS of moto's with real machines: `make test-aws`.

A launch takes a minute or two, so each is used for all that can be seen of it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import art_cloud as art
from art_cloud.clusters import fleet
from art_cloud.clusters.providers import get_provider
from art_cloud.clusters.registry import Registry
from art_cloud.clusters.spec import ClusterSpec
from art_cloud.shared.errors import NoMachineError
from art_cloud.store.checkpoints import Checkpoints
from art_cloud.store.opening import open_store

from ..rigs.aws_rig import PRICES, ZONES, AwsRig, needs_aws_rig, zone_of
from ..rigs.killed_launch import kill_launch, sweep_the_only
from ..rigs.waiting import until

pytestmark = [
    needs_aws_rig,
    pytest.mark.aws,
    pytest.mark.xdist_group("aws"),
    pytest.mark.timeout(1800),
]
ASKED: dict[str, Any] = {"gpu": "L4", "cloud": "aws", "python": sys.executable}
QUESTION: art.Messages = [{"role": "user", "content": "1"}]
SOLD_OUT = "InsufficientInstanceCapacity"
EAST, WEST = ZONES[:2], ZONES[2:]


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AwsRig]:
    with AwsRig(tmp_path_factory.mktemp("aws")) as rig:
        yield rig


@pytest.fixture(autouse=True)
def home(aws: AwsRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """At its end nothing may run that a test did not end."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ART_CLOUD_HOME", str(tmp_path / "home"))
    for key, value in aws.environment.items():
        monkeypatch.setenv(key, value)
    aws.refuse_nothing()
    yield
    left = aws.instances()
    aws.terminate(left)
    assert left == []
    assert aws.servers() == []


@pytest.fixture
def store(aws: AwsRig) -> str:
    return f"s3://{aws.make_bucket()}/art"


async def rollouts(model: art.TrainableModel[None]) -> art.TrajectoryGroup:
    answer = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=QUESTION, max_tokens=4, n=2
    )
    return art.TrajectoryGroup(
        art.Trajectory(messages_and_choices=[*QUESTION, choice], reward=float(number))
        for number, choice in enumerate(answer.choices)
    )


@pytest.mark.parametrize("code", [SOLD_OUT, "VcpuLimitExceeded", "MaxSpotInstanceCountExceeded"])
async def test_nothing_can_be_had(aws: AwsRig, store: str, code: str) -> None:
    """What was tried is said, with what AWS said to it, and nothing is left."""
    aws.refuse(code)
    with pytest.raises(NoMachineError, match="found no machine") as raised:
        await art.up("skypilot", name="none", store=store, spot=True, **ASKED)
    said = str(raised.value)
    for region in PRICES:
        assert region in said
    assert code in said
    assert Registry().list() == []
    assert {market for _, market in aws.asked()} == {"spot", "on-demand"}


async def test_nothing_under_the_limit(aws: AwsRig, store: str) -> None:
    """Spot is sold out everywhere, and what is left is too dear: it is not taken."""
    aws.refuse(SOLD_OUT, market="spot")
    with pytest.raises(NoMachineError):
        await art.up("skypilot", name="dear", store=store, spot=True, max_hourly=0.9, **ASKED)
    assert aws.asked() == {(zone, "spot") for zone in ZONES}


async def test_an_agent_is_trained_on_spot_machines_that_are_taken_back(
    aws: AwsRig, store: str, tiny_model: Path, record_property: Callable[[str, object], None]
) -> None:
    """The first is in the other region, as the near one is sold out; and the second the other
    way round. Nobody gets in but over ssh."""
    aws.refuse(SOLD_OUT, *EAST, market="spot")
    model = art.TrainableModel(name="agent", project="tests", base_model=str(tiny_model))
    asked = {**ASKED, "spot": True, "max_hourly": 0.9}
    async with art.up("skypilot", name="spot", store=store, **asked) as backend:
        [machine] = aws.instances("spot")
        assert machine["InstanceLifecycle"] == "spot"
        assert zone_of(machine) in WEST
        await model.register(backend)
        assert (await backend.train(model, [await rollouts(model)])).step == 1

        [status] = await fleet.status("spot")
        assert (status.provider, status.recorded, status.state) == ("skypilot", True, "running")
        assert status.detail.startswith(f"aws/us-west-2, {machine['InstanceId']}")

        assert aws.open_ports(machine) == {22}
        port = int((await get_provider("skypilot").endpoint("spot")).url.rpartition(":")[2])
        assert await asyncio.to_thread(connects, machine["PrivateIpAddress"], 22)
        assert not await asyncio.to_thread(connects, machine["PrivateIpAddress"], port)

        aws.refuse_nothing()
        aws.refuse(SOLD_OUT, *WEST)
        aws.terminate([machine])
        lost = time.monotonic()
        while await get_provider("skypilot").list():
            pass
        record_property("seconds until the loss was seen", round(time.monotonic() - lost))
        group = await rollouts(model)  # a pause
        assert {sample.policy for one in group for sample in one.samples()} == {"tests/agent@1"}
        assert (await backend.train(model, [group])).step == 2
        [another] = aws.instances("spot")
        assert zone_of(another) in EAST
    assert aws.instances() == []
    assert Checkpoints(open_store(store), model.full_name).steps() == [0, 1, 2]


async def test_a_machine_that_was_stopped_goes_on_and_ends(aws: AwsRig, store: str) -> None:
    """It is one on demand, as there are no spot machines left."""
    aws.refuse("MaxSpotInstanceCountExceeded", market="spot")
    asked = {**ASKED, "spot": True}
    async with art.up("skypilot", name="halted", store=store, keep=True, **asked):
        [machine] = aws.instances("halted")
        assert "InstanceLifecycle" not in machine
    await aws.sky("stop", "--yes", "art-cloud-halted")
    [stopped] = aws.instances("halted")
    assert stopped["State"]["Name"] == "stopped"
    assert aws.servers() == []
    [status] = await fleet.status("halted")
    assert (status.recorded, status.state) == (True, "stopped")

    async with art.up("skypilot", name="halted", store=store, keep=True, **asked) as backend:
        assert (await backend.info()).version == art.__version__
        [started] = aws.instances("halted")
        assert started["InstanceId"] == machine["InstanceId"]
    await aws.sky("stop", "--yes", "art-cloud-halted")
    await fleet.down("halted")


async def test_a_launch_that_is_killed_leaves_nothing_that_sweep_does_not_find(
    aws: AwsRig, store: str
) -> None:
    await kill_launch("orphan", store, ASKED, lambda: bool(aws.instances("orphan")))
    await sweep_the_only("orphan")
    assert aws.instances() == []


async def test_a_machine_goes_by_itself_when_its_server_has_ended(aws: AwsRig, store: str) -> None:
    provider = get_provider("skypilot")
    asked = ClusterSpec.model_validate(
        {
            "provider": "skypilot",
            "store": store,
            "options": {**ASKED, "spot": True},
            "lease_seconds": 1,
            "token": "0" * 32,
        }
    )
    await provider.launch(asked, "alone")
    await until(lambda: not aws.servers())
    log = [line async for line in provider.logs("alone", follow=False)]
    assert any("lease" in line for line in log)
    await until(lambda: aws.instances() == [])
    while await provider.list():  # SkyPilot may remember it until its last look at it gives up
        pass


def connects(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), 5).close()
    except OSError:
        return False
    return True
