"""Logins over a real sshd: whose keys are taken, and whose are not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from art_cloud.clusters import fleet
from art_cloud.clusters.providers import get_provider
from art_cloud.clusters.providers.ssh.login import login
from art_cloud.clusters.registry import Registry
from art_cloud.clusters.relaunch import Relauncher
from art_cloud.links.endpoint import SSHRoute
from art_cloud.shared.errors import ConfigError, ProviderError

from ..rigs.ssh_box import Box, empty_at_the_end, spec
from ..rigs.sshd import make_key, needs_sshd

pytestmark = needs_sshd


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ART_CLOUD_HOME", str(tmp_path / "home"))


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    with empty_at_the_end(Box(tmp_path / "box")) as box:
        yield box


async def refusal(route: SSHRoute) -> str:
    with pytest.raises(ProviderError) as caught:
        async with login(route):
            pass
    return str(caught.value)


async def test_a_host_key_that_is_not_known_is_not_accepted(box: Box) -> None:
    known = box.known_hosts.read_text()
    box.known_hosts.write_text("")
    message = await refusal(box.route)
    assert "The host key of gpu-box is not known" in message
    assert message.endswith(f"ssh -F {box.config} gpu-box")
    assert box.known_hosts.read_text() == ""

    make_key(box.folder / "other_key")
    other = (box.folder / "other_key.pub").read_text()
    box.known_hosts.write_text(f"[127.0.0.1]:{box.port} {other}")
    assert "gpu-box shows another host key than the one in" in await refusal(box.route)

    # the name under which gcloud, for one, keeps keys
    box.known_hosts.write_text(known.replace(f"[127.0.0.1]:{box.port}", "compute.17"))
    with box.config.open("a") as config:
        config.write("  HostKeyAlias compute.17\n")
    async with login(box.route) as there:
        assert (await there.run("servers.py", "list"))["servers"] == []


async def test_a_key_that_is_not_taken(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    (box.folder / "client_key.pub").write_text("")
    assert "gpu-box does not let this user in" in await refusal(box.route)


async def test_a_box_that_is_off_is_unknown_not_stopped(box: Box) -> None:
    record, _ = Registry().claim("one", spec(box.asked))
    Registry().set_state(record, "running")
    box.stop()
    assert "gpu-box refuses ssh connections" in await refusal(box.route)
    [found] = await fleet.status()
    assert found.state == "unknown"
    assert "gpu-box refuses ssh connections" in found.detail
    assert await Relauncher(get_provider("ssh"), record, "relaunch")() is None  # it may be there
    with pytest.raises(ProviderError, match="ends by itself when"):
        await fleet.down("one")
    assert [one.name for one in Registry().list()] == ["one"]
    box.start()
    await fleet.down("one")
    assert Registry().list() == []


async def test_the_user_s_own_ssh_configuration_counts(box: Box, tmp_path: Path) -> None:
    """Include, Match, and a machine that is reached through another."""
    behind = box.config.read_text().replace("Host gpu-box", "Host behind")
    config = tmp_path / "config"
    command = f"command ssh -F {box.config} -W %h:%p gpu-box 2>/dev/null"  # takes a shell
    config.write_text(
        f"Include {box.config}\nMatch exec true\n  ServerAliveInterval 5\n"
        f"{behind}  ProxyJump gpu-box\n"
        f"{behind.replace('behind', 'piped')}  ProxyCommand {command}\n"
    )
    for host in ("gpu-box", "behind", "piped"):
        async with login(SSHRoute(host=host, config=str(config))) as there:
            assert (await there.run("prepare.py", "check"))["gpus"] == []
    config.write_text("Nonsense yes\n")
    with pytest.raises(ConfigError, match=r"(?s)ssh does not take 'gpu-box': .*nonsense"):
        async with login(SSHRoute(host="gpu-box", config=str(config))):
            pass
    with pytest.raises(ConfigError, match="ssh does not take"):
        async with login(SSHRoute(host="-oProxyCommand=false")):
            pass
