"""A network that misbehaves when told to: a TCP proxy on loopback, in a thread of its own.

TLS passes through it, unless it has a certificate of its own: then bytes are those of HTTP. What it
does to a connection is decided when the connection is opened, by the `Fault` that `proxy.fault`
gives for its number (from 0).
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

CHUNK = 1 << 16


@dataclass(frozen=True)
class Fault:
    refuse: bool = False
    """Close a connection as soon as it is open."""
    delay: float = 0.0
    """Seconds before anything is passed on, either way."""
    cut_up: int | None = None
    """Close both sides once so many bytes went to the server; the server got them."""
    cut_down: int | None = None
    """Close both sides once the server answered and so many bytes went to the client."""
    stall_up: int | None = None
    stall_down: int | None = None
    """Pass so many bytes, then nothing more; connections stay open."""
    damage_up: int | None = None
    """The number of a byte that arrives as another one."""
    answer: bytes | None = None
    """What the client gets for its first bytes, instead of an answer of the server."""


NONE = Fault()


@dataclass(frozen=True)
class Certificate:
    """With it a proxy ends TLS and begins it anew towards the server."""

    ca: Path
    certificate: Path
    key: Path


class FaultProxy:
    """Stands before `upstream`, an http(s) URL. `url` is the same with the proxy's port."""

    def __init__(self, upstream: str, certificate: Certificate | None = None) -> None:
        self._tls_here: ssl.SSLContext | None = None
        self._tls_there: ssl.SSLContext | None = None
        if certificate is not None:
            self._tls_here = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self._tls_here.load_cert_chain(certificate.certificate, certificate.key)
            self._tls_there = ssl.create_default_context(cafile=certificate.ca)
        parts = urlsplit(upstream)
        self._scheme, self._upstream = parts.scheme, (parts.hostname, parts.port)
        self.fault: Callable[[int], Fault] = lambda number: NONE
        self.connections = 0
        self.bytes_up = 0
        self.bytes_down = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._open: set[asyncio.StreamWriter] = set()
        self.port = 0

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.port}"

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        self._run(self._listen())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        self._run(self._cancel())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def start(self) -> None:
        """Listen again, on the port from before."""
        self._run(self._listen())

    def stop(self) -> None:
        """Nobody listens any more, and what was open is closed: the endpoint is down."""
        self._run(self._close())

    def cut(self) -> None:
        """Close what is open now. New connections are taken."""
        self._run(self._abort())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", self.port, ssl=self._tls_here
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        self._server.close()
        await self._abort()

    async def _abort(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    async def _cancel(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fault = self.fault(self.connections)
        self.connections += 1
        if fault.refuse:
            writer.transport.abort()
            return
        self._open.add(writer)
        up: asyncio.StreamWriter | None = None
        try:
            await asyncio.sleep(fault.delay)
            if fault.answer is not None:
                await reader.read(CHUNK)
                writer.write(fault.answer)
                await writer.drain()
                writer.close()
                await writer.wait_closed()
                return
            from_server, up = await asyncio.open_connection(*self._upstream, ssl=self._tls_there)
            self._open.add(up)
            both = [
                asyncio.ensure_future(self._up(reader, up, fault)),
                asyncio.ensure_future(self._down(from_server, writer, fault)),
            ]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for one in both:
                one.cancel()
        except OSError:
            pass  # the server is not there: what the client sees is a closed connection
        except asyncio.CancelledError:
            pass  # the proxy ends; Python 3.11 would print a traceback
        finally:
            for end in filter(None, (writer, up)):
                end.transport.abort()
                self._open.discard(end)

    async def _up(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: Fault
    ) -> None:
        passed = 0
        async for chunk in _chunks(reader, fault.cut_up, fault.stall_up):
            place = -1 if fault.damage_up is None else fault.damage_up - passed
            if 0 <= place < len(chunk):
                chunk[place] ^= 1
            passed += len(chunk)
            self.bytes_up += len(chunk)
            writer.write(chunk)
            await writer.drain()

    async def _down(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: Fault
    ) -> None:
        async for chunk in _chunks(reader, fault.cut_down, fault.stall_down):
            self.bytes_down += len(chunk)
            writer.write(chunk)
            await writer.drain()


async def _chunks(
    reader: asyncio.StreamReader, cut: int | None, stall: int | None
) -> AsyncIterator[bytearray]:
    """What is read, until there is no more, or more than `cut` bytes; for ever after `stall`."""
    passed = 0
    limit = cut if stall is None else stall
    try:
        while chunk := await reader.read(CHUNK):
            left = len(chunk) if limit is None else limit - passed
            yield bytearray(chunk[:left])
            passed += len(chunk)
            if left < len(chunk):
                break
        else:
            return
    except OSError:
        return
    if stall is not None:
        await asyncio.Event().wait()
