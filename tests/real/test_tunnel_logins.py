"""Logins for tunnels, at a real sshd: what they take, and what is wrong with them."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from art_cloud.links.endpoint import SSHRoute
from art_cloud.links.logins import forget_login, log_in_early
from art_cloud.links.tunnel import open_tunnel
from art_cloud.shared.errors import ConfigError, ProviderError, ServerUnavailableError

from ..rigs.calls import ask
from ..rigs.server_process import ServerProcess
from ..rigs.sshd import Sshd, make_key, needs_sshd, run
from ..rigs.waiting import until

pytestmark = needs_sshd


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Sshd]:
    with Sshd(tmp_path / "sshd") as sshd:
        yield sshd


async def test_an_early_login_is_the_tunnels(sshd: Sshd, server: ServerProcess) -> None:
    log_in_early(sshd.route)
    tunnel = await open_tunnel(sshd.route, server.port)
    await ask(tunnel)
    assert sshd.logins == 1
    await tunnel.close()


async def test_an_early_login_that_was_lost_is_made_again(
    sshd: Sshd, server: ServerProcess
) -> None:
    log_in_early(sshd.route)
    await until(lambda: sshd.logins == 1)
    sshd.kill_sessions()
    tunnel = await open_tunnel(sshd.route, server.port)
    await ask(tunnel)
    assert sshd.logins == 2
    await tunnel.close()


@pytest.mark.parametrize("done", [False, True])
async def test_an_early_login_that_nobody_took_ends(sshd: Sshd, done: bool) -> None:
    log_in_early(sshd.route)
    await until(lambda: bool(sshd.logins if done else sshd.sessions))
    await forget_login(sshd.route)
    await until(lambda: not sshd.sessions)


async def test_a_long_name_of_the_folder_for_temporary_files(
    sshd: Sshd, server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of a socket has a limit: 108 characters on Linux, 104 on macOS."""
    (folder := tmp_path / ("long" * 25)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    tunnel = await open_tunnel(sshd.route, server.port)
    await ask(tunnel)
    await tunnel.close()


def change(sshd: Sshd, old: str, new: str) -> None:
    """Another line in the ssh configuration."""
    text = sshd.config.read_text()
    assert old in text
    sshd.config.write_text(text.replace(old, new))


def forget_the_host_key(sshd: Sshd) -> None:
    sshd.known_hosts.write_text("")


def check_no_host_key(sshd: Sshd) -> None:
    change(sshd, f"UserKnownHostsFile {sshd.known_hosts}", "UserKnownHostsFile none")
    change(sshd, "StrictHostKeyChecking yes", "StrictHostKeyChecking no")


def know_another_host_key(sshd: Sshd) -> None:
    make_key(sshd.folder / "other_key")
    kind, key, _ = (sshd.folder / "other_key.pub").read_text().split()
    sshd.known_hosts.write_text(f"[{sshd.address}]:{sshd.port} {kind} {key}\n")


def be_another_user(sshd: Sshd) -> None:
    change(sshd, "  User ", "  User not-")


def have_another_key(sshd: Sshd) -> None:
    make_key(sshd.folder / "other_key")
    change(sshd, "client_key", "other_key")


def have_no_such_host(sshd: Sshd) -> None:
    change(sshd, f"HostName {sshd.address}", "HostName gpu-box.invalid")


def have_a_broken_configuration(sshd: Sshd) -> None:
    change(sshd, f"Port {sshd.port}", "Port nonsense")


def have_no_configuration(sshd: Sshd) -> None:
    sshd.config.unlink()


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (forget_the_host_key, ProviderError, "host key of gpu-box is not known.*by hand"),
        (check_no_host_key, ProviderError, "host key of gpu-box is not known"),
        (know_another_host_key, ProviderError, "another host key than the one in .*known_hosts"),
        (be_another_user, ProviderError, "does not let this user in.*ssh -F .* gpu-box"),
        (have_another_key, ProviderError, "does not let this user in.*ssh-add"),
        (have_no_such_host, ServerUnavailableError, "address of gpu-box can't be found"),
        (Sshd.stop, ServerUnavailableError, "gpu-box refuses ssh connections"),
        (have_no_configuration, ConfigError, "ssh_config: No such file or directory"),
        (have_a_broken_configuration, ConfigError, "ssh_config line 3: Bad"),
    ],
)
async def test_what_is_wrong_is_said(
    sshd: Sshd, spoil: Callable[[Sshd], None], error: type[Exception], message: str
) -> None:
    spoil(sshd)
    with pytest.raises(error, match=message):
        await open_tunnel(sshd.route, 1)


async def test_forwarding_that_is_not_allowed_is_said(tmp_path: Path) -> None:
    with Sshd(tmp_path / "sshd", "AllowTcpForwarding no") as sshd:
        tunnel = await open_tunnel(sshd.route, 1)
        with pytest.raises(ProviderError, match="AllowTcpForwarding"):
            await ask(tunnel)
        await tunnel.close()


async def test_a_key_with_a_passphrase_comes_from_the_agent(
    sshd: Sshd, server: ServerProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    key = str(sshd.folder / "client_key")
    address = str(tmp_path / "agent")
    agent = await asyncio.create_subprocess_exec(
        "ssh-agent", "-D", "-a", address, stdout=asyncio.subprocess.DEVNULL
    )
    try:
        await until(Path(address).exists)
        monkeypatch.setenv("SSH_AUTH_SOCK", address)
        run("ssh-add", "-q", key)
        run("ssh-keygen", "-q", "-p", "-N", "secret", "-f", key)
        tunnel = await open_tunnel(sshd.route, server.port)
        await ask(tunnel)
        await tunnel.close()
        run("ssh-add", "-q", "-D")
        with pytest.raises(ProviderError, match="passphrase has to be in the agent: ssh-add"):
            await open_tunnel(sshd.route, server.port)
    finally:
        agent.terminate()
        await agent.wait()


async def test_over_another_machine(sshd: Sshd, server: ServerProcess) -> None:
    lines = sshd.config.read_text().replace("Host gpu-box", "Host inner\n  ProxyJump gpu-box")
    sshd.config.write_text(sshd.config.read_text() + lines)
    tunnel = await open_tunnel(SSHRoute(host="inner", config=str(sshd.config)), server.port)
    await ask(tunnel)
    assert sshd.kill_sessions() >= 2
    await ask(tunnel)
    await tunnel.close()


async def test_keys_of_hosts_may_come_from_a_command(sshd: Sshd, server: ServerProcess) -> None:
    change(
        sshd,
        f"UserKnownHostsFile {sshd.known_hosts}",
        f"UserKnownHostsFile none\n  KnownHostsCommand /bin/cat {sshd.known_hosts}",
    )
    tunnel = await open_tunnel(sshd.route, server.port)
    await ask(tunnel)
    sshd.kill_sessions()
    await until(lambda: tunnel.reconnects == 1)
    await ask(tunnel)
    await tunnel.close()
    assert [p for p in psutil.Process().children(recursive=True) if p.name() == "ssh"] == []


async def test_without_ssh(sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="no ssh here"):
        await open_tunnel(sshd.route, 1)


LOGS_IN = """
import asyncio, sys
from art_cloud.links.endpoint import SSHRoute
from art_cloud.links.logins import log_in

async def main():
    login = await log_in(SSHRoute(host=sys.argv[1], config=sys.argv[2]))
    print("in", flush=True)
    await login.lost()

asyncio.run(main())
"""


async def test_no_login_outlives_a_client_that_is_killed(sshd: Sshd) -> None:
    with tempfile.TemporaryDirectory(prefix="killed-") as folder:
        await check_that_none_does(sshd, Path(folder))


async def check_that_none_does(sshd: Sshd, folder: Path) -> None:
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", LOGS_IN, sshd.host, str(sshd.config)),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(folder)},
    )
    assert client.stdout is not None
    assert await client.stdout.readline() == b"in\n"
    family = psutil.Process(client.pid).children(recursive=True)
    assert {"ssh"} <= {process.name() for process in family}
    client.kill()
    await client.wait()
    await until(lambda: not any(process.is_running() for process in family))
    await until(lambda: not list(folder.glob("art-ssh-*")))
    await until(lambda: not sshd.sessions)
