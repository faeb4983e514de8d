"""The routes. Every one needs the cluster's token; every error has OpenAI's shape."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, TypeVar
from uuid import UUID, uuid4

from pydantic import BaseModel, TypeAdapter, ValidationError
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from art_cloud._version import __version__
from art_cloud.checkpoints import Checkpoints
from art_cloud.errors import (
    ArtCloudError,
    AuthError,
    InvalidRequestError,
    NotFoundError,
    RequestTooLargeError,
)
from art_cloud.names import ModelName
from art_cloud.protocol import (
    CALL_ID,
    POLICY,
    PROTOCOL,
    VERSION,
    CheckpointInfo,
    ErrorBody,
    ForkRequest,
    JobKind,
    LogRequest,
    RegisterRequest,
    ServerInfo,
    SFTRequest,
)

from .inference import Route as InferenceRoute
from .jobs import Jobs
from .runtime import Runtime
from .trajectory_log import write_trajectories

log = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)


class Routes:
    def __init__(self, runtime: Runtime, jobs: Jobs, touch: Callable[[], None]) -> None:
        self.runtime = runtime
        self.jobs = jobs
        self.touch = touch
        self.started_at = datetime.now(UTC)

    def openai(self) -> list[Route]:
        return [
            Route("/models", self.list_models),
            Route("/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/completions", self.completions, methods=["POST"]),
        ]

    def art(self) -> list[Route]:
        model = "/models/{project}/{model}"
        return [
            Route("/server", self.server),
            Route(model, self.register, methods=["PUT"]),
            Route(model, self.model),
            Route(f"{model}/train", self.train, methods=["POST"]),
            Route(f"{model}/sft", self.sft, methods=["POST"]),
            Route(f"{model}/log", self.log, methods=["POST"]),
            Route(f"{model}/checkpoints", self.checkpoints),
            Route(f"{model}/checkpoints/{{step:int}}", self.delete_checkpoint, methods=["DELETE"]),
            Route(f"{model}/fork", self.fork, methods=["POST"]),
            Route("/jobs/{id}", self.job),
            Route("/jobs/{id}/events", self.job_events),
        ]

    async def list_models(self, request: Request) -> Response:
        created = int(self.started_at.timestamp())
        return JSONResponse(
            {
                "object": "list",
                "data": [
                    {"id": name, "object": "model", "created": created, "owned_by": "art-cloud"}
                    for name in self.runtime.names()
                ],
            }
        )

    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, "chat/completions")

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, "completions")

    async def _generate(self, request: Request, route: InferenceRoute) -> Response:
        body = _json(await request.body())
        requested = body.get("model")
        if not isinstance(requested, str):
            raise InvalidRequestError(
                "The request names no model: set 'model' to one of "
                f"{', '.join(self.runtime.names()) or '(none is registered yet)'}."
            )
        if body.get("stream"):
            return await self._stream(request, route, body, requested)
        async with self.runtime.policy(requested) as policy:
            answer = await _unless_disconnected(
                request, self.runtime.engine.create(route, body, policy)
            )
        return JSONResponse(answer, headers={POLICY: answer["model"]})

    async def _stream(
        self, request: Request, route: InferenceRoute, body: dict[str, Any], requested: str
    ) -> Response:
        """Errors before the first chunk are answered with their status, later ones as an event."""

        async def chunks() -> AsyncGenerator[dict[str, Any], None]:
            async with (
                self.runtime.policy(requested) as policy,
                aclosing(self.runtime.engine.stream(route, body, policy)) as stream,
            ):
                async for chunk in stream:
                    yield chunk

        stream = chunks()
        first = await _unless_disconnected(request, anext(stream))

        async def lines() -> AsyncIterator[bytes]:
            try:
                yield _data_line(first)
                async for chunk in stream:
                    yield _data_line(chunk)
            except ArtCloudError as error:
                yield _data_line({"error": _error_body(error).model_dump()})
            finally:
                await stream.aclose()
            yield b"data: [DONE]\n\n"

        return StreamingResponse(
            lines(), media_type="text/event-stream", headers={POLICY: first["model"]}
        )

    async def server(self, request: Request) -> Response:
        runtime, stats = self.runtime, self.runtime.stats()
        current = self.jobs.current
        return _answer(
            ServerInfo(
                version=__version__,
                protocol=PROTOCOL,
                base_model=runtime.base_name,
                engine=runtime.settings.engine,
                device=runtime.device,
                store=runtime.store.url,
                policies=runtime.policies,
                jobs_queued=self.jobs.queued,
                requests_running=stats.running,
                requests_waiting=stats.waiting,
                training=f"{current.kind} of {current.project}/{current.model}"
                if current
                else None,
                started_at=self.started_at,
            )
        )

    async def register(self, request: Request) -> Response:
        return await self._submit(request, "register", RegisterRequest)

    async def train(self, request: Request) -> Response:
        return await self._submit(request, "train")

    async def sft(self, request: Request) -> Response:
        return await self._submit(request, "sft", SFTRequest)

    async def _submit(
        self, request: Request, kind: JobKind, schema: type[BaseModel] | None = None
    ) -> Response:
        body = await request.body()
        if schema is not None:
            _parse(schema, body)
        info = await self.jobs.submit(_call_id(request), kind, _name(request), body)
        return _answer(info, HTTPStatus.ACCEPTED)

    async def model(self, request: Request) -> Response:
        return _answer(self.runtime.info(_name(request)))

    async def log(self, request: Request) -> Response:
        entry = _parse(LogRequest, await request.body())
        checkpoints = self._steps(request)

        def write() -> None:
            checkpoints.read(entry.step)
            write_trajectories(checkpoints, entry)
            checkpoints.log(entry.split, entry.step, entry.metrics)

        await asyncio.to_thread(write)
        return JSONResponse({})

    async def checkpoints(self, request: Request) -> Response:
        infos = await asyncio.to_thread(self._steps(request).infos)
        return Response(
            TypeAdapter(list[CheckpointInfo]).dump_json(infos), media_type="application/json"
        )

    async def delete_checkpoint(self, request: Request) -> Response:
        step = request.path_params["step"]
        await asyncio.to_thread(self._steps(request).delete, step)
        await self.runtime.unload(str(_name(request).at(step)))
        return JSONResponse({})

    async def fork(self, request: Request) -> Response:
        wanted = _parse(ForkRequest, await request.body())
        to = ModelName(wanted.to_project, wanted.to_model)
        await asyncio.to_thread(self._steps(request).fork, to, wanted.step)
        infos = await asyncio.to_thread(self.runtime.checkpoints(to).infos)
        return _answer(infos[-1], HTTPStatus.CREATED)

    async def job(self, request: Request) -> Response:
        return _answer(self.jobs.journal.get(request.path_params["id"]))

    async def job_events(self, request: Request) -> Response:
        job, after = request.path_params["id"], request.headers.get("last-event-id", "0")
        if not re.fullmatch("[0-9]{1,9}", after):
            raise InvalidRequestError(
                f"Last-Event-ID is {after!r}, which is not an event's number."
            )
        self.jobs.journal.get(job)

        async def events() -> AsyncIterator[ServerSentEvent]:
            async for event in self.jobs.follow(job, int(after)):
                self.touch()
                yield ServerSentEvent(
                    event.model_dump_json(), id=str(event.number), event=event.type
                )

        return EventSourceResponse(events(), ping=15)

    def _steps(self, request: Request) -> Checkpoints:
        return self.runtime.checkpoints(_name(request))


def make_app(
    runtime: Runtime,
    jobs: Jobs,
    *,
    token: str,
    max_bytes: int,
    touch: Callable[[], None] = lambda: None,
) -> ASGIApp:
    routes = Routes(runtime, jobs, touch)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        jobs.start()
        yield

    app = Starlette(
        routes=[Mount("/v1", routes=routes.openai()), Mount("/art/v1", routes=routes.art())],
        exception_handlers={
            ArtCloudError: _on_error,
            HTTPException: _on_http_exception,
            Exception: _on_bug,
        },
        lifespan=lifespan,
    )
    return Gate(app, token, max_bytes, touch)


class Gate:
    """ASGI middleware: the token, the size of a body, the server's version on every answer."""

    def __init__(self, app: ASGIApp, token: str, max_bytes: int, touch: Callable[[], None]) -> None:
        self.app = app
        self.expected = f"Bearer {token}".encode()
        self.max_bytes = max_bytes
        self.touch = touch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])
        received = 0

        async def send_stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"].append((VERSION.lower().encode(), __version__.encode()))
            await send(message)

        async def receive_limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_bytes:
                raise self._too_large()
            return message

        try:
            if not hmac.compare_digest(headers.get(b"authorization", b""), self.expected):
                raise AuthError("Incorrect API key provided: this server needs its own token.")
            if int(headers.get(b"content-length", b"0")) > self.max_bytes:
                raise self._too_large()
        except ArtCloudError as error:
            return await _error_response(error)(scope, receive, send_stamped)
        self.touch()
        await self.app(scope, receive_limited, send_stamped)

    def _too_large(self) -> RequestTooLargeError:
        return RequestTooLargeError(
            f"The body is over this server's limit of {self.max_bytes / 2**20:,.0f} MiB. Nothing "
            "was done. Send fewer trajectories in one call, or start the server with a higher "
            "--max-body."
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
            raise HTTPException(499, "the client closed the connection")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


def _name(request: Request) -> ModelName:
    return ModelName(request.path_params["project"], request.path_params["model"])


def _call_id(request: Request) -> str:
    call = request.headers.get(CALL_ID, uuid4().hex)
    try:
        return UUID(call).hex
    except ValueError:
        raise InvalidRequestError(f"{CALL_ID} is {call[:80]!r}, which is not a UUID.") from None


def _json(body: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"The body is not JSON: {error}.") from None
    if not isinstance(parsed, dict):
        raise InvalidRequestError("The body is JSON, but not an object.")
    return parsed


def _parse(schema: type[M], body: bytes) -> M:
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise InvalidRequestError(f"{where}: {first['msg']}.") from None


def _answer(content: BaseModel, status: int = HTTPStatus.OK) -> Response:
    return Response(content.model_dump_json(), status, media_type="application/json")


def _data_line(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode()


TYPES = {401: "authentication_error", 404: "not_found_error"}


def _error_body(error: ArtCloudError) -> ErrorBody:
    kind = TYPES.get(
        error.status, "invalid_request_error" if error.status < 500 else "server_error"
    )
    return ErrorBody(message=str(error), type=kind, code=error.code)


def _error_response(error: ArtCloudError) -> JSONResponse:
    return JSONResponse({"error": _error_body(error).model_dump()}, error.status)


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ArtCloudError)
    return _error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == HTTPStatus.NOT_FOUND:
        return _error_response(NotFoundError(f"There is no route {request.url.path}."))
    body = ErrorBody(message=f"{request.method} {request.url.path}: {error.detail}.")
    return JSONResponse({"error": body.model_dump()}, error.status_code)


async def _on_bug(request: Request, error: Exception) -> Response:
    log.error("%s %s", request.method, request.url.path, exc_info=error)
    return _error_response(
        ArtCloudError(
            f"The server failed on {request.method} {request.url.path} "
            f"({type(error).__name__}). Its log says more (`art-cloud logs`)."
        )
    )
