"""Servers of the plane in `modal_plane`, which scale from zero and back.

The stable address of a server is a real TLS listener that asks for a proxy token. A request that
finds no container starts one and is answered with 503; more start, up to the server's limit, while
those that are there have the requests at once that it aims at. Without requests for the scaledown
window a container gets SIGTERM.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web
from modal_proto import api_pb2 as api

from .modal_containers import Container
from .modal_sandboxes import HOST, POLL_SECONDS, free_port

if TYPE_CHECKING:
    from .modal_plane import ModalPlane

LARGEST_BODY = 1 << 30
OWN_HEADERS = {"transfer-encoding", "connection", "modal-key", "modal-secret", "host"}
"""Of one hop, or for Modal only."""

Start = Callable[["Server", int], Awaitable[Container]]
"""Start a container whose server listens on that port."""


@dataclass
class Running:
    """A container of a server."""

    container: Container
    port: int
    listens: bool = False
    requests: int = 0
    asked: Counter[str] = field(default_factory=Counter)
    """For how often, by path."""
    idle_since: float = 0.0


@dataclass
class Server:
    """Deployed, whether a container of it runs or not."""

    plane: ModalPlane
    app_id: str
    function: api.Function
    start: Start
    url: str = ""
    starts: int = 0
    refusals: int = 0
    """How often there was no capacity for a container."""
    containers: list[Running] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    """With which its containers ended."""
    _runner: web.AppRunner | None = None
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def requests(self) -> int:
        return sum(one.requests for one in self.containers)

    @property
    def window(self) -> float:
        settings = self.function.autoscaler_settings
        return float(settings.scaledown_window or self.function.task_idle_timeout_secs or 60)

    async def listen(self) -> None:
        app = web.Application(client_max_size=LARGEST_BODY)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, 0, ssl_context=self.plane.tls).start()
        self.url = "https://{}:{}".format(*self._runner.addresses[0])

    async def close(self) -> None:
        await self.scale_down()
        if self._runner is not None:
            await self._runner.cleanup()

    async def scale_down(self) -> None:
        """All its containers see the end of their window, or a preemption."""
        await asyncio.gather(*map(self._end, self.containers))

    async def _end(self, one: Running) -> None:
        one.listens = False
        await one.container.stop()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        sent = (request.headers.get("Modal-Key"), request.headers.get("Modal-Secret"))
        if not self.function.http_config.unauthenticated and sent != self.plane.proxy_token:
            return web.Response(status=401, text="modal-http: missing credentials")
        listening = [one for one in self.containers if one.listens]
        least = min(listening, key=lambda one: one.requests, default=None)
        settings = self.function.autoscaler_settings
        if least is None or 0 < settings.target_concurrency_float <= least.requests:
            self.plane.watch(self._scale_up())
        if least is None:
            return web.Response(status=503, text="modal-http: no container")
        least.requests += 1
        least.asked[request.path] += 1
        try:
            return await self._pass_on(least, request)
        except aiohttp.ClientError:
            return web.Response(status=502, text="modal-http: the container does not answer")
        finally:
            least.requests -= 1
            least.idle_since = time.monotonic()

    async def _pass_on(self, one: Running, request: web.Request) -> web.StreamResponse:
        url = f"http://127.0.0.1:{one.port}{request.rel_url}"
        kept = {
            key: value for key, value in request.headers.items() if key.lower() not in OWN_HEADERS
        }
        timeout = aiohttp.ClientTimeout(total=None)
        async with (
            aiohttp.ClientSession(auto_decompress=False, timeout=timeout) as session,
            session.request(
                request.method, url, headers=kept, data=await request.read(), allow_redirects=False
            ) as answer,
        ):
            response = web.StreamResponse(status=answer.status)
            for key, value in answer.headers.items():
                if key.lower() not in OWN_HEADERS:
                    response.headers[key] = value
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    async def _scale_up(self) -> None:
        most = self.function.autoscaler_settings.max_containers or 1
        if self._starting.locked() or len(self.containers) >= most:
            return
        async with self._starting:
            if not self.plane.capacity:
                self.refusals += 1
                return
            self.starts += 1
            port = free_port()
            one = Running(await self.start(self, port), port)
            self.containers.append(one)
            self.plane.watch(self._watch(one))
            give_up = time.monotonic() + self.function.http_config.startup_timeout
            while one.container.runs and not one.listens and time.monotonic() < give_up:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    one.idle_since, one.listens = time.monotonic(), True
                await asyncio.sleep(POLL_SECONDS)
            if not one.listens:
                await one.container.stop()

    async def _watch(self, one: Running) -> None:
        process = one.container.process
        while process.returncode is None:
            idle = one.listens and not one.requests
            if idle and time.monotonic() - one.idle_since > self.window:
                await self._end(one)
            await asyncio.sleep(POLL_SECONDS)
        one.listens = False
        self.containers.remove(one)
        self.codes.append(process.returncode)
        one.container.kill()
