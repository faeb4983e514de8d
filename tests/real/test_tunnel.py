"""A real server behind a real sshd whose sessions are killed, which is stopped, or cut off."""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import openai
import psutil
import pytest

import art_cloud as art
from art_cloud import tunnel as tunnels
from art_cloud.attached import AttachedBackend
from art_cloud.errors import ConfigError, ProviderError, ServerUnavailableError
from art_cloud.http import ServerClient
from art_cloud.providers import Endpoint, SSHRoute
from art_cloud.ssh_links import forget_login, log_in_early
from art_cloud.tunnel import Tunnel, open_tunnel

from ..server_process import TOKEN, ServerProcess
from ..sshd import NamespaceSshd, Sshd, make_key, needs_namespaces, needs_sshd, run
from ..synthetic import as_groups, batch

pytestmark = needs_sshd

MESSAGES: Any = [{"role": "user", "content": "Your move?"}]


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Sshd]:
    with Sshd(tmp_path / "sshd") as sshd:
        yield sshd


def route_to(sshd: Sshd) -> SSHRoute:
    return SSHRoute(host=sshd.host, config=str(sshd.config))


def attached(sshd: Sshd, server: ServerProcess) -> AttachedBackend:
    return AttachedBackend(Endpoint(url=server.url, ssh=route_to(sshd)), TOKEN)


@pytest.fixture
async def backend(sshd: Sshd, server: ServerProcess) -> AsyncIterator[art.Backend]:
    async with attached(sshd, server) as backend:
        yield backend


@pytest.fixture
async def tunnel(sshd: Sshd, server: ServerProcess) -> AsyncIterator[Tunnel]:
    tunnel = await open_tunnel(route_to(sshd), server.port)
    yield tunnel
    await tunnel.close()


async def ask(tunnel: Tunnel) -> None:
    """One call, which is not repeated."""
    client = ServerClient(tunnel.url, TOKEN, patience=0)
    try:
        assert b'"version"' in await client.call("GET", "server")
    finally:
        await client.close()


def tunnel_of(backend: art.Backend) -> Tunnel:
    assert backend.tunnel is not None
    return backend.tunnel


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def complete(model: art.TrainableModel, tokens: int = 4) -> int:
    answer = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(),
        messages=MESSAGES,
        max_completion_tokens=tokens,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage is not None
    return answer.usage.completion_tokens


async def stream(model: art.TrainableModel, tokens: int) -> AsyncIterator[str]:
    chunks = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(),
        messages=MESSAGES,
        max_completion_tokens=tokens,
        extra_body={"ignore_eos": True},
        stream=True,
    )
    async for chunk in chunks:
        yield str(chunk.choices[0].finish_reason if chunk.choices else None)


async def test_training_goes_on_while_sessions_are_killed(
    backend: art.Backend, model: art.TrainableModel, sshd: Sshd
) -> None:
    groups = as_groups(batch(model.full_name, seed=1, groups=8, length=64))
    call = asyncio.create_task(backend.train(model, groups))
    while not call.done():
        await until(lambda: tunnel_of(backend).state == "connected")
        sshd.kill_sessions()
        await asyncio.wait([call], timeout=0.1)
    assert (await call).step == 1
    assert await model.get_step() == 1
    assert tunnel_of(backend).reconnects > 0
    assert "reconnects" in repr(backend)


async def test_a_stream_that_is_cut_says_so_and_the_next_one_works(
    backend: art.Backend, model: art.TrainableModel, sshd: Sshd
) -> None:
    chunks = stream(model, 400)
    await anext(chunks)
    sshd.kill_sessions()
    with pytest.raises(openai.APIConnectionError, match="not the whole of it: repeat the request"):
        async for _ in chunks:
            pass
    assert await complete(model) == 4


async def test_64_streams_at_once(backend: art.Backend, model: art.TrainableModel) -> None:
    async def last(chunks: AsyncIterator[str]) -> str:
        return [reason async for reason in chunks if reason != "None"][-1]

    ends = await asyncio.gather(*(last(stream(model, 8)) for _ in range(64)))
    assert ends == ["length"] * 64
    assert tunnel_of(backend).reconnects == 0


async def write_for_ever(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(bytes(2**20))
        await writer.drain()


async def test_a_client_that_is_gone_when_its_answer_ends_cuts_no_other(sshd: Sshd) -> None:
    arrived: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
    server = await asyncio.start_server(lambda *ends: arrived.put_nowait(ends), "127.0.0.1", 0)
    tunnel = await open_tunnel(route_to(sshd), server.sockets[0].getsockname()[1])

    async def connect() -> tuple[asyncio.StreamWriter, Any, asyncio.StreamWriter]:
        _, client = await asyncio.open_connection("127.0.0.1", tunnel.port)
        return client, *await arrived.get()

    gone, _, answer = await connect()
    other, question, _ = await connect()
    with pytest.raises(TimeoutError):  # the tunnel reads no more of it, and can't see it go
        await asyncio.wait_for(write_for_ever(gone), timeout=1)
    linger = struct.pack("ii", 1, 0)  # a reset, not an end
    gone.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    gone.transport.abort()
    answer.write_eof()
    await asyncio.sleep(0.2)
    other.write(b"?")
    assert await question.read(1) == b"?"
    assert tunnel.reconnects == 0
    await tunnel.close()
    server.close()


async def test_calls_wait_while_sshd_is_away(
    backend: art.Backend, model: art.TrainableModel, sshd: Sshd
) -> None:
    await complete(model)
    sshd.stop()
    await until(lambda: tunnel_of(backend).state == "reconnecting")
    calls = [asyncio.create_task(complete(model)) for _ in range(16)]
    info = asyncio.create_task(backend.info())
    done, _ = await asyncio.wait([*calls, info], timeout=1)
    assert not done
    assert isinstance(tunnel_of(backend).last_error, ServerUnavailableError)
    sshd.start()
    assert await asyncio.gather(*calls) == [4] * 16
    await info
    assert tunnel_of(backend).state == "connected"


async def test_a_call_that_waited_in_vain_says_why(sshd: Sshd, server: ServerProcess) -> None:
    tunnel = await open_tunnel(route_to(sshd), server.port, wait=0.5)
    sshd.stop()
    await until(lambda: "refuses" in str(tunnel.last_error))
    with pytest.raises(ServerUnavailableError, match="gpu-box refuses ssh connections"):
        await ask(tunnel)
    await tunnel.close()


async def test_another_host_key_ends_the_tunnel(
    backend: art.Backend, model: art.TrainableModel, sshd: Sshd
) -> None:
    sshd.stop()
    for file in ("host_key", "host_key.pub"):
        (sshd.folder / file).unlink()
    make_key(sshd.folder / "host_key")
    sshd.start()
    with pytest.raises(ProviderError, match=r"another host key than the one in .*known_hosts"):
        await backend.info()
    with pytest.raises(ProviderError, match="another host key"):
        await complete(model)
    assert tunnel_of(backend).state == "failed"


async def test_a_tunnel_that_leads_elsewhere_keeps_its_port(
    sshd: Sshd, server: ServerProcess, tunnel: Tunnel
) -> None:
    url = tunnel.url
    await ask(tunnel)
    tunnel.retarget(route_to(sshd), 1)
    with pytest.raises(ServerUnavailableError, match="Nothing listens at port 1 of gpu-box"):
        await ask(tunnel)
    tunnel.retarget(route_to(sshd), server.port)
    await ask(tunnel)
    assert tunnel.url == url


@pytest.fixture
def watched_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnels, "WATCH_SECONDS", 0.01)


@pytest.mark.usefixtures("watched_closely")  # before the tunnel is there
async def test_a_laptop_that_slept_does_not_wait_for_keep_alives(
    tunnel: Tunnel, monkeypatch: pytest.MonkeyPatch
) -> None:
    await until(lambda: tunnel.state == "connected")
    slept = SimpleNamespace(time=lambda: time.time() + 3600, monotonic=time.monotonic)
    monkeypatch.setattr(tunnels, "time", slept)
    await until(lambda: tunnel.reconnects == 1)
    await ask(tunnel)


def has_clients(server: ServerProcess) -> bool:
    connections = psutil.Process(server.pid).net_connections("tcp")
    return any(one.status == psutil.CONN_ESTABLISHED for one in connections)


async def test_open_connections_end_with_the_tunnel(sshd: Sshd, server: ServerProcess) -> None:
    tunnel = await open_tunnel(route_to(sshd), server.port)
    reader, writer = await asyncio.open_connection("127.0.0.1", tunnel.port)
    await until(lambda: has_clients(server))
    await tunnel.close()
    with pytest.raises(ConnectionResetError):
        await reader.read()
    writer.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", tunnel.port)


async def test_an_early_login_is_the_tunnels(sshd: Sshd, server: ServerProcess) -> None:
    log_in_early(route_to(sshd))
    tunnel = await open_tunnel(route_to(sshd), server.port)
    await ask(tunnel)
    assert sshd.logins == 1
    await tunnel.close()


async def test_an_early_login_that_was_lost_is_made_again(
    sshd: Sshd, server: ServerProcess
) -> None:
    log_in_early(route_to(sshd))
    await until(lambda: sshd.logins == 1)
    sshd.kill_sessions()
    tunnel = await open_tunnel(route_to(sshd), server.port)
    await ask(tunnel)
    assert sshd.logins == 2
    await tunnel.close()


@pytest.mark.parametrize("done", [False, True])
async def test_an_early_login_that_nobody_took_ends(sshd: Sshd, done: bool) -> None:
    log_in_early(route_to(sshd))
    await until(lambda: bool(sshd.logins if done else sshd.sessions))
    forget_login(route_to(sshd))
    await until(lambda: not sshd.sessions)


async def test_a_taken_port_is_named(sshd: Sshd) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"Port {port} of this machine can't be used"):
            await open_tunnel(route_to(sshd), 1, local_port=port)


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
    change(sshd, f"Port {sshd.port}", "Port ssh")


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
        (have_no_configuration, ConfigError, "No such file or directory: .*ssh_config"),
        (have_a_broken_configuration, ConfigError, "ssh_config line 3: Invalid Port"),
    ],
)
async def test_what_is_wrong_is_said(
    sshd: Sshd, spoil: Callable[[Sshd], None], error: type[Exception], message: str
) -> None:
    spoil(sshd)
    with pytest.raises(error, match=message):
        await open_tunnel(route_to(sshd), 1)


async def test_forwarding_that_is_not_allowed_is_said(tmp_path: Path) -> None:
    with Sshd(tmp_path / "sshd", "AllowTcpForwarding no") as sshd:
        tunnel = await open_tunnel(route_to(sshd), 1)
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
        tunnel = await open_tunnel(route_to(sshd), server.port)
        await ask(tunnel)
        await tunnel.close()
        run("ssh-add", "-q", "-D")
        with pytest.raises(ProviderError, match="passphrase has to be in the agent: ssh-add"):
            await open_tunnel(route_to(sshd), server.port)
    finally:
        agent.terminate()
        await agent.wait()


async def test_over_another_machine(sshd: Sshd, server: ServerProcess) -> None:
    lines = sshd.config.read_text().replace("Host gpu-box", "Host *\n  ProxyJump gpu-box")
    sshd.config.write_text(sshd.config.read_text() + lines)
    tunnel = await open_tunnel(SSHRoute(host="inner", config=str(sshd.config)), server.port)
    assert "by asyncssh" in repr(tunnel)
    await ask(tunnel)
    assert sshd.kill_sessions() >= 2
    await ask(tunnel)
    await tunnel.close()


async def test_what_asyncssh_cannot_do_ssh_does(sshd: Sshd, server: ServerProcess) -> None:
    change(
        sshd,
        f"UserKnownHostsFile {sshd.known_hosts}",
        f"UserKnownHostsFile none\n  KnownHostsCommand /bin/cat {sshd.known_hosts}",
    )
    tunnel = await open_tunnel(route_to(sshd), server.port)
    assert "by ssh" in repr(tunnel)
    await ask(tunnel)
    sshd.kill_sessions()
    await until(lambda: tunnel.reconnects == 1)
    await ask(tunnel)
    await tunnel.close()
    assert [p for p in psutil.Process().children() if p.name() == "ssh"] == []


async def test_without_asyncssh(
    sshd: Sshd, server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "asyncssh", None)
    tunnel = await open_tunnel(route_to(sshd), server.port)
    assert "by ssh" in repr(tunnel)
    await ask(tunnel)
    await tunnel.close()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"pip install 'art-cloud\[ssh\]'"):
        await open_tunnel(route_to(sshd), server.port)


@pytest.fixture
def far(tmp_path: Path, tiny_model: Path) -> Iterator[tuple[NamespaceSshd, ServerProcess]]:
    """A server and its sshd at the other end of a cable."""
    with NamespaceSshd(tmp_path / "sshd") as sshd:
        sshd.config.write_text(
            f"{sshd.config.read_text()}  ServerAliveInterval 1\n  ServerAliveCountMax 1\n"
        )
        server = ServerProcess(tmp_path / "server", "--model", tiny_model)
        server.namespace = sshd.namespace
        with server:
            yield sshd, server


@needs_namespaces
async def test_a_network_that_goes_away_and_comes_back(
    far: tuple[NamespaceSshd, ServerProcess], tiny_model: Path
) -> None:
    sshd, server = far
    model = art.TrainableModel(name=uuid4().hex, project="tests", base_model=str(tiny_model))
    async with attached(sshd, server) as backend:
        await model.register(backend)
        tunnel = tunnel_of(backend)

        chunks = stream(model, 2000)
        await anext(chunks)
        sshd.cut()
        with pytest.raises(openai.APIConnectionError):
            async for _ in chunks:
                pass
        assert tunnel.state == "reconnecting"
        calls = [asyncio.create_task(complete(model)) for _ in range(4)]
        groups = as_groups(batch(model.full_name, seed=1))
        step = asyncio.create_task(backend.train(model, groups))
        done, _ = await asyncio.wait([*calls, step], timeout=0.5)
        assert not done
        sshd.restore()
        assert await asyncio.gather(*calls) == [4] * 4
        assert (await step).step == 1

        reconnects = tunnel.reconnects
        sshd.move()
        await until(lambda: tunnel.reconnects > reconnects)
        assert await complete(model) == 4
