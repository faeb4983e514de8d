"""A backend that belongs to a cluster: it keeps the lease, and survives the loss of its server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from .backend import Backend
from .errors import ArtCloudError
from .http import ServerClient
from .progress import say
from .providers import Endpoint
from .registry import Use
from .tunnel import open_tunnel, port_of, reached

PING_SECONDS = 30.0
"""Far below the shortest lease or idle limit that makes sense."""
CHECK_SECONDS = 3.0
"""How often it is asked whether a server that does not answer still exists."""

Replace = Callable[[], Awaitable[Endpoint | None]]
"""Start another server if the cluster's is gone, and return where it listens; None while the old
one exists. Raises why there won't be another."""


class AttachedBackend(Backend):
    """A `Backend` whose server sees, from opening to closing, that it has a client.

    So do other programs of this user, if it is of the recorded cluster `name`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        token: str,
        name: str | None = None,
        replace: Replace | None = None,
    ) -> None:
        super().__init__(endpoint.url, token)
        self._endpoint = endpoint
        self._replace = replace
        self._replacing = asyncio.Lock()
        self._replaced = 0
        self._checked_at = -CHECK_SECONDS
        self._server.recover = self._recover if replace else None
        self._pinging: asyncio.Task[None] | None = None
        self._use = Use(name) if name else None

    async def __aenter__(self) -> AttachedBackend:
        await self._take(self._endpoint)
        await super().__aenter__()
        self._pinging = asyncio.create_task(self._ping())
        return self

    async def close(self) -> None:
        if self._pinging is not None:
            self._pinging.cancel()
        if self._use is not None:
            self._use.end()
        await super().close()
        if self.tunnel is not None:
            await self.tunnel.close()

    async def _ping(self) -> None:
        server = ServerClient(self.url, self._token, patience=0)
        try:
            while True:
                await asyncio.sleep(PING_SECONDS)
                server.url = self.url
                with suppress(ArtCloudError):  # whoever calls the server next is told
                    await server.call("GET", "server")
        finally:
            await server.close()

    async def _recover(self) -> bool:
        """Whether there is another server now, with the models of the one that is gone."""
        assert self._replace is not None
        replaced = self._replaced
        async with self._replacing:
            if self._replaced != replaced:
                return True
            if time.monotonic() - self._checked_at < CHECK_SECONDS:
                return False
            try:
                endpoint = await self._replace()
            finally:
                self._checked_at = time.monotonic()
            if endpoint is None:
                return False
            await self._go_on_at(endpoint)
            self._replaced += 1
            return True

    async def _go_on_at(self, endpoint: Endpoint) -> None:
        async with reached(endpoint) as url, Backend(url, self._token) as there:
            await self._calls.go_on_at(there._server)
        await self._take(endpoint)
        say(f"Going on at {self.url}, from the newest step in the store.")

    async def _take(self, endpoint: Endpoint) -> None:
        """Have calls go to `endpoint` from now on, through a tunnel if it is elsewhere."""
        if endpoint.ssh is None:
            self._server.url = endpoint.url
            return
        if self.tunnel is None:
            self.tunnel = await open_tunnel(endpoint.ssh, port_of(endpoint))
        else:
            self.tunnel.retarget(endpoint.ssh, port_of(endpoint))
        self._server.url = self.tunnel.url
