"""Connections that bring no token, or nothing at all, beside a client that has one."""

from __future__ import annotations

import asyncio
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from art_server.api import doors

from ..rigs.server_process import TOKEN, ServerProcess
from ..rigs.waiting import wait_until

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n"


def _few_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1024))


def _short_limits() -> None:
    doors.HEAD_SECONDS, doors.BODY_SECONDS = 1.0, 1.0


@contextmanager
def descriptors(wanted: int) -> Iterator[None]:
    """So many for the test's own process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), max(hard, wanted)))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path)
    server.prepare = _short_limits
    with server:
        yield server


def connect(server: ServerProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), 60)


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return not connection.recv(65536)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize("few", [True, False])
async def test_2000_connections_without_a_token_keep_nobody_out(tmp_path: Path, few: bool) -> None:
    server = ServerProcess(tmp_path)
    server.prepare = _few_descriptors if few else None
    with server, descriptors(3000), ExitStack() as connections:
        async with server.http() as known:
            assert (await known.post("/art/v1/lease")).status_code == 200
            for number in range(2000):
                one = connections.enter_context(await asyncio.to_thread(connect, server))
                if number % 2:
                    one.sendall(b"GET /art/v1/server HTTP/1.1\r\nHost: x\r\n")
                if number % 200 == 0:
                    assert (await known.post("/art/v1/lease")).status_code == 200
                    async with server.http() as fresh:
                        assert (await fresh.get("/art/v1/server")).status_code == 200
            assert (await known.post("/art/v1/lease")).status_code == 200
        assert server.terminate() == 0
    assert len(server.output) < 10_000
    assert "accept" not in server.output


def _hardly_any_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))


def test_a_server_without_descriptors_says_so_once_and_goes_on(tmp_path: Path) -> None:
    """All that there are are taken by clients that have a token, and so are nobody's to take."""
    server = ServerProcess(tmp_path)
    server.prepare = _hardly_any_descriptors
    ask = b"POST /art/v1/lease HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n"
    ask += b"Authorization: Bearer %s\r\n\r\n" % TOKEN.encode()
    said, began = "a connection could not be accepted", time.monotonic()
    with server:
        with ExitStack() as connections:
            while said not in server.output:
                one = connections.enter_context(connect(server))
                one.sendall(ask)
                one.settimeout(2)
                with suppress(TimeoutError):
                    assert one.recv(65536).startswith(b"HTTP/1.1 200")
            time.sleep(3)  # the loop tries again each second
        with connect(server) as one:
            one.sendall(ask)
            assert one.recv(65536).startswith(b"HTTP/1.1 200")
        assert server.terminate() == 0
    assert server.output.count(said) <= 1 + (time.monotonic() - began) // doors.SILENT_SECONDS
    assert "Too many open files" in server.output
    assert "Traceback" not in server.output


def test_a_head_that_does_not_come_ends_its_connection(impatient: ServerProcess) -> None:
    with connect(impatient) as silent, connect(impatient) as slow, connect(impatient) as next_:
        next_.sendall(HEAD % b"wrong" + b"Content-Length: 0\r\n\r\n")
        assert b"401" in next_.recv(65536)
        next_.sendall(b"GET /art/v1/serv")
        sent = time.monotonic()
        while not (is_closed(silent) and is_closed(slow) and is_closed(next_)):
            assert time.monotonic() - sent < 60
            with suppress(ConnectionError):
                slow.send(b"G")
            time.sleep(0.05)


def test_a_body_that_trickles_ends_its_connection(impatient: ServerProcess) -> None:
    with connect(impatient) as trickle, connect(impatient) as silent, connect(impatient) as steady:
        for connection in (trickle, silent, steady):
            connection.sendall(HEAD % TOKEN.encode() + b"Content-Length: 1000000\r\n\r\n")
        sent = time.monotonic()
        while not (is_closed(trickle) and is_closed(silent)):
            assert time.monotonic() - sent < 60
            assert not is_closed(steady)
            with suppress(ConnectionError):
                trickle.send(b"x")
            steady.setblocking(True)
            steady.sendall(bytes(5_000))
            time.sleep(0.05)
    wait_until(lambda: "went away in the middle" in impatient.output, 60)


def test_what_is_no_http_leaves_no_line_in_the_log(impatient: ServerProcess) -> None:
    before = impatient.output
    for garbage in (b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"):
        with connect(impatient) as connection:
            connection.sendall(garbage)
            assert connection.recv(65536).startswith(b"HTTP/1.1 4")
    with connect(impatient) as connection:
        upgrade = b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n"
        connection.sendall(b"GET /v1 HTTP/1.1\r\nHost: x\r\n" + upgrade)
        assert b"401" in connection.recv(65536)
    assert impatient.output == before


def test_what_comes_after_an_answer_leaves_no_line_in_the_log(impatient: ServerProcess) -> None:
    before = impatient.output
    for end in (b"bad trailer\r\n\r\n", b"t: " + b"x" * 200_000 + b"\r\n\r\n"):
        with connect(impatient) as connection:
            connection.sendall(HEAD % b"wrong" + b"Transfer-Encoding: chunked\r\n\r\n")
            assert b"401" in connection.recv(65536)
            with suppress(ConnectionError):
                connection.sendall(b"2\r\n{}\r\n0\r\n" + end)
            wait_until(lambda one=connection: is_closed(one), 60)  # type: ignore[misc]
    assert impatient.output == before


def test_the_token_is_not_in_the_environment_of_the_process(tmp_path: Path) -> None:
    token = "f00d" * 16
    arguments = ["--state", str(tmp_path / "state"), "--store", str(tmp_path / "store")]
    process = subprocess.Popen(
        [sys.executable, "-m", "art_server", *arguments],
        env={"PATH": "/usr/bin:/bin", "ART_CLOUD_TOKEN": token, "HOME": str(tmp_path)},
        stderr=subprocess.DEVNULL,
        umask=0o022,
    )
    try:
        environ = Path(f"/proc/{process.pid}/environ")
        wait_until((tmp_path / "state" / "endpoint.json").exists, 120)
        assert b"ART_CLOUD_TOKEN=----" in environ.read_bytes()
        assert token.encode() not in environ.read_bytes()
        made = [path for path in tmp_path.rglob("*") if path.stat().st_mode & 0o077]
        assert made == []
    finally:
        process.terminate()
        process.wait(60)
