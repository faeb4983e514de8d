"""The two ends of a connection that a login carries, on this machine.

What the client sends `ssh` reads from the client's own socket. What comes from there passes here,
so that a client is told whether its answer is whole: ssh itself could only close the socket.
"""

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


class NearEnd(asyncio.Protocol):
    """The connection that a client on this machine made. Nothing of it is read here."""

    transport: Any
    far: FarEnd | None = None

    def __init__(self, arrived: Callable[[NearEnd], None]) -> None:
        self._arrived = arrived
        self.gone = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.transport.pause_reading()
        self._arrived(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.gone = True
        if self.far is not None:
            self.far.transport.close()

    def pause_writing(self) -> None:
        if self.far is not None:
            self.far.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.far is not None:
            self.far.transport.resume_reading()

    @property
    def socket(self) -> Any:
        return self.transport.get_extra_info("socket")

    def write_eof(self) -> None:
        """Nothing more will come."""
        if not self.gone:
            with suppress(OSError):  # gone before asyncio knows it
                self.transport.write_eof()

    def reset(self) -> None:
        """End it so that what came over it is not taken for all that there was to come."""
        if not self.gone:
            with suppress(OSError):
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
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
        self.transport.write(head.encode() + body)
        self.write_eof()
        self.transport.resume_reading()  # and dropped, so that the client reads the answer
        asyncio.get_running_loop().call_later(LINGER_SECONDS, self.transport.abort)


class FarEnd(asyncio.Protocol):
    """What the login writes of the connection on the other machine."""

    transport: Any

    def __init__(self, near: NearEnd) -> None:
        self._near = near
        near.far = self
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._near.transport.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
