"""A port of this machine that leads to a port of another one, for as long as a program needs it.

The port outlives the ssh login behind it. While there is none, because the network changed, the
laptop slept or sshd was restarted, new connections wait; those that were open are reset, so that
whoever used them knows that their answer is not whole.

    tunnel = await open_tunnel(SSHRoute(host="gpu-box"), 8321)
    ...                     # http://127.0.0.1:PORT is http://127.0.0.1:8321 of gpu-box
    await tunnel.close()
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Literal
from urllib.parse import urlsplit

from ..shared.errors import ArtCloudError, ConfigError, ServerUnavailableError
from ..shared.progress import say
from .endpoint import Endpoint, SSHRoute
from .logins import LinkLostError, Login, log_in
from .relay import FarEnd, NearEnd

WAIT_SECONDS = 30.0
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0  # seconds between two tries to log in
WATCH_SECONDS = 1.0
SLEPT_SECONDS = 10.0
"""A jump of the wall clock that a machine makes when it slept."""

TunnelState = Literal["connected", "reconnecting", "failed", "closed"]


async def open_tunnel(
    route: SSHRoute, remote_port: int, *, local_port: int = 0, wait: float | None = None
) -> Tunnel:
    """Log in to the machine of `route` and listen at `local_port` (0: a free one) for its port.

    Args:
        wait: seconds for which a new connection waits while there is no login; None: 30.

    Raises:
        ServerUnavailableError: the machine does not answer.
        ProviderError: it does not let this user in, or shows another host key than the known one.
        ConfigError: there is no ssh, its configuration can't be read, or the local port is taken.
    """
    try:
        listener = socket.create_server(("127.0.0.1", local_port), backlog=1024)
    except OSError as error:
        raise ConfigError(
            f"Port {local_port} of this machine can't be used: {error.strerror}. Take another."
        ) from error
    try:
        login = await log_in(route)
    except BaseException:
        listener.close()
        raise
    tunnel = Tunnel(route, remote_port, login, WAIT_SECONDS if wait is None else wait)
    await tunnel.listen(listener)
    return tunnel


def port_of(endpoint: Endpoint) -> int:
    port = urlsplit(endpoint.url).port
    assert port is not None, endpoint.url
    return port


@asynccontextmanager
async def reached(endpoint: Endpoint) -> AsyncIterator[str]:
    """The URL of an endpoint for this machine, through a tunnel for the block if it takes one."""
    if endpoint.ssh is None:
        yield endpoint.url
        return
    tunnel = await open_tunnel(endpoint.ssh, port_of(endpoint))
    try:
        yield tunnel.url
    finally:
        await tunnel.close()


class Tunnel:
    """What `open_tunnel` returns.

    `state` is "failed" when the machine no longer lets this user in or is another one: a cure
    takes a person. `reconnects` counts the logins after the first, `last_error` is the last thing
    that went wrong.
    """

    def __init__(self, route: SSHRoute, remote_port: int, login: Login, wait: float) -> None:
        self.state: TunnelState = "connected"
        self.reconnects = 0
        self.last_error: ArtCloudError | None = None
        self._route = route
        self._remote_port = remote_port
        self._wait = wait
        self._login: Login | None = login
        self._settled = asyncio.Event()
        """Set once the last attempt to log in has succeeded or failed."""
        self._settled.set()
        self._keeping = asyncio.create_task(self._keep())
        self._watching = asyncio.create_task(self._watch())
        self._connections: set[asyncio.Task[None]] = set()
        self._ending: set[asyncio.Task[None]] = set()

    async def listen(self, listener: socket.socket) -> None:
        self.port: int = listener.getsockname()[1]
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: NearEnd(self._arrived), sock=listener)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def host(self) -> str:
        return self._route.host

    @property
    def description(self) -> str:
        return (
            f"{self.url} to port {self._remote_port} of {self.host}: "
            f"{self.state}, {self.reconnects} reconnects"
        )

    def __repr__(self) -> str:
        return f"Tunnel({self.description})"

    def retarget(self, route: SSHRoute, remote_port: int) -> None:
        """Lead to another port or machine from now on; the local port stays."""
        self._route, self._remote_port = route, remote_port
        self._keeping.cancel()
        self._drop_login()
        self._keeping = asyncio.create_task(self._keep())

    async def failed(self) -> ArtCloudError:
        """Wait until it leads nowhere for good, and return why."""
        while self.state in ("connected", "reconnecting"):
            await asyncio.wait([self._keeping])
        return self.last_error or ServerUnavailableError(f"The tunnel to {self.host} is closed.")

    async def close(self) -> None:
        """Stop listening, and reset the connections that are open."""
        self._server.close()
        tasks = [self._keeping, self._watching, *self._connections]
        for task in tasks:
            task.cancel()
        self._drop_login()
        self.state = "closed"
        await asyncio.gather(*tasks, *self._ending, return_exceptions=True)

    @staticmethod
    def _in_background(
        tasks: set[asyncio.Task[None]], coroutine: Coroutine[None, None, None]
    ) -> None:
        task = asyncio.create_task(coroutine)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _keep(self) -> None:
        """Log in again whenever the login ends, until that is of no use."""
        while True:
            if self._login is not None:
                reason = await self._login.lost()
                self.last_error = ServerUnavailableError(f"{self.host}: {reason}.")
                self._drop_login()
                say(f"{self.host}: {reason}. Logging in again; calls wait.")
            lost_at = time.monotonic()
            try:
                self._login = await self._log_in_again()
            except ArtCloudError as error:
                self.state, self.last_error = "failed", error
                say(f"The tunnel to {self.host} failed. {error}")
                self._settled.set()
                return
            self.reconnects += 1
            self.state = "connected"
            self._settled.set()
            say(f"{self.host}: connected again after {time.monotonic() - lost_at:.1f} s.")

    async def _log_in_again(self) -> Login:
        pause = FIRST_PAUSE
        while True:
            try:
                return await log_in(self._route)
            except ServerUnavailableError as error:
                self.last_error = error
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311
            pause = min(2 * pause, LONGEST_PAUSE)

    def _drop_login(self) -> None:
        self.state = "reconnecting"
        self._settled.clear()
        if self._login is not None:
            self._in_background(self._ending, self._login.close())
            self._login = None

    async def _watch(self) -> None:
        """Don't wait for keep-alives where it is plain that the login is lost."""
        skew = time.time() - time.monotonic()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            before, skew = skew, time.time() - time.monotonic()
            if self._login is None:
                continue
            if skew - before > SLEPT_SECONDS or not _is_ours(self._login.address):
                await self._login.close()

    def _arrived(self, near: NearEnd) -> None:
        self._in_background(self._connections, self._serve(near))

    async def _serve(self, near: NearEnd) -> None:
        """Give the client its connection until that ends, or the reason why there is none."""
        here, there = socket.socketpair()
        try:
            try:
                async with asyncio.timeout(self._wait):
                    login, control = await self._connect(near.socket, there)
            finally:
                there.close()
            with control:
                await self._relay(near, here, login, control)
        except ArtCloudError as error:
            near.refuse(self.host, error)
        except TimeoutError:
            near.refuse(
                self.host,
                ServerUnavailableError(
                    f"No connection to {self.host} for {self._wait:g} s. {self.last_error or ''}"
                ),
            )
        except BaseException:
            near.reset()
            raise
        finally:
            here.close()

    async def _connect(
        self, source: socket.socket, sink: socket.socket
    ) -> tuple[Login, socket.socket]:
        while True:
            await self._settled.wait()
            if self._login is None:
                assert self.last_error is not None
                raise self.last_error
            login = self._login
            try:
                return login, await login.connect(self._remote_port, source, sink)
            except LinkLostError:
                if self._login is login:
                    self._drop_login()

    async def _relay(
        self, near: NearEnd, here: socket.socket, login: Login, control: socket.socket
    ) -> None:
        loop = asyncio.get_running_loop()
        transport, far = await loop.create_connection(lambda: FarEnd(near), sock=here)
        try:
            await far.ended
            if not await login.is_alive():
                near.reset()
                return
            near.write_eof()
            if not near.gone:
                await loop.sock_recv(control, 1)  # until the client has ended it too
            near.transport.close()
        finally:
            transport.close()


def _is_ours(address: str | None) -> bool:
    """Whether this machine still has an address; None is one that is not known."""
    if address is None:
        return True
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
