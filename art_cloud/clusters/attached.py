"""A backend that belongs to a cluster: it keeps the lease, and survives the loss of its server."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime

from ..backend import Backend
from ..client.http import Address, ServerClient, parse
from ..links.endpoint import Endpoint
from ..links.tunnel import open_tunnel, port_of, reached
from ..shared.errors import ArtCloudError, RegistryError
from ..shared.progress import say, say_once
from ..shared.protocol import Metrics, ServerInfo
from .credentials import encode_credentials, for_server
from .registry import ClusterRecord, Registry, Use

log = logging.getLogger(__name__)

PING_SECONDS = 30.0
"""How often the lease is renewed: far below the shortest lease or idle limit that makes sense."""
STUCK_SECONDS = 3.0
"""A script whose event loop runs nothing for so long counts as stuck: its tunnel does not work
then."""
LONGEST_STUCK_SECONDS = 3600.0
"""How long a stuck script still counts as a client: a debugger may stand at a breakpoint all night.
"""
LAST_WORDS_SECONDS = 5.0
PATIENCE_SECONDS = 90.0
WAKING_SECONDS = 1200.0
"""How long a server that scales to zero may take to answer: a machine, weights, an engine."""
LOGIN_SECONDS = 5.0
"""After a call has waited so long for its tunnel, the provider is asked whether the machine exists.
"""
CHECK_SECONDS = 3.0
"""How often the provider is asked whether a server that does not answer still exists."""

Replace = Callable[[], Awaitable[tuple[Endpoint, str] | None]]
"""A callback that starts another server if the cluster's is gone, and returns where it listens and
its token. It returns None while the old server exists, and raises if there won't be another."""


class AttachedBackend(Backend):
    """A `Backend` that renews the lease of its server from opening to closing.

    Where the cluster is recorded, other programs of this user see that it is in use.
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
        """When that server was started that knows the models of this program; None: unknown."""
        self._replace = replace
        self._replacing = asyncio.Lock()
        self._replaced = 0
        self._checked_at = -CHECK_SECONDS
        self._server.recover = self._recover if replace else None
        self._pinging: _Pinging | None = None
        self._record = record
        self._use = Use(record.name) if record else None
        self._credentials: tuple[datetime, datetime] | None = None
        """When the server's credentials for the store end, and when this end was first seen."""

    async def __aenter__(self) -> AttachedBackend:
        await self._take(self._endpoint, self._token)
        await super().__aenter__()
        if self._endpoint.sleeps:
            self._seen = (await self.info()).started_at
        else:
            self._pinging = _Pinging(self)
        return self

    @property
    def inference_url(self) -> str:
        return self._endpoint.inference_url or self.url

    async def back(self) -> Address:
        """Wait until the server answers, with the models of this program if it was asleep."""
        if self.inference_url != self.url:
            return await self._awake(self.inference_url)
        there = await super().back()
        if self._endpoint.sleeps:
            async with self._replacing:
                started_at = (await self.info()).started_at
                if started_at != self._seen:
                    await self._calls.go_on_at(self._server)
                    self._seen = started_at
        return there

    async def _awake(self, url: str) -> Address:
        patience = self._server.patience
        server = ServerClient(url, self._token, patience=patience, headers=self._headers)
        try:
            await server.call("GET", "server")
        finally:
            await server.close()
        return server.address

    async def close(self) -> None:
        if self._pinging is not None:
            await asyncio.to_thread(self._pinging.stop)
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
        spent = spec.spent_seconds / 3600 * spec.price_per_hour
        return {"cost/usd": spent, "cost/usd_per_hour": spec.price_per_hour}

    async def sample_a_token(self, base_model: str) -> None:
        """Sample one token, which shows that the engine answers all the way to this program."""
        body = json.dumps({"model": base_model, "prompt": "1", "max_tokens": 1})
        await self._server.call("POST", f"{self.url}/v1/completions", body.encode())

    async def _renew(self, *, apart: bool = False) -> None:
        """Renew the lease, print the server's warnings, and record what it has done so far.

        With `apart` by a way of its own, if the server is on another machine.
        """
        url, token = self._server.address
        endpoint = self._endpoint
        try:
            if apart and endpoint.ssh is not None:
                async with reached(endpoint) as own:
                    await self._renew_at(own, token)
            else:
                await self._renew_at(url, token)
        except (ArtCloudError, OSError) as error:
            log.debug("the lease was not renewed: %s", error)  # who calls next is told

    async def _renew_at(self, url: str, token: str) -> None:
        server = ServerClient(url, token, patience=0, headers=self._headers)
        try:
            info = parse(ServerInfo, await server.call("POST", "lease"))
            for message in info.warnings:
                say_once(message)
            if self._record is not None:
                with suppress(RegistryError):  # a full disk
                    Registry().note(self._record, info)
                await self._renew_credentials(server, self._record, info)
        finally:
            await server.close()

    async def _renew_credentials(
        self, server: ServerClient, record: ClusterRecord, info: ServerInfo
    ) -> None:
        """Send the server new credentials for the store once half of the lifetime of the old ones
        is over."""
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
        """True if another server runs now, and has the models of the one that is gone."""
        assert self._replace is not None
        replaced = self._replaced
        async with self._replacing:
            if self._replaced != replaced:
                return True
            if time.monotonic() - self._checked_at < CHECK_SECONDS:
                return False
            try:
                found = await self._replace()
            finally:
                self._checked_at = time.monotonic()
            if found is None:
                return False
            await self._go_on_at(*found)
            self._replaced += 1
            return True

    async def _go_on_at(self, endpoint: Endpoint, token: str) -> None:
        headers = endpoint.plain_headers
        async with reached(endpoint) as url, Backend(url, token, headers=headers) as there:
            await self._calls.go_on_at(there._server)
        await self._take(endpoint, token)
        for model in self._models:
            model.move(f"{self.inference_url}/v1", token)
        say(f"Going on at {self.url}, from the newest step in the store.")

    async def _take(self, endpoint: Endpoint, token: str) -> None:
        """Send calls to `endpoint` from now on, through a tunnel if it is on another machine."""
        self._endpoint = endpoint
        if endpoint.ssh is None:
            self._server.move(Address(endpoint.url, token))
            return
        if self.tunnel is None:
            wait = LOGIN_SECONDS if self._replace else None
            self.tunnel = await open_tunnel(endpoint.ssh, port_of(endpoint), wait=wait)
        else:
            self.tunnel.retarget(endpoint.ssh, port_of(endpoint))
        self._server.move(Address(self.tunnel.url, token))


class _Pinging:
    """Renews the lease in a thread of its own, until it is stopped or the script's event loop is
    closed: a script that blocks its loop, in a reward function that takes long, is a client too."""

    def __init__(self, backend: AttachedBackend) -> None:
        self._backend = backend
        self._script = asyncio.get_running_loop()
        self._own = asyncio.new_event_loop()
        self._heard_at = time.monotonic()
        self._task = self._own.create_task(self._ping())
        self._thread = threading.Thread(target=self._run, name="art-cloud-lease", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        with suppress(RuntimeError):  # it has ended
            self._own.call_soon_threadsafe(self._task.cancel)
        self._thread.join(LAST_WORDS_SECONDS)

    def _run(self) -> None:
        try:
            with suppress(asyncio.CancelledError, RuntimeError):  # the program is ending
                self._own.run_until_complete(self._task)
        finally:
            self._own.close()

    async def _ping(self) -> None:
        while True:
            stuck = await self._is_stuck()
            if time.monotonic() - self._heard_at < LONGEST_STUCK_SECONDS:
                await self._backend._renew(apart=stuck)
            await asyncio.sleep(PING_SECONDS)

    async def _is_stuck(self) -> bool:
        """Whether the script's event loop is blocked. Raises `RuntimeError` if the loop is
        closed."""
        heard = asyncio.Event()

        def answer() -> None:
            with suppress(RuntimeError):  # nobody waits any more
                self._own.call_soon_threadsafe(heard.set)

        self._script.call_soon_threadsafe(answer)
        try:
            async with asyncio.timeout(STUCK_SECONDS):
                await heard.wait()
        except TimeoutError:
            return True
        self._heard_at = time.monotonic()
        return False
