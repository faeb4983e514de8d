"""Clients that ask and never read the answer, over sockets that take little."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from art_cloud.shared.names import ModelName

from ..contract.engines import vllm_python
from ..rigs.server_process import TOKEN, ServerProcess
from ..rigs.waiting import wait_until
from .test_limits import client_of, ended, register, train

MODEL = ModelName("limits", "agent")
SMALL = 4096
"""Bytes of a socket's buffer."""


def _impatient() -> None:
    """In the server: it waits for 3 s, serves one policy at once, and its system takes little."""
    from art_server import __main__
    from art_server.api import doors
    from art_server.inference import TransformersEngine

    real = __main__.listen

    def listen(host: str, port: int) -> socket.socket:
        listener = real(host, port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)
        return listener

    __main__.listen = listen
    doors.UNREAD_SECONDS = 3
    TransformersEngine.slots = 1


@contextmanager
def unread(
    server: ServerProcess, method: str, path: str, body: object = None
) -> Iterator[socket.socket]:
    """A request whose answer nobody reads, unless it is read from what this gives."""
    content = b"" if body is None else json.dumps(body).encode()
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
        client.connect(("127.0.0.1", server.port))
        client.sendall(head.encode() + content)
        yield client


async def seen(client: socket.socket) -> None:
    """Wait for the first byte, and leave it there."""
    await asyncio.to_thread(client.recv, 1, socket.MSG_PEEK)


@pytest.mark.slow
async def test_a_stream_that_nobody_reads_holds_neither_the_trainer_nor_the_lease(
    tmp_path: Path, tiny_model: Path
) -> None:
    server = ServerProcess(tmp_path, "--lease", "10")
    server.prepare = _impatient
    server.start()
    body = {"model": str(MODEL), "prompt": "x", "max_tokens": 400, "logprobs": 5}
    request = body | {"stream": True, "ignore_eos": True}
    async with client_of(server) as client:
        await register(client, tiny_model)
        with unread(server, "POST", "/v1/completions", request) as reader:
            await seen(reader)
            job = await train(client)
            async with asyncio.timeout(120):  # the only place of the engine is taken until then
                assert [event.type async for event in client.events(job)][-1] == "done"
            assert "a client has read nothing of what it was sent" in server.output
            assert "all 1 slots of the engine are in use: waiting" in server.output
            async with server.http() as http:
                answer = await http.post("/v1/completions", json=body)
            assert answer.json()["model"] == f"{MODEL}@1"
    assert await ended(server) == 0
    assert "server ends (--lease)" in server.output


@pytest.mark.slow
@pytest.mark.xdist_group("vllm")
async def test_a_stream_of_vllm_that_nobody_reads_lets_go_of_the_trainer_and_the_lease(
    tmp_path: Path, tiny_model: Path
) -> None:
    """vLLM has to be at rest before it can sleep, and the trainer waits for that."""
    server = ServerProcess(
        *(tmp_path, "--engine", "vllm", "--vllm-python", vllm_python(), "--model", tiny_model),
        *("--placement", "sleep", "--lease", "20"),
    )
    server.prepare = _impatient
    server.start()
    body = {"model": str(MODEL), "prompt": "x", "max_tokens": 400, "logprobs": 5, "n": 8}
    request = body | {"stream": True, "ignore_eos": True}
    async with client_of(server) as client:
        await register(client, tiny_model)
        with unread(server, "POST", "/v1/completions", request) as reader:
            await seen(reader)
            async with server.http() as http:
                asked = await http.get("/art/v1/server")
            assert asked.json()["requests_running"] == 8
            job = await train(client)
            async with asyncio.timeout(300):
                assert [event.type async for event in client.events(job)][-1] == "done"
            assert "a client has read nothing of what it was sent" in server.output
            async with server.http() as http:
                answer = await http.post("/v1/completions", json=body | {"max_tokens": 1, "n": 1})
            assert answer.json()["model"] == f"{MODEL}@1"
    assert await ended(server) == 0
    assert "server ends (--lease)" in server.output


async def test_a_client_that_reads_slowly_gets_the_whole_answer(
    tmp_path: Path, tiny_model: Path
) -> None:
    server = ServerProcess(tmp_path)
    server.prepare = _impatient
    request = {"model": str(MODEL), "prompt": "x", "max_tokens": 100, "logprobs": 5}
    with server:
        async with client_of(server) as client:
            await register(client, tiny_model)
            body = request | {"stream": True, "ignore_eos": True}
            with unread(server, "POST", "/v1/completions", body) as reader:
                got = b""
                while b"data: [DONE]" not in got:
                    await asyncio.sleep(0.3)  # ten times in what it waits
                    part = await asyncio.to_thread(reader.recv, 1500)
                    assert part, got[-200:]
                    got += part
                assert "has read nothing" not in server.output


def _many_events() -> None:
    from art_server.training import Trainer

    def endless(*args: object, progress: Callable[[int, int], None], **kwargs: object) -> object:
        while True:
            time.sleep(0.002)
            progress(0, 1)

    _impatient()
    Trainer.forward_backward = endless  # type: ignore[assignment,method-assign]


async def test_events_that_nobody_reads_are_ended_too(tmp_path: Path, tiny_model: Path) -> None:
    server = ServerProcess(tmp_path)
    server.prepare = _many_events
    with server:
        async with client_of(server) as client:
            await register(client, tiny_model)
            job = await train(client)
            with unread(server, "GET", f"/art/v1/jobs/{job}/events") as reader:
                await seen(reader)
                said = "a client has read nothing of what it was sent"
                await asyncio.to_thread(wait_until, lambda: said in server.output, 120)
