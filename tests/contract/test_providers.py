"""What every provider promises, tried with real servers: on this machine, over a real sshd, by the
real SkyPilot on a real Slurm, and by the real client of Modal with a control plane on loopback."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import modal
import psutil
import pytest
from pydantic import SecretStr

from art_cloud.clusters.providers import get_provider
from art_cloud.clusters.registry import Registry
from art_cloud.clusters.spec import ClusterSpec, Instance, Provider
from art_cloud.shared.errors import ConfigError, LaunchError, NotFoundError

from ..rigs.modal_plane import ModalPlane, modal_plane
from ..rigs.slurm_rig import SlurmRig, needs_slurm
from ..rigs.sshd import Sshd, needs_sshd

SECRETS = {"token": "the-token-of-a-test", "key": "a-key-of-the-store"}


class Cloud:
    """A provider with a place of its own, where machines can be lost."""

    def __init__(self, name: str, clusters: Path, options: dict[str, str]) -> None:
        self.name = name
        self.clusters = clusters
        """Where servers keep their state."""
        self.options = options

    url = "http://127.0.0.1:"
    """What the addresses of its servers begin with."""

    outlive_servers = False
    """Whether its machines do, for a while."""

    @property
    def provider(self) -> Provider:
        """Without memory: as another process would have it."""
        return get_provider(self.name)

    def spec(self, **changes: object) -> ClusterSpec:
        fields = {
            "provider": self.name,
            "store": (self.clusters.parent / "store").as_uri(),
            "options": self.options,
            "secrets": {"AWS_SECRET_ACCESS_KEY": SecretStr(SECRETS["key"])},
            **changes,
        }
        return ClusterSpec.model_validate(fields)

    def record(self, name: str) -> ClusterSpec:
        """The spec as `up` hands it to the provider."""
        record, _ = Registry().claim(name, self.spec())
        return record.spec.model_copy(
            update={"token": SecretStr(SECRETS["token"]), "secrets": self.spec().secrets}
        )

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter(["cmdline"]):
            if any(str(self.clusters) in part for part in process.info["cmdline"] or []):
                found.append(process)
        return found

    def lose(self, name: str) -> None:
        """The machine is gone, with all processes and its disk."""
        state = str(self.clusters / name)
        [process] = [one for one in self.processes() if state in " ".join(one.cmdline())]
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
        shutil.rmtree(self.clusters / name)


class ModalCloud(Cloud):
    url = "https://127.0.0.2:"

    def __init__(self, plane: ModalPlane) -> None:
        super().__init__("modal", plane.folder / "sandboxes", {"gpu": "H100"})
        self._plane = plane

    def processes(self) -> list[psutil.Process]:
        started = (one.process for one in self._plane.running if one.process)
        return [psutil.Process(process.pid) for process in started]

    def lose(self, name: str) -> None:
        self._plane.lose(name)


class SkyPilotCloud(Cloud):
    outlive_servers = True

    def __init__(self, rig: SlurmRig) -> None:
        clusters = rig.nodes / ".sky_clusters"
        shutil.rmtree(clusters, ignore_errors=True)
        options = {"gpu": "H100", "cloud": "slurm", "python": sys.executable}
        super().__init__("skypilot", clusters, options)
        self._rig = rig

    def processes(self) -> list[psutil.Process]:
        return self._rig.servers()

    def lose(self, name: str) -> None:
        self._rig.preempt(self._rig.jobs(name))


class ModalAccount(Cloud):
    """Modal itself, or whatever the environment leads its client to. Its machines are T4s, and
    what the store keeps goes with them."""

    url = "https://"

    def __init__(self, tmp_path: Path) -> None:
        super().__init__("modal", tmp_path / "nothing-is-here", {"gpu": "T4"})

    def processes(self) -> list[psutil.Process]:
        return []

    def lose(self, name: str) -> None:
        def end() -> None:
            modal.Sandbox.from_name("art-cloud", name).terminate(wait=True)

        with ThreadPoolExecutor(1) as apart:  # from the tests' event loop
            apart.submit(end).result()


LIVE = "ART_MODAL_LIVE" in os.environ
"""`make test-modal-live`: on an account, instead of the plane."""


def clouds() -> list[Any]:
    marks = [needs_slurm, pytest.mark.long, pytest.mark.timeout(600)]
    skypilot = pytest.param("skypilot", marks=[*marks, pytest.mark.xdist_group("skypilot")])
    everywhere = ["local", pytest.param("ssh", marks=needs_sshd), skypilot, "modal"]
    return ["account"] if LIVE else everywhere


@pytest.fixture(params=clouds())
def cloud(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cloud]:
    """At its end nothing may run that a test did not end."""
    home, box = tmp_path / "home", tmp_path / "box"
    monkeypatch.setenv("ART_CLOUD_HOME", str(home))
    box.mkdir()
    with ExitStack() as stack:
        if request.param == "local":
            cloud = Cloud("local", home / "clusters", {})
        elif request.param == "skypilot":
            rig: SlurmRig = request.getfixturevalue("slurm")
            for key, value in rig.environment.items():
                monkeypatch.setenv(key, value)
            stack.callback(lambda: rig.preempt(rig.jobs()))
            cloud = SkyPilotCloud(rig)
        elif request.param == "account":
            cloud = ModalAccount(tmp_path)
        elif request.param == "modal":
            cloud = ModalCloud(stack.enter_context(modal_plane(tmp_path, monkeypatch)))
        else:
            sshd = stack.enter_context(Sshd(tmp_path / "sshd", f"SetEnv HOME={box}"))
            options = {"host": sshd.host, "ssh_config": str(sshd.config), "python": sys.executable}
            cloud = Cloud("ssh", box / ".art-cloud" / "clusters", options)
        try:
            yield cloud
            assert cloud.processes() == []
        finally:
            for process in cloud.processes():
                process.kill()


async def only(cloud: Cloud) -> Instance:
    [instance] = await cloud.provider.list()
    return instance


async def collect(lines: AsyncIterator[str]) -> list[str]:
    return [line async for line in lines]


async def test_from_launch_to_terminate(cloud: Cloud) -> None:
    spec = cloud.record("one")
    assert (await cloud.provider.offers(spec))[0].provider == cloud.name
    assert await cloud.provider.list() == []

    await asyncio.gather(*(cloud.provider.launch(spec, "one") for _ in range(3)))
    first = await only(cloud)
    assert (first.name, first.provider) == ("one", cloud.name)
    assert first.state in ("starting", "running")
    assert (await cloud.provider.endpoint("one")).url.startswith(cloud.url)
    await cloud.provider.launch(spec, "one")
    again = await only(cloud)
    assert (again.state, again.detail) == ("running", first.detail)
    assert abs((again.started_at - first.started_at).total_seconds()) < 1

    assert len(cloud.processes()) == 1 or LIVE
    written = [path.read_bytes() for path in cloud.clusters.rglob("*") if path.is_file()]
    for secret in SECRETS.values():
        assert not any(secret in " ".join(server.cmdline()) for server in cloud.processes())
        assert not any(secret.encode() in content for content in written)

    following = asyncio.create_task(collect(cloud.provider.logs("one", follow=True)))
    await cloud.provider.terminate("one")
    assert await cloud.provider.list() == []
    assert cloud.processes() == []
    assert any("stopped" in line for line in await following)
    assert await collect(cloud.provider.logs("one", follow=False)) == following.result()

    await cloud.provider.terminate("one")
    with pytest.raises(LaunchError, match=r"one.* ended"):
        await cloud.provider.endpoint("one")


async def test_a_server_that_can_not_start_says_why(cloud: Cloud) -> None:
    spec = cloud.record("one").model_copy(update={"engine": "no-such-engine"})
    await cloud.provider.launch(spec, "one")
    with pytest.raises(LaunchError, match=r"(?s)The last lines.*no-such-engine"):
        await cloud.provider.endpoint("one")
    if cloud.outlive_servers:
        await cloud.provider.terminate("one")
    assert await cloud.provider.list() == []


async def test_a_lost_machine_is_not_listed_and_can_be_replaced(cloud: Cloud) -> None:
    for name in ("one", "two"):
        await cloud.provider.launch(cloud.record(name), name)
    details = {one.name: one.detail for one in await cloud.provider.list()}
    assert details.keys() == {"one", "two"}
    cloud.lose("one")
    assert (await only(cloud)).detail == details["two"]
    with pytest.raises(LaunchError):
        await cloud.provider.endpoint("one")

    await cloud.provider.launch(cloud.record("one"), "one")
    found = {one.name: one.detail for one in await cloud.provider.list()}
    assert found["one"] != details["one"]
    assert found["two"] == details["two"]
    await cloud.provider.terminate("one")
    assert (await only(cloud)).name == "two"
    await asyncio.gather(*(cloud.provider.terminate("two") for _ in range(2)))
    assert await cloud.provider.list() == []


async def test_what_there_is_not(cloud: Cloud) -> None:
    Registry().claim("never", cloud.spec())
    await cloud.provider.terminate("never")
    with pytest.raises(NotFoundError, match="never"):
        await collect(cloud.provider.logs("never", follow=False))


async def test_an_unknown_option_is_named_before_anything_is_done(cloud: Cloud) -> None:
    spec = cloud.spec(options={**cloud.options, "colour": "red"})
    with pytest.raises(ConfigError, match="colour"):
        await cloud.provider.offers(spec)
    assert not cloud.clusters.exists()
