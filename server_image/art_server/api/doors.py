"""Connections: how many may wait without having shown a token, how long a request may take to come,
and how long an answer may lie unread. uvicorn has no limit for any of them; its `limit_concurrency`
answers 503 to everybody alike.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import resource
import struct
import termios
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

log = logging.getLogger(__name__)

HEAD_SECONDS = 10.0
"""How long the head of a request may take to come."""
BODY_SECONDS, BODY_BYTES = 30.0, 30 << 10
"""A request's body has to bring so many bytes in each so many seconds, until it ends."""
KEEP_ALIVE_SECONDS = 30
"""How long a connection may lie idle: longer than clients keep theirs, so that they end it."""
UNREAD_SECONDS = 60.0
"""How long a client may take none of the bytes that are ready for it."""
BACKLOG = 128
MOST_DESCRIPTORS = 1 << 16
MOST_STRANGERS = 2048
SILENT_SECONDS = 60.0
"""How long the log is silent after it said that connections could not be accepted."""
ADMIT = "art.admit"
"""The key in an ASGI scope's extensions of a function to call once a request has shown a token or a
session's key."""


def raise_descriptor_limit() -> int:
    """Let the process have as many descriptors as it may; returns how many those are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


class Strangers:
    """The connections that have shown no token yet, the oldest first. One beyond `most` costs the
    oldest its place: whoever has a token shows it at once, and is a stranger for a moment only."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._there: dict[Connection, None] = {}

    def add(self, connection: Connection) -> None:
        if len(self._there) >= self.most:
            oldest = next(iter(self._there))
            self.remove(oldest)
            oldest.transport.abort()
        self._there[connection] = None

    def remove(self, connection: Connection) -> None:
        self._there.pop(connection, None)


class Connection(H11Protocol):
    """uvicorn's connection, with a limit of time for heads, for bodies, and for what lies unread.

    An answer that nobody reads is ended as if the client had gone: it would hold the policy that it
    comes from, and with vLLM its place, for as long as the client likes.
    """

    def __init__(self, strangers: Strangers, **given: Any) -> None:
        super().__init__(**given)
        self._strangers = strangers
        self._routes = self.app
        self.app = self._call
        self._limit: asyncio.TimerHandle | None = None
        self._limited: type | None = None
        self._received = 0
        self._looking: asyncio.TimerHandle | None = None

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        extensions = scope.setdefault("extensions", {})
        extensions[ADMIT] = lambda: self._strangers.remove(self)
        await self._routes(scope, receive, send)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # paused: the system takes no more
        self._strangers.add(self)
        self._wait_for(h11.IDLE)

    def connection_lost(self, exc: Exception | None) -> None:
        self._strangers.remove(self)
        self._wait_for(None)
        self._look_no_more()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        super().data_received(data)
        self._wait_for(self.conn.their_state)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        state = self.conn.their_state
        self._wait_for(None if state is h11.IDLE else state)  # idle: uvicorn's own limit

    def _wait_for(self, state: type | None) -> None:
        """Start the time limit of a head (IDLE) or of a body (SEND_BODY); no other state has
        one."""
        if state is self._limited:
            return
        if self._limit is not None:
            self._limit.cancel()
        self._limit, self._limited = None, state
        if state is h11.IDLE:
            self._limit = self.loop.call_later(HEAD_SECONDS, self._end)
        elif state is h11.SEND_BODY:
            self._limit_body()

    def _limit_body(self) -> None:
        before = self._received

        def look() -> None:
            # what the server itself does not read yet is not late
            waits = self.flow.read_paused or self.cycle.waiting_for_100_continue
            if waits or self._received - before >= BODY_BYTES:
                self._limit_body()
            else:
                self._end()

        self._limit = self.loop.call_later(BODY_SECONDS, look)

    def _end(self) -> None:
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """What can't be understood after the answer was sent has none of its own."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self._end()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look_again(self._unread())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._look_no_more()

    def _look_again(self, unread: int) -> None:
        self._look_no_more()
        self._looking = self.loop.call_later(UNREAD_SECONDS, self._look, unread)

    def _look_no_more(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    def _look(self, unread_before: int) -> None:
        if (unread := self._unread()) < unread_before:
            return self._look_again(unread)
        log.warning(
            "a client has read nothing of what it was sent for %.0f s: its connection is ended",
            UNREAD_SECONDS,
        )
        self._end()

    def _unread(self) -> int:
        """How many bytes the client's system has not taken; it takes more as the client reads. This
        machine's system asks for more only after many, so what it still holds is counted too."""
        socket = self.transport.get_extra_info("socket")
        [in_system] = struct.unpack("i", fcntl.ioctl(socket.fileno(), termios.TIOCOUTQ, bytes(4)))
        return int(in_system) + self.transport.get_write_buffer_size()


def handle_loop_errors(
    loop: asyncio.AbstractEventLoop, now: Callable[[], float] = time.monotonic
) -> None:
    """Have asyncio log only once in a while that no descriptors are left for new connections: it
    tries again every second, and would log it for each connection."""
    quiet_until = 0.0

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal quiet_until
        if "socket.accept()" not in context.get("message", ""):
            return loop.default_exception_handler(context)
        if now() >= quiet_until:
            quiet_until = now() + SILENT_SECONDS
            log.error("a connection could not be accepted: %s", context.get("exception"))

    loop.set_exception_handler(handle)
