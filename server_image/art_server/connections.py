"""A client's connection, which ends when the client does not read what it is sent."""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as HTTPProtocol
else:
    from uvicorn.protocols.http.auto import AutoHTTPProtocol as HTTPProtocol

UNREAD_SECONDS = 60.0
"""How long a client may take none of the bytes that are ready for it."""


class Connection(HTTPProtocol):
    """uvicorn's, but an answer that nobody reads is ended as if the client had gone: it would hold
    the policy that it comes from, and with vLLM its place, for as long as the client likes."""

    _looking: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # paused: the system takes no more

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look_again(self._unread())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._look_no_more()

    def connection_lost(self, exc: Exception | None) -> None:
        self._look_no_more()
        super().connection_lost(exc)

    def _look_again(self, unread: int) -> None:
        self._look_no_more()
        loop = asyncio.get_running_loop()
        self._looking = loop.call_later(UNREAD_SECONDS, self._look, unread)

    def _look_no_more(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    def _look(self, unread_before: int) -> None:
        if (unread := self._unread()) < unread_before:
            return self._look_again(unread)
        self.logger.warning(
            "a client has read nothing of what it was sent for %.0f s: its connection is ended",
            UNREAD_SECONDS,
        )
        self.transport.abort()

    def _unread(self) -> int:
        """Bytes that the client's system has not taken; as it makes room when the client reads, and
        this one's asks for more only after many, those that it has are counted too."""
        socket = self.transport.get_extra_info("socket")
        [in_system] = struct.unpack("i", fcntl.ioctl(socket.fileno(), termios.TIOCOUTQ, bytes(4)))
        return int(in_system) + self.transport.get_write_buffer_size()
