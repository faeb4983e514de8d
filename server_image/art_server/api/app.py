"""The routes. Every one needs the cluster's token; every error has OpenAI's shape."""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from uuid import UUID, uuid4

from pydantic import BaseModel, TypeAdapter
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from art_cloud.shared.errors import (
    ArtCloudError,
    AuthError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    RequestTooLargeError,
)
from art_cloud.shared.names import STEP, ModelName, PolicyName
from art_cloud.shared.protocol import (
    AFTER,
    CALL_ID,
    PROTOCOL,
    VERSION,
    CheckpointInfo,
    ForkRequest,
    JobKind,
    LogRequest,
    ModelInfo,
    PruneRequest,
    RegisterRequest,
    ServerInfo,
    SessionInfo,
    SessionRequest,
    SFTRequest,
    StoreCredentials,
)
from art_cloud.shared.version import __version__
from art_cloud.shared.wire import check_values
from art_cloud.store.checkpoints import Checkpoints
from art_cloud.store.retention import prune

from ..lifetime import Guardian
from ..steps.jobs import Jobs
from ..steps.runtime import Runtime
from ..steps.trajectory_log import write_logged
from .doors import ADMIT
from .gateway import Gateway
from .replies import (
    JSON_SHARE,
    M,
    answer,
    aside,
    error_response,
    on_bug,
    on_disconnect,
    on_error,
    on_http_exception,
    parse,
    read_body,
)
from .sessions import PATH as SESSIONS
from .sessions import Sessions

LOOKING = "/art/v1/server"
"""The route of `status`. A request to it is no use of the server: it renews no limit."""
ART = "/art/v1/"
HARMLESS = ("/art/v1/lease", "/art/v1/credentials")
"""Routes that a read-only server answers too, though they are no GET."""


class Routes:
    """The routes under `/art/v1`."""

    def __init__(
        self, runtime: Runtime, jobs: Jobs, sessions: Sessions, guardian: Guardian
    ) -> None:
        self.runtime = runtime
        self.max_bytes = runtime.settings.max_bytes
        self.compute = runtime.compute
        self.models = runtime.models
        self.policies = runtime.policies
        self.jobs = jobs
        self.sessions = sessions
        self.guardian = guardian
        self.started_at = datetime.now(UTC)
        self.made_before = jobs.journal.totals()

    def art(self) -> list[Route]:
        model = "/models/{project}/{model}"
        return [
            Route("/server", self.server),
            Route("/lease", self.server, methods=["POST"]),
            Route("/credentials", self.credentials, methods=["PUT"]),
            Route(model, self.register, methods=["PUT"]),
            Route(model, self.model),
            Route(f"{model}/train", self.train, methods=["POST"]),
            Route(f"{model}/sft", self.sft, methods=["POST"]),
            Route(f"{model}/log", self.log, methods=["POST"]),
            Route(f"{model}/checkpoints", self.checkpoints),
            Route(f"{model}/checkpoints/{{step}}", self.delete_checkpoint, methods=["DELETE"]),
            Route(f"{model}/history", self.history),
            Route(f"{model}/prune", self.prune, methods=["POST"]),
            Route(f"{model}/fork", self.fork, methods=["POST"]),
            Route("/sessions", self.open_session, methods=["POST"]),
            Route("/sessions/{id}/close", self.close_session, methods=["POST"]),
            Route("/sessions/{id}", self.delete_session, methods=["DELETE"]),
            Route("/jobs/{id}", self.job),
            Route("/jobs/{id}/events", self.job_events),
        ]

    async def server(self, request: Request) -> Response:
        compute, stats, store = self.compute, self.compute.stats(), self.runtime.store
        current = self.jobs.current
        made = self.jobs.journal.totals()
        before = self.made_before
        return answer(
            ServerInfo(
                version=__version__,
                protocol=PROTOCOL,
                base_model=compute.base_name,
                engine=self.runtime.settings.engine,
                device=compute.device,
                store=store.url,
                single_writer=store.single_writer,
                credentials_until=store.credentials_until,
                policies=self.policies.loaded(),
                not_durable=self.models.not_durable(),
                jobs_queued=self.jobs.queued,
                requests_running=stats.running,
                requests_waiting=stats.waiting,
                training=f"{current.kind} of {current.project}/{current.model}"
                if current
                else None,
                started_at=self.started_at,
                loading_seconds=compute.loading_seconds,
                clocks=self.guardian.clocks(),
                warnings=self.guardian.warnings,
                steps_made=made.steps - before.steps,
                tokens_trained=made.tokens - before.tokens,
                tokens_sampled=stats.tokens_generated,
            )
        )

    async def credentials(self, request: Request) -> Response:
        given = await self._read(StoreCredentials, request)
        await asyncio.to_thread(self.runtime.store.renew, given.variables)
        return JSONResponse({})

    async def register(self, request: Request) -> Response:
        return await self._submit(request, "register", RegisterRequest)

    async def train(self, request: Request) -> Response:
        return await self._submit(request, "train")

    async def sft(self, request: Request) -> Response:
        return await self._submit(request, "sft", SFTRequest)

    async def _submit(
        self, request: Request, kind: JobKind, schema: type[BaseModel] | None = None
    ) -> Response:
        if schema is None:
            body = await read_body(request, self.max_bytes)
        else:
            body = await self._json(request)
            await aside(body, partial(parse, schema))
        call, name = _call_id(request), _name(request)
        if kind != "register" and not await self.jobs.ask(self.jobs.journal.knows, call):
            self.models.newest(name)
            before = request.headers.get(AFTER)
            if before is not None and not await self.jobs.ask(self.jobs.journal.knows, before):
                raise NotFoundError(
                    f"This server does not know the call {before[:80]!r}, which came before this "
                    f"one. Register {name} again, so that it is handed what it lacks."
                )
        info = await self.jobs.submit(call, kind, name, body)
        return answer(info, HTTPStatus.ACCEPTED)

    async def _json(self, request: Request) -> bytearray:
        body = await read_body(request, self.max_bytes // JSON_SHARE)
        await aside(body, partial(check_values, most=self.max_bytes))
        return body

    async def _read(self, schema: type[M], request: Request) -> M:
        return await aside(await self._json(request), partial(parse, schema))

    async def model(self, request: Request) -> Response:
        name = _name(request)
        await self.models.until_known(name)
        newest = self.models.newest(name)
        return answer(
            ModelInfo(
                project=name.project,
                model=name.model,
                base_model=newest.base_model,
                step=newest.step,
                policy=newest.policy,
                context_length=self.compute.base.context_length,
            )
        )

    async def log(self, request: Request) -> Response:
        entry = await self._read(LogRequest, request)
        checkpoints = self._steps(request)
        await self.models.until_durable(checkpoints.name)
        base = self.compute.base if self.compute.base_name else None

        def write() -> None:
            checkpoints.read(entry.step)
            write_logged(checkpoints, entry, base)
            checkpoints.log(entry.split, entry.step, entry.metrics)

        await asyncio.to_thread(write)
        return JSONResponse({})

    async def checkpoints(self, request: Request) -> Response:
        steps = self._steps(request)
        return await asyncio.to_thread(lambda: _infos(steps.infos()))

    async def history(self, request: Request) -> Response:
        steps = self._steps(request)
        return await asyncio.to_thread(lambda: JSONResponse(steps.history()))

    async def prune(self, request: Request) -> Response:
        wanted = await self._read(PruneRequest, request)
        in_use = self.policies.steps_in_use(_name(request))
        steps, dry_run = self._steps(request), wanted.dry_run
        return _infos(
            await asyncio.to_thread(prune, steps, wanted.retention, keep=in_use, dry_run=dry_run)
        )

    async def delete_checkpoint(self, request: Request) -> Response:
        step = _step(request)
        await asyncio.to_thread(self._steps(request).delete, step)
        await self.policies.unload(str(_name(request).at(step)))
        return JSONResponse({})

    async def fork(self, request: Request) -> Response:
        wanted = await self._read(ForkRequest, request)
        to = ModelName(wanted.to_project, wanted.to_model)
        await self.models.until_durable(_name(request))
        await asyncio.to_thread(self._steps(request).fork, to, wanted.step)
        infos = await asyncio.to_thread(self.models.checkpoints(to).infos)
        return answer(infos[-1], HTTPStatus.CREATED)

    async def open_session(self, request: Request) -> Response:
        model = (await self._read(SessionRequest, request)).model
        self.models.newest(
            PolicyName.parse(model).model if "@" in model else ModelName.parse(model)
        )
        session = self.sessions.create(model)
        return answer(SessionInfo(id=session.id, key=session.key), HTTPStatus.CREATED)

    async def close_session(self, request: Request) -> Response:
        session = self.sessions.get(request.path_params["id"])
        return await asyncio.to_thread(lambda: answer(session.close()))

    async def delete_session(self, request: Request) -> Response:
        self.sessions.delete(request.path_params["id"])
        return JSONResponse({})

    async def job(self, request: Request) -> Response:
        return answer(await self.jobs.ask(self.jobs.journal.get, request.path_params["id"]))

    async def job_events(self, request: Request) -> Response:
        job, after = request.path_params["id"], request.headers.get("last-event-id", "0")
        if not re.fullmatch("[0-9]{1,9}", after):
            raise InvalidRequestError(
                f"Last-Event-ID is {after!r}, which is not an event's number."
            )
        await self.jobs.ask(self.jobs.journal.get, job)

        async def events() -> AsyncIterator[ServerSentEvent]:
            async for event in self.jobs.follow(job, int(after)):
                yield ServerSentEvent(
                    event.model_dump_json(), id=str(event.number), event=event.type
                )

        return EventSourceResponse(events(), ping=15)

    def _steps(self, request: Request) -> Checkpoints:
        return self.models.checkpoints(_name(request))


def make_app(runtime: Runtime, jobs: Jobs, guardian: Guardian, *, token: str) -> ASGIApp:
    sessions, settings = Sessions(), runtime.settings
    gateway = Gateway(runtime.compute, runtime.policies, sessions, settings.max_bytes)
    routes = Routes(runtime, jobs, sessions, guardian)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        jobs.start(runtime.programs.run)
        yield

    app = Starlette(
        routes=[
            Mount("/v1", routes=gateway.routes()),
            Mount(f"{SESSIONS}{{session}}/v1", routes=gateway.routes()),
            Mount("/art/v1", routes=routes.art()),
        ],
        exception_handlers={
            ArtCloudError: on_error,
            HTTPException: on_http_exception,
            ClientDisconnect: on_disconnect,
            Exception: on_bug,
        },
        lifespan=lifespan,
    )
    return Gate(
        app, token, sessions, settings.max_bytes, guardian.touch, read_only=settings.read_only
    )


class Gate:
    """ASGI middleware: token or session key, size of a body, the server's version on answers."""

    def __init__(
        self,
        app: ASGIApp,
        token: str,
        sessions: Sessions,
        max_bytes: int,
        touch: Callable[[], None],
        *,
        read_only: bool,
    ) -> None:
        self.app = app
        self.expected = f"Bearer {token}".encode()
        self.sessions = sessions
        self.max_bytes = max_bytes
        self.touch = touch
        self.read_only = read_only

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
            self._check_key(scope["path"], headers.get(b"authorization", b""))
            self._check_harmless(scope["method"], scope["path"])
            if int(headers.get(b"content-length", b"0")) > self.max_bytes:
                raise self._too_large()
        except ArtCloudError as error:
            return await error_response(error)(scope, receive, send_stamped)
        if (admit := scope.get("extensions", {}).get(ADMIT)) is not None:
            admit()
        if scope["path"] != LOOKING:
            self.touch()
        await self.app(scope, receive_limited, send_stamped)

    def _check_key(self, path: str, authorization: bytes) -> None:
        if path.startswith(SESSIONS):
            self.sessions.check_key(path, authorization)
        elif not hmac.compare_digest(authorization, self.expected):
            raise AuthError("Incorrect API key provided: this server needs its own token.")

    def _check_harmless(self, method: str, path: str) -> None:
        writes = path.startswith(ART) and method != "GET" and path not in HARMLESS
        if self.read_only and writes:
            raise ConflictError(
                f"{method} {path}: this server only serves what is in the store (--read-only). Ask "
                "the one that trains."
            )

    def _too_large(self) -> RequestTooLargeError:
        return RequestTooLargeError(
            f"The body is over this server's limit of {self.max_bytes / 2**20:,.0f} MiB. Nothing "
            "was done. Send fewer trajectories in one call, or start the server with a higher "
            "--max-body."
        )


def _infos(infos: list[CheckpointInfo]) -> Response:
    content = TypeAdapter(list[CheckpointInfo]).dump_json(infos)
    return Response(content, media_type="application/json")


def _name(request: Request) -> ModelName:
    return ModelName(request.path_params["project"], request.path_params["model"])


def _step(request: Request) -> int:
    step = request.path_params["step"]
    if not STEP.fullmatch(step):
        raise InvalidRequestError(f"{step[:80]!r} is no number of a step: 1 to 9 digits.")
    return int(step)


def _call_id(request: Request) -> str:
    call = request.headers.get(CALL_ID, uuid4().hex)
    try:
        return UUID(call).hex
    except ValueError:
        raise InvalidRequestError(f"{CALL_ID} is {call[:80]!r}, which is not a UUID.") from None
