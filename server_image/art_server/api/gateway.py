"""The OpenAI routes: the server's own, and those of every recorded session."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing, nullcontext
from datetime import UTC, datetime
from functools import partial
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from art_cloud.shared.errors import ArtCloudError, InvalidRequestError
from art_cloud.shared.protocol import POLICY
from art_cloud.shared.wire import check_values

from ..inference import Route as InferenceRoute
from ..inference import is_masked
from ..steps.compute import Compute
from ..steps.policies import Policies
from .replies import CLIENT_CLOSED_REQUEST, JSON_SHARE, aside, error_body, parse_json, read_body
from .sessions import Session, Sessions

log = logging.getLogger(__name__)

OPENAI_BYTES = 16 << 20
"""The largest body of a request to the OpenAI routes in bytes: some millions of tokens."""
SMALL_ANSWER = 4096
"""An answer of up to so many tokens, those of its prompt included, is turned into JSON on the event
loop; a longer one in a thread."""


class Gateway:
    """Turns a request's name into a policy, lets the engine answer, and records for sessions.

    In a session every name means the session's model: agents have names of their own written into
    them.
    """

    def __init__(
        self, compute: Compute, policies: Policies, sessions: Sessions, max_bytes: int
    ) -> None:
        self.max_bytes = max_bytes
        self.compute = compute
        self.policies = policies
        self.sessions = sessions
        self.started_at = datetime.now(UTC)

    def routes(self) -> list[Route]:
        """The OpenAI routes. They belong to a session where the path in front of them has a
        `session`."""
        return [
            Route("/models", self.list_models),
            Route("/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/completions", self.completions, methods=["POST"]),
        ]

    async def list_models(self, request: Request) -> Response:
        session = self._session(request)
        names = [session.model] if session else self.policies.names()
        created = int(self.started_at.timestamp())
        return JSONResponse(
            {
                "object": "list",
                "data": [
                    {"id": name, "object": "model", "created": created, "owned_by": "art-cloud"}
                    for name in names
                ],
            }
        )

    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, "chat/completions")

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, "completions")

    def _session(self, request: Request) -> Session | None:
        id_ = request.path_params.get("session")
        return None if id_ is None else self.sessions.get(id_)

    async def _generate(self, request: Request, route: InferenceRoute) -> Response:
        sent = await read_body(request, min(OPENAI_BYTES, self.max_bytes // JSON_SHARE))
        await aside(sent, partial(check_values, most=self.max_bytes))
        body = await aside(sent, parse_json)
        session = self._session(request)
        if session is not None:
            body["model"] = session.model
        if not isinstance(body.get("model"), str):
            raise InvalidRequestError(
                "The request names no model: set 'model' to one of "
                f"{', '.join(self.policies.names()) or '(none is registered yet)'}."
            )
        chunks = self._chunks(route, body, session)
        if body.get("stream"):
            return await _stream(request, chunks)
        async with aclosing(chunks):
            answer = await _unless_disconnected(request, anext(chunks))
            await anext(chunks, None)
        headers = {POLICY: answer["model"]}
        if answer["usage"]["total_tokens"] <= SMALL_ANSWER:
            return JSONResponse(answer, headers=headers)
        return await asyncio.to_thread(JSONResponse, answer, headers=headers)

    async def _chunks(
        self, route: InferenceRoute, body: dict[str, Any], session: Session | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The engine's chunks, or its whole answer as the only one, marked and recorded."""
        masked = is_masked(body)
        with session.request(route, body) if session else nullcontext() as recorded:
            async with (
                self.policies.asked_for(body["model"]) as policy,
                aclosing(self._answer(route, body, policy)) as answer,
            ):
                async for chunk in answer:
                    for choice in chunk["choices"]:
                        if masked and "sample" in choice:
                            choice["sample"]["masked"] = True
                        if recorded is not None:
                            recorded.add(choice)
                    yield chunk

    async def _answer(
        self, route: InferenceRoute, body: dict[str, Any], policy: str | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        if not body.get("stream"):
            yield await self.compute.engine.create(route, body, policy)
            return
        async with aclosing(self.compute.engine.stream(route, body, policy)) as stream:
            async for chunk in stream:
                yield chunk


async def _stream(
    request: Request, chunks: AsyncGenerator[dict[str, Any], None]
) -> StreamingResponse:
    """Stream the chunks. Errors before the first chunk are answered with their status, later ones
    as an event."""
    first = await _unless_disconnected(request, anext(chunks))

    async def lines() -> AsyncIterator[bytes]:
        try:
            yield _data_line(first)
            async for chunk in chunks:
                yield _data_line(chunk)
        except ArtCloudError as error:
            yield _data_line({"error": error_body(error).model_dump()})
        finally:
            await chunks.aclose()
        yield b"data: [DONE]\n\n"

    return StreamingResponse(
        lines(), media_type="text/event-stream", headers={POLICY: first["model"]}
    )


async def _unless_disconnected(request: Request, work: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """Await `work`; cancel it when the client goes away."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            log.info("a client went away; its request is cancelled")
            raise HTTPException(CLIENT_CLOSED_REQUEST, "the client closed the connection")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.wait([task])


def _data_line(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode()
