"""The HTTP client under `openai_client()`: a request waits for its server instead of failing.

A completion has no effect but its answer, so one whose connection broke is sent again, once the
server is back or another has taken its place, at whatever address that has then.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import openai

from ..links.relay import REFUSED
from ..shared.errors import ConfigError
from ..shared.protocol import VERSION
from .http import GATEWAY_STATUSES, Address

_httpx: Any = sys.modules[type(openai.DEFAULT_CONNECTION_LIMITS).__module__.partition(".")[0]]
"""The httpx module that the installed openai package is built on."""

BROKEN = (_httpx.NetworkError, _httpx.RemoteProtocolError, _httpx.ConnectTimeout)
NOT_FOUND = 404
"""The status of a server that was started again and has not been told of the model yet."""
REPEATS = 5
"""How often a request is sent again after its connection broke: it may be what ends the server."""

UNAUTHORIZED = 401
"""The status of a server that took the place of another, for a request that still has the other's
token."""

Back = Callable[[], Awaitable[Address]]
"""A callback that waits until the server answers, and returns its address and token. It raises if
no server comes back."""


def http_client(
    back: Back | None, *, timeout: float, trust_env: bool
) -> openai.DefaultAsyncHttpxClient:
    """Args:
    back: None: a request whose connection broke fails.
    timeout: seconds.
    """
    limits = _httpx.Limits(max_connections=None, max_keepalive_connections=256)
    options = {"limits": limits, "timeout": timeout, "trust_env": trust_env}
    return openai.DefaultAsyncHttpxClient(**options) if back is None else Patient(back, **options)


class Patient(openai.DefaultAsyncHttpxClient):
    def __init__(self, back: Back, **options: Any) -> None:
        super().__init__(**options)
        self._back = back

    async def send(self, request: Any, **options: Any) -> Any:
        if self.is_closed:
            raise ConfigError(
                "The backend that this client belongs to was closed, at the end of its `async "
                "with` block or by close(). Open one, register the model with it, and ask "
                "model.openai_client() for a client again."
            )
        for repeat in range(REPEATS + 1):
            try:
                response = await super().send(request, **options)
            except BROKEN:
                if repeat == REPEATS:
                    raise
            else:
                forgotten = response.status_code in (NOT_FOUND, UNAUTHORIZED) and repeat == 0
                if repeat == REPEATS or not (_undelivered(response) or forgotten):
                    if options.get("stream"):
                        response.stream = _Stream(response.stream, request)
                    return response
                await response.aclose()
            url, token = await self._back()
            now = _httpx.URL(url)
            request.url = request.url.copy_with(host=now.host, port=now.port)
            request.headers["Host"] = now.netloc.decode()
            request.headers["Authorization"] = f"Bearer {token}"
        raise AssertionError


def _undelivered(response: Any) -> bool:
    """Whether a tunnel or a proxy answered, so that the server never got the request."""
    proxied = response.status_code in GATEWAY_STATUSES and VERSION not in response.headers
    return REFUSED in response.headers or proxied


class _Stream(_httpx.AsyncByteStream):  # type: ignore[misc]
    """The body of an answer while it is streamed. Its request is not repeated: the caller has read
    a part already."""

    def __init__(self, stream: Any, request: Any) -> None:
        self._stream = stream
        self._request = request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._stream:
                yield chunk
        except BROKEN as error:
            raise openai.APIConnectionError(
                message=f"The connection broke in the middle of an answer ({error!r}). What came "
                "before is not the whole of it: repeat the request.",
                request=self._request,
            ) from error

    async def aclose(self) -> None:
        await self._stream.aclose()
