"""The real SkyPilot on a real Slurm of two nodes: from a launch to the end of its machines."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import art_cloud as art
from art_cloud import fleet
from art_cloud.errors import ConfigError, LaunchError, NotFoundError, ProviderError
from art_cloud.providers import ClusterSpec, get_provider
from art_cloud.registry import Registry

from ..s3_servers import S3Server
from ..slurm_rig import SlurmRig, needs_slurm

pytestmark = [needs_slurm, pytest.mark.xdist_group("skypilot"), pytest.mark.timeout(1200)]
ASKED: dict[str, Any] = {"gpu": "H100", "cloud": "slurm", "python": sys.executable}


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmRig]:
    with SlurmRig(tmp_path_factory.mktemp("slurm")) as rig:
        yield rig


@pytest.fixture(autouse=True)
def home(rig: SlurmRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """At its end nothing may run that a test did not end."""
    monkeypatch.setenv("ART_CLOUD_HOME", str(tmp_path / "home"))
    for key, value in rig.environment.items():
        monkeypatch.setenv(key, value)
    try:
        yield
        assert rig.jobs() == []
        assert rig.servers() == []
    finally:
        if rig.jobs():
            rig.preempt()


async def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.2)


async def test_an_agent_is_trained_over_the_tunnel(
    rig: SlurmRig, moto: S3Server, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's own YAML is taken, and a second launch of the name changes nothing."""
    moto.use(monkeypatch)
    task = tmp_path / "task.yaml"
    task.write_text(f"envs:\n  AWS_CA_BUNDLE: {moto.ca}\n")
    asked = {**ASKED, "yaml": str(task), "store": f"s3://{moto.make_bucket()}/art"}
    model = art.TrainableModel(name="agent", project="tests", base_model=str(tiny_model))
    question: art.Messages = [{"role": "user", "content": "1"}]
    async with art.up("skypilot", name="one", **asked) as backend:
        await model.register(backend)
        answer = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=question, max_tokens=4, n=2
        )
        group = art.TrajectoryGroup(
            art.Trajectory(messages_and_choices=[*question, choice], reward=float(number))
            for number, choice in enumerate(answer.choices)
        )
        assert (await backend.train(model, [group])).step == 1

        [found] = await fleet.status()
        assert (found.name, found.provider, found.recorded) == ("one", "skypilot", True)
        assert found.state in ("running", "unreachable")  # it has 5 s to answer
        assert found.detail.startswith("slurm/artci, sky status art-cloud-one")
        log = [line async for line in fleet.logs("one")]
        assert any("art-server" in line and "listens" in line for line in log)
        record = Registry().get("one")
        assert record is not None
        [machine] = rig.jobs()
        await get_provider("skypilot").launch(record.spec, "one")
        assert rig.jobs() == [machine]
        assert len(rig.servers()) == 1
        assert not any(moto.secret_key in " ".join(one.cmdline()) for one in rig.servers())
    assert await fleet.status() == []
    with pytest.raises(LaunchError, match=r"one.* gone"):
        await get_provider("skypilot").endpoint("one")
    assert not rig.holds(record.spec.token.get_secret_value())


async def test_two_nodes_go_when_their_server_has_ended(rig: SlurmRig, tmp_path: Path) -> None:
    """As its idle limit or its lease would end it. Nobody asks SkyPilot for anything."""
    store = (tmp_path / "store").as_uri()
    backend = await art.up("skypilot", name="two", num_nodes=2, store=store, **ASKED)
    [found] = await get_provider("skypilot").list()
    assert found.detail.startswith("slurm/artci, 2 nodes: ")
    await backend.close()
    for server in rig.servers():
        server.terminate()
    await until(lambda: not rig.jobs(), 240)
    assert await get_provider("skypilot").list() == []


async def test_a_launch_that_is_killed_leaves_nothing_that_down_does_not_find(
    rig: SlurmRig, tmp_path: Path
) -> None:
    options = [part for key, value in ASKED.items() for part in ("-o", f"{key}={value}")]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from art_cloud.cli import main; main()", "up", "skypilot"),
        *("--name", "three", "--store", (tmp_path / "store").as_uri(), *options),
    )
    try:
        await until(lambda: bool(rig.jobs()) or process.returncode is not None)
    finally:
        process.kill()
        await process.wait()
    await fleet.down("three")
    assert rig.jobs() == []
    assert await fleet.status() == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"colour": "red"}, "colour"),
        ({"gpu": None}, "needs a gpu"),
        ({"gpu": "H10"}, "No matching GPU.*H10"),
        ({"yaml": "no-such.yaml"}, "no-such.yaml"),
        ({"cloud": "aws"}, "(?i)aws"),
    ],
)
async def test_what_can_not_be_meant(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, LaunchError), match=message):
        await get_provider("skypilot").offers(spec({**ASKED, **changes}))


async def test_a_yaml_that_runs_something_else_is_refused(tmp_path: Path) -> None:
    task = tmp_path / "task.yaml"
    task.write_text("run: sleep 1\n")
    with pytest.raises(ConfigError, match="`run`"):
        await get_provider("skypilot").offers(spec({**ASKED, "yaml": str(task)}))


async def test_without_its_server_nothing_is_said_of_what_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SKYPILOT_API_SERVER_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ProviderError, match="API server"):
        await get_provider("skypilot").list()


async def test_what_there_is_not() -> None:
    provider = get_provider("skypilot")
    await provider.terminate("nothing")
    with pytest.raises(NotFoundError, match="nothing"):
        [line async for line in provider.logs("nothing", follow=False)]


def spec(options: dict[str, Any]) -> ClusterSpec:
    return ClusterSpec(provider="skypilot", store="file:///of/the/node", options=options)
