"""The real SkyPilot on a real Slurm of three nodes: from a launch to the end of its machines.

A launch takes long, so each is used for all that can be seen of it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

import art_cloud as art
from art_cloud.clusters import fleet
from art_cloud.clusters.install import lock
from art_cloud.clusters.providers import get_provider
from art_cloud.clusters.registry import Registry
from art_cloud.clusters.spec import ClusterSpec
from art_cloud.shared.errors import ConfigError, LaunchError, ProviderError
from art_cloud.store.checkpoints import Checkpoints
from art_cloud.store.opening import open_store

from ..rigs.killed_launch import kill_launch, sweep_the_only
from ..rigs.s3_servers import S3Server
from ..rigs.slurm_rig import SlurmRig, needs_slurm
from ..rigs.waiting import until

pytestmark = [
    needs_slurm,
    pytest.mark.slow,
    pytest.mark.xdist_group("skypilot"),
    pytest.mark.timeout(1200),
]
ASKED: dict[str, Any] = {"gpu": "H100", "cloud": "slurm", "python": sys.executable}
QUESTION: art.Messages = [{"role": "user", "content": "1"}]


def spec(**changes: Any) -> ClusterSpec:
    fields = {"provider": "skypilot", "store": "file:///of/the/node", "options": ASKED, **changes}
    return ClusterSpec.model_validate(fields)


@pytest.fixture(autouse=True)
def home(slurm: SlurmRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """At its end nothing may run that a test did not end, but what the first one leaves alone."""
    monkeypatch.setenv("ART_CLOUD_HOME", str(tmp_path / "home"))
    for key, value in slurm.environment.items():
        monkeypatch.setenv(key, value)
    yield
    left = [job for job in slurm.jobs() if job not in slurm.jobs("alone")]
    slurm.preempt(left)
    assert left == []
    assert slurm.servers() == []


async def test_a_server_without_clients_ends_and_says_why(slurm: SlurmRig, tmp_path: Path) -> None:
    """Its two nodes are left alone from here on, for the last test to look at."""
    provider = get_provider("skypilot")
    store = (tmp_path / "store").as_uri()
    asked = spec(store=store, lease_seconds=1, token="0" * 32, options={**ASKED, "num_nodes": 2})
    await provider.launch(asked, "alone")
    [found] = await provider.list()
    assert (found.name, found.state) == ("alone", "running")
    assert ", 2 nodes: " in found.detail
    await provider.endpoint("alone")
    await until(lambda: not slurm.servers())
    log = [line async for line in provider.logs("alone", follow=False)]
    assert any("lease" in line for line in log)


async def rollouts(model: art.TrainableModel[None]) -> art.TrajectoryGroup:
    answer = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=QUESTION, max_tokens=4, n=2
    )
    return art.TrajectoryGroup(
        art.Trajectory(messages_and_choices=[*QUESTION, choice], reward=float(number))
        for number, choice in enumerate(answer.choices)
    )


async def test_an_agent_is_trained_over_the_tunnel_on_a_machine_that_is_lost(
    slurm: SlurmRig,
    moto: S3Server,
    tmp_path: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The user's own YAML is taken, no secret is where others could read it, and the loss is found
    within a minute."""
    moto.use(monkeypatch)
    monkeypatch.setenv("ART_PROGRESS", "1")
    task = tmp_path / "task.yaml"
    task.write_text(f"envs:\n  AWS_CA_BUNDLE: {moto.ca}\n")
    store = f"s3://{moto.make_bucket()}/art"
    model = art.TrainableModel(name="agent", project="tests", base_model=str(tiny_model))
    async with art.up("skypilot", name="one", store=store, yaml=str(task), **ASKED) as backend:
        await model.register(backend)
        assert (await backend.train(model, [await rollouts(model)])).step == 1

        [status] = await fleet.status("one")
        assert (status.provider, status.recorded, status.state) == ("skypilot", True, "running")
        assert status.detail.startswith("slurm/artci, ")
        assert status.detail.endswith(", sky status art-cloud-one")
        log = [line async for line in fleet.logs("one")]
        assert any("art-server" in line and "listens" in line for line in log)
        record = Registry().get("one")
        assert record is not None
        [machine] = slurm.jobs("one")
        token = record.spec.token.get_secret_value()
        for secret in (token, moto.secret_key):
            assert slurm.programs_with(secret) == []
        assert slurm.files_with(token) == []

        slurm.preempt([machine])
        capfd.readouterr()
        pause = asyncio.create_task(rollouts(model))
        await until(lambda: "one is gone: its machine was lost" in capfd.readouterr().err, 60)
        group = await pause
        assert {sample.policy for one in group for sample in one.samples()} == {"tests/agent@1"}
        assert (await backend.train(model, [group])).step == 2
        assert slurm.jobs("one") != [machine]
    assert slurm.jobs("one") == []
    assert Checkpoints(open_store(store), model.full_name).steps() == [0, 1, 2]
    with pytest.raises(LaunchError, match=r"one.* gone"):
        await get_provider("skypilot").endpoint("one")
    assert slurm.files_with(token) == []


async def test_a_launch_that_is_killed_leaves_nothing_that_sweep_does_not_find(
    slurm: SlurmRig, tmp_path: Path
) -> None:
    store = (tmp_path / "store").as_uri()
    await kill_launch("three", store, ASKED, lambda: bool(slurm.jobs("three")))
    await sweep_the_only("three")
    assert slurm.jobs("three") == []


@pytest.mark.long
async def test_art_cloud_is_installed_where_it_is_not(slurm: SlurmRig, tmp_path: Path) -> None:
    """From a wheel of this checkout, with the packages that its lock names."""
    provider = get_provider("skypilot")
    options = {key: value for key, value in ASKED.items() if key != "python"}
    asked = spec(store=(tmp_path / "store").as_uri(), token="0" * 32, options=options)
    await provider.launch(asked, "new")
    await provider.endpoint("new")
    [server] = slurm.servers()
    [python] = slurm.nodes.rglob("envs/*/bin/python")
    assert server.cmdline()[0] == str(python)
    [site] = python.parents[1].glob("lib/python*/site-packages")
    [peft] = distributions(name="peft", path=[str(site)])
    assert f"peft=={peft.version}" in lock("transformers").read_text().splitlines()
    await provider.terminate("new")


@pytest.mark.long
async def test_a_setup_that_fails_is_shown_and_leaves_nothing(
    slurm: SlurmRig, tmp_path: Path
) -> None:
    task = tmp_path / "task.yaml"
    task.write_text("setup: |\n  echo no driver\n  exit 3\n")
    store = (tmp_path / "store").as_uri()
    with pytest.raises(LaunchError, match=r"(?s)four ended, or was never started.*no driver"):
        await art.up("skypilot", name="four", store=store, yaml=str(task), **ASKED)
    assert slurm.jobs("four") == []
    assert Registry().list() == []


async def test_offers_are_what_can_be_taken() -> None:
    """Slurm has no A100, and SkyPilot knows no price for what it has."""
    choices = [{"accelerators": "A100"}, {"accelerators": "H100"}]
    asked = spec(options={"cloud": "slurm", "any_of": choices}, max_hourly=1.0)
    [offer] = await get_provider("skypilot").offers(asked)
    assert (offer.region, offer.machine, offer.price_per_hour) == ("slurm", "H100:1", 0.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu": None}, "needs a gpu"),
        ({"gpu": "H10"}, "(?s)No matching GPU.*H10.*Near names: H100"),
        ({"yaml": "no-such.yaml"}, "no-such.yaml"),
        ({"cloud": "aws"}, "(?i)aws"),
    ],
)
async def test_what_can_not_be_meant(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, LaunchError), match=message):
        await get_provider("skypilot").offers(spec(options={**ASKED, **changes}))


async def test_a_yaml_that_runs_something_else_is_refused(tmp_path: Path) -> None:
    task = tmp_path / "task.yaml"
    task.write_text("run: sleep 1\n")
    with pytest.raises(ConfigError, match="`run`"):
        await get_provider("skypilot").offers(spec(options={**ASKED, "yaml": str(task)}))


async def test_without_its_server_nothing_is_said_of_what_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SKYPILOT_API_SERVER_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ProviderError, match="API server"):
        await get_provider("skypilot").list()


async def test_machines_go_by_themselves_when_their_server_has_ended(slurm: SlurmRig) -> None:
    """Those of the first test: autostop took them down, and SkyPilot knows."""
    await until(lambda: not slurm.jobs("alone"))
    assert await get_provider("skypilot").list() == []
