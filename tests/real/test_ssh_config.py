"""The table of docs/tunnel.md: what an ssh configuration can say, for both who log in by it."""

from __future__ import annotations

import asyncio
import getpass
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from art_cloud.clusters.providers.skypilot import provider as skypilot
from art_cloud.clusters.providers.ssh.login import login
from art_cloud.links.endpoint import SSHRoute
from art_cloud.links.logins import check_login
from art_cloud.shared.errors import ProviderError

from ..rigs.sshd import Sshd, make_key, needs_sshd, run
from ..rigs.waiting import until

pytestmark = needs_sshd


@pytest.fixture(autouse=True)
def no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)


@asynccontextmanager
async def agent(address: Path) -> AsyncIterator[None]:
    process = await asyncio.create_subprocess_exec(
        "ssh-agent", "-D", "-a", str(address), stdout=asyncio.subprocess.DEVNULL
    )
    try:
        await until(address.exists)
        yield
    finally:
        process.terminate()
        await process.wait()


async def set_up(route: SSHRoute) -> None:
    async with login(route):
        pass


async def both_get_in(route: SSHRoute) -> None:
    await check_login(route)
    await set_up(route)


async def both_say(route: SSHRoute, message: str) -> None:
    for enter in (check_login, set_up):
        with pytest.raises(ProviderError, match=message):
            await enter(route)


def say_more(sshd: Sshd, *lines: str) -> None:
    with sshd.config.open("a") as config:
        config.writelines(f"  {line}\n" for line in lines)


def certify(sshd: Sshd, key: Path, *options: str) -> None:
    """Have the authority that sshd trusts sign a key."""
    run("ssh-keygen", "-q", "-s", str(sshd.folder / "authority"), "-I", "us", *options, str(key))


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    """An sshd's folder with the key of an authority."""
    folder = tmp_path / "sshd"
    folder.mkdir()
    make_key(folder / "authority")
    return folder


@pytest.fixture
def certificates(authority: Path) -> Iterator[Sshd]:
    """An sshd that takes certificates only."""
    with Sshd(authority, f"TrustedUserCAKeys {authority / 'authority.pub'}") as sshd:
        (authority / "client_key.pub").rename(authority / "public")
        certify(sshd, authority / "public", "-n", getpass.getuser())
        (authority / "client_key.pub").touch()
        (authority / "public-cert.pub").rename(authority / "elsewhere")
        yield sshd


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Sshd]:
    with Sshd(tmp_path / "sshd") as sshd:
        yield sshd


def another_name(sshd: Sshd, *lines: str) -> SSHRoute:
    """A machine of other settings; `gpu-box` stays."""
    sshd.config.write_text(
        sshd.config.read_text() + sshd.config.read_text().replace("Host gpu-box", "Host inner")
    )
    say_more(sshd, *lines)
    return SSHRoute(host="inner", config=str(sshd.config))


def include(sshd: Sshd) -> SSHRoute:
    config = sshd.folder / "including"
    config.write_text(f"Include {sshd.config}\n")
    return SSHRoute(host=sshd.host, config=str(config))


def match(sshd: Sshd) -> SSHRoute:
    text = sshd.config.read_text().replace("Host gpu-box", 'Match originalhost lab exec "true"')
    sshd.config.write_text(text)
    return SSHRoute(host="lab", config=str(sshd.config))


def one_jump(sshd: Sshd) -> SSHRoute:
    return another_name(sshd, "ProxyJump gpu-box")


def two_jumps(sshd: Sshd) -> SSHRoute:
    return another_name(sshd, f"ProxyJump gpu-box,{getpass.getuser()}@gpu-box:{sshd.port}")


def a_proxy(sshd: Sshd) -> SSHRoute:
    command = f"ssh -F {sshd.config} -W %h:%p gpu-box 2>/dev/null"  # takes a shell
    return another_name(sshd, f"ProxyCommand {command}")


def an_alias(sshd: Sshd) -> SSHRoute:
    """The name under which gcloud, for one, keeps keys."""
    known = sshd.known_hosts.read_text()
    sshd.known_hosts.write_text(known.replace(f"[127.0.0.1]:{sshd.port}", "compute.17"))
    say_more(sshd, "HostKeyAlias compute.17")
    return sshd.route


def hashed_names(sshd: Sshd) -> SSHRoute:
    run("ssh-keygen", "-H", "-f", str(sshd.known_hosts))
    return sshd.route


def patterns(sshd: Sshd) -> SSHRoute:
    """In known_hosts, beside a line about other machines."""
    _, key = sshd.known_hosts.read_text().split(" ", 1)
    sshd.known_hosts.write_text(f"@cert-authority *.elsewhere {key}[127.0.*]:* {key}")
    return sshd.route


def several_keys(sshd: Sshd) -> SSHRoute:
    make_key(sshd.folder / "other")
    text = sshd.config.read_text()
    other = f"IdentityFile {sshd.folder / 'other'}\n  IdentityFile {sshd.folder / 'none'}\n"
    sshd.config.write_text(text.replace("IdentityFile", f"{other}  IdentityFile", 1))
    return sshd.route


def what_is_for_terminals(sshd: Sshd) -> SSHRoute:
    """What would forward other ports, fork, share or run another command."""
    say_more(
        sshd,
        f"LocalForward {sshd.port} localhost:1",
        f"ControlPath {sshd.folder}/%C",
        "ControlMaster auto",
        "ControlPersist yes",
        "ForkAfterAuthentication yes",
        "ExitOnForwardFailure yes",
        "PermitLocalCommand yes",
        f"LocalCommand touch {sshd.folder}/local",
        "RequestTTY force",
        "RemoteCommand exit 1",
        "LogLevel QUIET",
    )
    return sshd.route


@pytest.mark.parametrize(
    "row",
    [
        include,
        match,
        one_jump,
        two_jumps,
        a_proxy,
        an_alias,
        hashed_names,
        patterns,
        several_keys,
        what_is_for_terminals,
    ],
)
async def test_both_get_in(sshd: Sshd, row: Callable[[Sshd], SSHRoute]) -> None:
    await both_get_in(row(sshd))
    assert not (sshd.folder / "local").exists()


async def test_both_take_a_certificate(
    certificates: Sshd, authority: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await both_say(certificates.route, "does not let this user in")
    certificate = authority / "client_key-cert.pub"
    shutil.copy(authority / "elsewhere", certificate)
    await both_get_in(certificates.route)

    key = authority / "client_key"
    async with agent(tmp_path / "agent"):
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
        run("ssh-add", "-q", str(key))
        certificate.unlink()
        run("ssh-keygen", "-q", "-p", "-N", "secret", "-f", str(key))
        text = certificates.config.read_text()
        certificates.config.write_text(text.replace("  IdentitiesOnly yes\n", ""))
        await both_get_in(certificates.route)


async def test_both_take_a_certificate_from_elsewhere(certificates: Sshd, authority: Path) -> None:
    say_more(certificates, f"CertificateFile {authority / 'elsewhere'}")
    await both_get_in(certificates.route)


async def test_both_take_a_key_with_a_passphrase_from_the_agent(
    sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = str(sshd.folder / "client_key")
    async with agent(tmp_path / "agent"):
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
        run("ssh-add", "-q", key)
        run("ssh-keygen", "-q", "-p", "-N", "secret", "-f", key)
        await both_get_in(sshd.route)
        run("ssh-add", "-q", "-D")
        await both_say(sshd.route, "passphrase has to be in the agent: ssh-add")


async def test_both_want_to_know_the_host_s_own_key(sshd: Sshd) -> None:
    known = sshd.known_hosts.read_text()
    sshd.known_hosts.write_text("")
    say_more(sshd, "StrictHostKeyChecking no", "UpdateHostKeys yes")
    await both_say(sshd.route, "The host key of gpu-box is not known.*by hand")
    assert sshd.known_hosts.read_text() == ""

    make_key(sshd.folder / "other")
    kind, key, _ = (sshd.folder / "other.pub").read_text().split()
    sshd.known_hosts.write_text(f"[127.0.0.1]:{sshd.port} {kind} {key}\n")
    await both_say(sshd.route, "shows another host key than the one in .*known_hosts")

    sshd.known_hosts.write_text(known + "@revoked * " + known.partition(" ")[2])
    await both_say(sshd.route, "shows another host key")


async def test_neither_asks_for_a_password(tmp_path: Path) -> None:
    with Sshd(tmp_path / "sshd", "PubkeyAuthentication no") as sshd:
        await both_say(sshd.route, "does not let this user in.*without a question")


ONLY_SSH = r"gets in, and fabric, which sets the machine up, does not.*See the table"


def keys_from_a_command(sshd: Sshd) -> None:
    say_more(sshd, f"KnownHostsCommand /bin/cat {sshd.folder / 'known'}")
    sshd.known_hosts.rename(sshd.folder / "known")


def a_certificate_of_the_host(sshd: Sshd) -> None:
    authority = (sshd.folder / "authority.pub").read_text()
    sshd.known_hosts.write_text(f"@cert-authority * {authority}")


@pytest.mark.parametrize("row", [keys_from_a_command, a_certificate_of_the_host])
async def test_the_set_up_says_what_it_lacks(authority: Path, row: Callable[[Sshd], None]) -> None:
    make_key(authority / "host_key")
    sign = ("-s", str(authority / "authority"), "-I", "it", "-h", "-n", "127.0.0.1")
    run("ssh-keygen", "-q", *sign, str(authority / "host_key.pub"))
    with Sshd(authority, f"HostCertificate {authority / 'host_key-cert.pub'}") as sshd:
        row(sshd)
        await check_login(sshd.route)
        with pytest.raises(ProviderError, match=ONLY_SSH):
            await set_up(sshd.route)


async def test_both_take_the_agent_of_another_address(sshd: Sshd, tmp_path: Path) -> None:
    key = sshd.folder / "client_key"
    address = tmp_path / "agent"
    async with agent(address):
        run("env", f"SSH_AUTH_SOCK={address}", "ssh-add", "-q", str(key))
        run("ssh-keygen", "-q", "-p", "-N", "secret", "-f", str(key))
        await both_say(sshd.route, "does not let this user in")
        say_more(sshd, f"IdentityAgent {address}")
        await both_get_in(sshd.route)


async def test_what_only_a_tunnel_needs_is_looked_at(tmp_path: Path) -> None:
    with Sshd(tmp_path / "sshd", "AllowTcpForwarding no") as sshd:
        await set_up(sshd.route)
        with pytest.raises(ProviderError, match="AllowTcpForwarding"):
            await check_login(sshd.route)


async def test_the_hand_over_to_skypilot_s_machine_says_the_same(
    sshd: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def follow(what: str, *, name: str) -> None:
        await asyncio.Event().wait()  # the job runs

    monkeypatch.setattr(skypilot, "call", follow)
    monkeypatch.setattr(skypilot, "LOGIN_SECONDS", 0)
    sshd.known_hosts.write_text("")
    with pytest.raises(ProviderError, match="The host key of gpu-box is not known"):
        await anext(skypilot._reach("one", sshd.route, "ART_CLOUD_NAME=one"))
