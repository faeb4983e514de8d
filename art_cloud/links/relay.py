"""Bytes between a connection on this machine and one on another, both ways, with back pressure."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..shared.errors import ArtCloudError

REFUSED = "art-tunnel"
"""The header that marks an answer of the tunnel itself: the request was not delivered."""
LINGER_SECONDS = 30.0
"""How long a client that was refused may take to read why."""


class End(asyncio.Protocol):
    """One end of a relayed connection: what comes in here goes out at the `other`.

    It serves as the protocol of an asyncio transport and as the session of an asyncssh channel,
    whose errors asyncssh answers by ending the login with all its channels: a socket that is gone
    before asyncio knows it must not raise here.
    """

    other: Any
    transport: Any = None
    """An `asyncio.Transport` or `asyncssh.SSHTCPChannel`: they have the same methods."""
    ended = False
    """Whether all that will come has come."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def session_started(self) -> None:
        """asyncssh's: the channel is open."""

    def data_received(self, data: bytes, datatype: int | None = None) -> None:
        self.other.transport.write(data)

    def eof_received(self) -> bool:
        self.ended = True
        with suppress(OSError):
            self.other.transport.write_eof()
        return not self.other.ended

    def pause_writing(self) -> None:
        self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        self.other.transport.resume_reading()


class FarEnd(End):
    """The connection on the other machine."""

    def __init__(self, near: NearEnd) -> None:
        self.other = near
        near.other = self

    def connection_lost(self, error: Exception | None) -> None:
        if self.ended and error is None:
            self.other.transport.close()
        else:
            self.other.reset()


class NearEnd(End):
    """The connection that a client on this machine made; nothing of it is read at first."""

    def __init__(self, arrived: Callable[[NearEnd], None]) -> None:
        self._arrived = arrived
        self.gone = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.pause_reading()
        self._arrived(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.gone = True
        if self.other.transport is not None:
            self.other.transport.close()

    def start(self) -> None:
        """Read, now that there is a far end."""
        if self.gone:
            self.other.transport.close()
        else:
            self.transport.resume_reading()

    def reset(self) -> None:
        """End it so that what came over it is not taken for all that there was to come."""
        if not self.gone:
            client = self.transport.get_extra_info("socket")
            with suppress(OSError):
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()

    def refuse(self, host: str, error: ArtCloudError) -> None:
        """Answer whatever is asked with why it can't be delivered."""
        if self.gone:
            return
        body = json.dumps({"error": {"message": str(error), "code": error.code}}).encode()
        head = (
            "HTTP/1.1 502 Bad Gateway\r\nContent-Type: application/json\r\n"
            f"{REFUSED}: {host}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self.transport.set_protocol(_Refused())
        self.transport.write(head.encode() + body)
        with suppress(OSError):
            self.transport.write_eof()
        self.transport.resume_reading()
        asyncio.get_running_loop().call_later(LINGER_SECONDS, self.transport.abort)


class _Refused(asyncio.Protocol):
    """Takes the rest of a refused request and drops it, so that the client reads the answer."""
