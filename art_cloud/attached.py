"""A backend that belongs to a cluster: it keeps the lease, and survives the loss of its server."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime

from .backend import Backend
from .credentials import encode_credentials, for_server
from .errors import ArtCloudError
from .http import ServerClient, parse
from .progress import say, say_once
from .protocol import Metrics, ServerInfo
from .providers import Endpoint
from .registry import ClusterRecord, Registry, Use
from .tunnel import open_tunnel, port_of, reached

log = logging.getLogger(__name__)

PING_SECONDS = 30.0
"""Far below the shortest lease or idle limit that makes sense."""
LAST_WORDS_SECONDS = 5.0
PATIENCE_SECONDS = 90.0
WAKING_SECONDS = 1200.0
"""How long a server that scales to zero may take to answer: a machine, weights, an engine."""
LOGIN_SECONDS = 5.0
"""A call that waits longer for its tunnel has its provider asked whether the machine exists."""
CHECK_SECONDS = 3.0
"""How often it is asked whether a server that does not answer still exists."""

Replace = Callable[[], Awaitable[Endpoint | None]]
"""Start another server if the cluster's is gone, and return where it listens; None while the old
one exists. Raises why there won't be another."""


class AttachedBackend(Backend):
    """A `Backend` whose server sees, from opening to closing, that it has a client.

    So do other programs of this user, if it is of a recorded cluster.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        token: str,
        record: ClusterRecord | None = None,
        replace: Replace | None = None,
    ) -> None:
        patience = WAKING_SECONDS if endpoint.sleeps else PATIENCE_SECONDS
        super().__init__(endpoint.url, token, patience=patience, headers=endpoint.plain_headers)
        self._endpoint = endpoint
        self._seen: datetime | None = None
        """When the server started that has the models of this program, if it is one that sleeps."""
        self._replace = replace
        self._replacing = asyncio.Lock()
        self._replaced = 0
        self._checked_at = -CHECK_SECONDS
        self._server.recover = self._recover if replace else None
        self._pinging: asyncio.Task[None] | None = None
        self._record = record
        self._use = Use(record.name) if record else None
        self._credentials: tuple[datetime, datetime] | None = None
        """Until when the server's hold, and when that was seen first."""

    async def __aenter__(self) -> AttachedBackend:
        await self._take(self._endpoint)
        await super().__aenter__()
        if self._endpoint.sleeps:
            self._seen = (await self.info()).started_at
        else:
            self._pinging = asyncio.create_task(self._ping())
        return self

    @property
    def inference_url(self) -> str:
        return self._endpoint.inference_url or self.url

    async def back(self) -> str:
        """Wait until the server answers, with the models of this program if it was asleep."""
        if self.inference_url != self.url:
            return await self._awake(self.inference_url)
        url = await super().back()
        if self._endpoint.sleeps:
            async with self._replacing:
                started_at = (await self.info()).started_at
                if started_at != self._seen:
                    await self._calls.go_on_at(self._server)
                    self._seen = started_at
        return url

    async def _awake(self, url: str) -> str:
        patience = self._server.patience
        server = ServerClient(url, self._token, patience=patience, headers=self._headers)
        try:
            await server.call("GET", "server")
        finally:
            await server.close()
        return url

    async def close(self) -> None:
        if self._pinging is not None:
            self._pinging.cancel()
        if self._use is not None:
            self._use.end()
        await super().close()
        if self._pinging is not None and self._record is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._renew(), LAST_WORDS_SECONDS)
        if self.tunnel is not None:
            await self.tunnel.close()

    def cost(self) -> Metrics:
        spec = self._record.spec if self._record else None
        if spec is None or spec.launched_at is None or not spec.price_per_hour:
            return {}
        hours = (datetime.now(UTC) - spec.launched_at).total_seconds() / 3600
        return {"cost/usd": hours * spec.price_per_hour, "cost/usd_per_hour": spec.price_per_hour}

    async def sample_a_token(self, base_model: str) -> None:
        """Have the engine show that it answers, all the way to here."""
        body = json.dumps({"model": base_model, "prompt": "1", "max_tokens": 1})
        await self._server.call("POST", f"{self.url}/v1/completions", body.encode())

    async def _ping(self) -> None:
        while True:
            await self._renew()
            await asyncio.sleep(PING_SECONDS)

    async def _renew(self) -> None:
        """Renew the lease, say what the server warns of, and note what it has done until now."""
        server = ServerClient(self.url, self._token, patience=0, headers=self._headers)
        try:
            info = parse(ServerInfo, await server.call("POST", "lease"))
            for message in info.warnings:
                say_once(message)
            if self._record is not None:
                await asyncio.to_thread(Registry().note, self._record, info)
                await self._renew_credentials(server, self._record, info)
        except ArtCloudError as error:
            log.debug("the lease was not renewed: %s", error)  # who calls next is told
        finally:
            await server.close()

    async def _renew_credentials(
        self, server: ServerClient, record: ClusterRecord, info: ServerInfo
    ) -> None:
        """Send new ones for the store once half of the time that the old ones had is over."""
        until, now = info.credentials_until, datetime.now(UTC)
        if until is None or record.spec.provider == "local":
            return
        if self._credentials is None or self._credentials[0] != until:
            self._credentials = until, now
        seen = self._credentials[1]
        if now >= seen + (until - seen) / 2:
            self._credentials = until, now
            given = await for_server(record.spec.store)
            await server.call("PUT", "credentials", encode_credentials(given))

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
        headers = endpoint.plain_headers
        async with reached(endpoint) as url, Backend(url, self._token, headers=headers) as there:
            await self._calls.go_on_at(there._server)
        await self._take(endpoint)
        say(f"Going on at {self.url}, from the newest step in the store.")

    async def _take(self, endpoint: Endpoint) -> None:
        """Have calls go to `endpoint` from now on, through a tunnel if it is elsewhere."""
        if endpoint.ssh is None:
            self._server.url = endpoint.url
            return
        if self.tunnel is None:
            wait = LOGIN_SECONDS if self._replace else None
            self.tunnel = await open_tunnel(endpoint.ssh, port_of(endpoint), wait=wait)
        else:
            self.tunnel.retarget(endpoint.ssh, port_of(endpoint))
        self._server.url = self.tunnel.url
