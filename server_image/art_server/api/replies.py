"""Answers and errors of all routes, and how request bodies are read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from art_cloud.shared.errors import (
    ArtCloudError,
    InvalidRequestError,
    NotFoundError,
    RequestTooLargeError,
)
from art_cloud.shared.protocol import ErrorBody
from art_cloud.shared.validation import complaint

log = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")
Body = bytes | bytearray

CLIENT_CLOSED_REQUEST = 499
"""The status that nginx logs when the client has gone: nobody reads the answer."""
TYPES = {401: "authentication_error", 404: "not_found_error"}


JSON_SHARE = 4
"""The limit for a JSON body is that of a batch divided by this: once read, JSON takes several times
its size."""
SMALL = 64 << 10
"""A body of up to so many bytes of JSON is read on the event loop: it takes a millisecond or
two."""


async def read_body(request: Request, most: int) -> bytearray:
    """Return the body in one piece without copying it. Raises `RequestTooLargeError` beyond
    `most`."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise RequestTooLargeError(
                f"{request.url.path} takes bodies of {most / 2**20:,.1f} MiB at most. Nothing was "
                "done. Send less in one call, or start the server with a higher --max-body."
            )
    return body


async def aside(content: Body, read: Callable[[Body], T]) -> T:
    """Return `read(content)` without making other requests wait for it."""
    if len(content) <= SMALL:
        return read(content)
    return await asyncio.to_thread(read, content)


def parse_json(body: Body) -> dict[str, Any]:
    """Parse a JSON object. Raises `InvalidRequestError` for what is none, is nested too deep (about
    200 levels) or holds half of a surrogate pair, which is no text."""
    try:
        parsed = from_json(body)
    except ValueError as error:
        raise InvalidRequestError(f"The body is not JSON: {error}.") from None
    if not isinstance(parsed, dict):
        raise InvalidRequestError("The body is JSON, but not an object.")
    return parsed


def parse(schema: type[M], body: Body) -> M:
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        raise InvalidRequestError(f"{complaint(error)}.") from None


def answer(content: BaseModel, status: int = HTTPStatus.OK) -> Response:
    return Response(content.model_dump_json(), status, media_type="application/json")


def error_body(error: ArtCloudError) -> ErrorBody:
    kind = TYPES.get(
        error.status, "invalid_request_error" if error.status < 500 else "server_error"
    )
    return ErrorBody(message=str(error), type=kind, code=error.code)


def error_response(error: ArtCloudError) -> JSONResponse:
    return JSONResponse({"error": error_body(error).model_dump()}, error.status)


async def on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ArtCloudError)
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == HTTPStatus.NOT_FOUND:
        return error_response(NotFoundError(f"There is no route {request.url.path}."))
    body = ErrorBody(message=f"{request.method} {request.url.path}: {error.detail}.")
    return JSONResponse({"error": body.model_dump()}, error.status_code)


async def on_disconnect(request: Request, error: Exception) -> Response:
    log.info("a client went away in the middle of its request: %s", request.url.path)
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def on_bug(request: Request, error: Exception) -> Response:
    log.error("%s %s", request.method, request.url.path, exc_info=error)
    return error_response(
        ArtCloudError(
            f"The server failed on {request.method} {request.url.path} "
            f"({type(error).__name__}). Its log says more (`art-cloud logs`)."
        )
    )
