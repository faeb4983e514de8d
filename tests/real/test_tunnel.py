"""A real server behind a real sshd whose sessions are killed, which is stopped, or cut off."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import openai
import psutil
import pytest

import art_cloud as art
from art_cloud.clusters.attached import AttachedBackend
from art_cloud.links import tunnel as tunnels
from art_cloud.links.endpoint import Endpoint
from art_cloud.links.tunnel import Tunnel, open_tunnel
from art_cloud.shared.errors import ConfigError, ProviderError, ServerUnavailableError

from ..rigs.calls import ask
from ..rigs.server_process import TOKEN, ServerProcess
from ..rigs.sshd import NamespaceSshd, Sshd, make_key, needs_namespaces, needs_sshd
from ..rigs.synthetic import as_groups, batch
from ..rigs.waiting import until

pytestmark = needs_sshd

MESSAGES: Any = [{"role": "user", "content": "Your move?"}]


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Sshd]:
    with Sshd(tmp_path / "sshd") as sshd:
        yield sshd


def attached(sshd: Sshd, server: ServerProcess) -> AttachedBackend:
    return AttachedBackend(Endpoint(url=server.url, ssh=sshd.route), TOKEN)


@pytest.fixture
async def backend(sshd: Sshd, server: ServerProcess) -> AsyncIterator[art.Backend]:
    async with attached(sshd, server) as backend:
        yield backend


@pytest.fixture
async def tunnel(sshd: Sshd, server: ServerProcess) -> AsyncIterator[Tunnel]:
    tunnel = await open_tunnel(sshd.route, server.port)
    yield tunnel
    await tunnel.close()


def tunnel_of(backend: art.Backend) -> Tunnel:
    assert backend.tunnel is not None
    return backend.tunnel


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
    pause = 0.1
    while not call.done():  # ever less often: on a busy machine a call takes longer than a pause
        await until(lambda: tunnel_of(backend).state == "connected")
        sshd.kill_sessions()
        await asyncio.wait([call], timeout=pause)
        pause *= 1.2
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
    tunnel = await open_tunnel(sshd.route, server.sockets[0].getsockname()[1])

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


async def test_only_a_whole_answer_ends_with_its_end(sshd: Sshd) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(5) == b"whole":
            writer.write(b"all")
            writer.write_eof()
            await reader.read()
        else:
            writer.write(b"a part")
            await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    tunnel = await open_tunnel(sshd.route, server.sockets[0].getsockname()[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", tunnel.port)
    writer.write(b"whole")
    assert await reader.read() == b"all"  # though the client has not ended its side
    writer.close()

    reader, writer = await asyncio.open_connection("127.0.0.1", tunnel.port)
    writer.write(b"other")
    assert await reader.read(6) == b"a part"
    sshd.kill_sessions()
    with pytest.raises(ConnectionResetError):
        await reader.read()
    writer.close()
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
    tunnel = await open_tunnel(sshd.route, server.port, wait=0.5)
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
    tunnel.retarget(sshd.route, 1)
    with pytest.raises(ServerUnavailableError, match="Nothing listens at port 1 of gpu-box"):
        await ask(tunnel)
    tunnel.retarget(sshd.route, server.port)
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
    tunnel = await open_tunnel(sshd.route, server.port)
    reader, writer = await asyncio.open_connection("127.0.0.1", tunnel.port)
    await until(lambda: has_clients(server))
    await tunnel.close()
    with pytest.raises(ConnectionResetError):
        await reader.read()
    writer.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", tunnel.port)


async def test_a_taken_port_is_named(sshd: Sshd) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"Port {port} of this machine can't be used"):
            await open_tunnel(sshd.route, 1, local_port=port)


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
