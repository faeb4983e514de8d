"""Calls to the server: retried while it can't be reached, with its errors raised as our classes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import NamedTuple, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from ..shared.errors import (
    BY_CODE,
    ArtCloudError,
    AuthError,
    ConfigError,
    InvalidRequestError,
    ServerError,
    ServerStoppingError,
    ServerUnavailableError,
)
from ..shared.names import ModelName
from ..shared.progress import say
from ..shared.protocol import AFTER, CALL_ID, VERSION, ErrorBody, JobEvent
from ..shared.validation import check_url, complaint, is_loopback
from ..shared.version import __version__

B = TypeVar("B", bound=BaseModel)

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0  # seconds between two tries
TIMEOUT = httpx.Timeout(60.0, connect=10.0, pool=None)
GATEWAY_STATUSES = {502, 503, 504}
NOT_DELIVERED = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class Address(NamedTuple):
    """The URL and the token of one server. Neither is ever used with that of another server."""

    url: str
    token: str


class _ErrorReply(BaseModel):
    error: ErrorBody


class Patience:
    """How long a server may stay out of reach, counted from its last sign of life."""

    def __init__(self, what: str, seconds: float) -> None:
        self.what = what
        self.seconds = seconds
        self.heard()

    def heard(self) -> None:
        self._since: float | None = None
        self._pause = FIRST_PAUSE
        self._said = ""

    async def wait(self, error: Exception) -> None:
        """Say what is wrong and pause before the next try.

        Raises:
            ServerUnavailableError: the time is up.
        """
        reason = str(error) or type(error).__name__
        now = time.monotonic()
        if self._since is None:
            self._since = now
        left = self._since + self.seconds - now
        if left <= 0:
            raise ServerUnavailableError(
                f"{self.what}: no answer for {self.seconds:g} s ({reason}). See whether the server "
                "is up: art-cloud status. Work that reached it goes on there."
            ) from error
        if reason != self._said:
            say(f"{self.what}: {reason.rstrip('.')}. Trying again for {left:.0f} s.")
            self._said = reason
        await asyncio.sleep(min(self._pause, left))
        self._pause = min(2 * self._pause, LONGEST_PAUSE)


Recover = Callable[[], Awaitable[bool]]
"""A callback for when the server can't be reached: True if there is a server again. It raises if
there won't be one."""


class ServerClient:
    """Calls to the routes under `/art/v1` of one server."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        patience: float,
        headers: Mapping[str, str] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        recover: Recover | None = None,
    ) -> None:
        check_url(url)
        if not (token.isascii() and token.isprintable()):
            raise ConfigError(
                "The token has characters that no request can carry. Was a line break copied with "
                "it? Give token.strip()."
            )
        self.patience = patience
        self.recover = recover
        self._client = httpx.AsyncClient(
            headers={**(headers or {}), VERSION: __version__},
            timeout=TIMEOUT,
            transport=transport,
            trust_env=not is_loopback(url),
        )
        self.move(Address(url, token))

    @property
    def url(self) -> str:
        return self.address.url

    def move(self, to: Address) -> None:
        """Send calls to another server from now on, those under way included."""
        self.address = Address(to.url.rstrip("/"), to.token)
        self._client.base_url = httpx.URL(f"{self.address.url}/art/v1/")

    def _authorized(self, token: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {token}"}

    async def call(
        self,
        method: str,
        path: str,
        content: BaseModel | bytes | None = None,
        *,
        call_id: str | None = None,
        after: str | None = None,
        repeatable: bool = True,
    ) -> bytes:
        """Make one request and return the body of the answer.

        A call that was not delivered is tried again; one that may have been, if `repeatable`.

        Raises:
            ServerUnavailableError: nobody answered for `patience` seconds.
            ConfigError: the connection was closed.
            ArtCloudError: what the server answered, as the class that it named.
        """
        self._check_open()
        body = content.model_dump_json().encode() if isinstance(content, BaseModel) else content
        headers = {name: id_ for name, id_ in ((CALL_ID, call_id), (AFTER, after)) if id_}
        patience = Patience(f"{method} {self.url}", self.patience)
        while True:
            token = self.address.token
            try:
                response = await self._client.request(
                    method, path, content=body, headers=headers | self._authorized(token)
                )
                if response.status_code == AuthError.status and token != self.address.token:
                    continue  # it waited for a server that has another one
                if (failure := failure_of(response)) is None:
                    return response.content
                raise failure
            except httpx.TransportError as error:
                if not repeatable and not isinstance(error, NOT_DELIVERED):
                    raise ServerUnavailableError(
                        f"{method} {self.url}: the connection broke before the answer ({error!r}). "
                        "It may have been carried out: look before you repeat it."
                    ) from error
                await self._wait(patience, error)
            except (ServerUnavailableError, ServerStoppingError) as error:
                if not repeatable:
                    raise
                await self._wait(patience, error)

    async def events(self, job: str) -> AsyncIterator[JobEvent]:
        """The events of a job from the first to the last, over as many connections as it takes.

        Raises:
            NotFoundError: the server does not know the job (any more).
            ServerUnavailableError: nobody answered for `patience` seconds.
        """
        from httpx_sse import aconnect_sse

        self._check_open()
        patience = Patience(f"Job {job} at {self.url}", self.patience)
        path, last = f"jobs/{job}/events", 0
        while True:
            connected_at, token = time.monotonic(), self.address.token
            try:
                headers = {"Last-Event-ID": str(last), **self._authorized(token)}
                async with aconnect_sse(self._client, "GET", path, headers=headers) as source:
                    if source.response.is_error:
                        await source.response.aread()
                    refused = source.response.status_code == AuthError.status
                    if refused and token != self.address.token:
                        continue
                    if (failure := failure_of(source.response)) is not None:
                        raise failure
                    async for message in source.aiter_sse():
                        if not message.data:  # a comment that keeps the connection alive
                            continue
                        event = _event(message.data)
                        last = event.number
                        patience.heard()
                        yield event
                        if event.type in ("done", "failed"):
                            return
                dropped: Exception = ServerUnavailableError("the events stopped before the end")
            except (httpx.TransportError, ServerUnavailableError, ServerStoppingError) as error:
                dropped = error
            if time.monotonic() - connected_at > LONGEST_PAUSE:
                patience.heard()
            await self._wait(patience, dropped)

    def _check_open(self) -> None:
        if self._client.is_closed:
            raise ConfigError(
                f"The connection to {self.url} was closed: its `async with` block has ended. Call "
                "it inside of the block, or connect again."
            )

    async def _wait(self, patience: Patience, error: Exception) -> None:
        if self.recover is not None and await self.recover():
            patience.heard()
        else:
            await patience.wait(error)

    async def close(self) -> None:
        await self._client.aclose()


def _event(data: str) -> JobEvent:
    try:
        return JobEvent.model_validate_json(data)
    except ValidationError as error:
        raise ServerError(
            f"The server sent an event that is none: {data[:120]!r}. Are client and server of the "
            "same version?"
        ) from error


def failure_of(response: httpx.Response) -> ArtCloudError | None:
    """The error that `response` (which was read already) stands for; None if it is a success."""
    if response.is_success:
        return None
    if response.status_code == AuthError.status and VERSION not in response.headers:
        return AuthError(
            f"{response.url.host} let this not through to a server. Modal's proxy asks for a proxy "
            "token of your workspace (docs/modal.md), others for headers= of their own."
        )
    if response.status_code == AuthError.status:
        return AuthError(
            "The server refused the token. Use the one of this cluster: art.connect(url, token)."
        )
    try:
        body = _ErrorReply.model_validate_json(response.content).error
    except ValidationError:
        return _foreign(response)
    return error_of(body, response.status_code)


def error_of(body: ErrorBody, status: int = 500) -> ArtCloudError:
    """The exception of the class that the server named."""
    fallback = ServerError if status >= 500 else InvalidRequestError
    return BY_CODE.get(body.code or "", fallback)(body.message)


def _foreign(response: httpx.Response) -> ServerError:
    """The error for an answer that did not come from art-server: a proxy's page, or another
    program's."""
    kind = response.headers.get("content-type", "no content type")
    start = " ".join(response.text.split())[:120]
    if response.status_code in GATEWAY_STATUSES:
        return ServerUnavailableError(
            f"{response.url.host}:{response.url.port} answered {response.status_code} with {kind}, "
            f"{start!r}: a proxy that finds no server behind it"
        )
    return ServerError(
        f"{response.url.host}:{response.url.port} answered {response.status_code} with {kind}, "
        f"which is not an art-server's answer: {start!r}. Is there a proxy in between, or another "
        "program at this port?"
    )


def path_of(name: ModelName) -> str:
    return f"models/{name}"


def parse(schema: type[B], content: bytes) -> B:
    """Parse the server's answer as `schema`.

    Raises:
        ServerError: it is something else.
    """
    try:
        return schema.model_validate_json(content)
    except ValidationError as error:
        raise ServerError(
            f"The server's answer is not a {schema.__name__}: {complaint(error)}. Is this the "
            "address of an art-server?"
        ) from error
