"""A real HTTP server that speaks the protocol and misbehaves when it is told to.

It learns nothing: it stands where a server must drop a connection, answer nonsense or be of
another version at a chosen moment. The art-server's own tests are in `contract` and `real`.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import uvicorn
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from art_cloud.shared.protocol import CALL_ID, PROTOCOL
from art_cloud.shared.version import __version__
from art_cloud.shared.wire import TrainBatch, decode_batch

TOKEN = "a-secret-token"
NOW = "2026-11-20T00:00:00Z"
PING = "ping"  # in place of an event: a comment that keeps the connection alive
DROP = "drop"  # in place of an event: the connection breaks here


def error(message: str, code: str, status: int) -> Response:
    return JSONResponse({"error": {"message": message, "code": code}}, status)


class StandIn:
    def __init__(self) -> None:
        self.version, self.protocol = __version__, PROTOCOL
        self.step = 0
        self.calls: Counter[str] = Counter()
        self.jobs: dict[str, dict[str, Any]] = {}
        self.bodies: dict[str, bytes] = {}
        self.last_event_ids: list[str] = []
        self.logged: list[dict[str, Any]] = []
        self.deleted: list[int] = []
        self.forks: list[dict[str, Any]] = []
        self.checkpoints: list[dict[str, Any]] = []
        self.faults: dict[str, list[Callable[[], Response | None]]] = {}
        self.scripts: list[list[Any]] = []
        """For each connection to a job's events, in turn: numbers of events, and DROP."""
        self.fails_with: dict[str, str] | None = None
        self.url = ""

    @property
    def batches(self) -> list[TrainBatch]:
        return [
            decode_batch(self.bodies[id], 1 << 24).unpack()
            for id, job in self.jobs.items()
            if job["kind"] == "train"
        ]

    def app(self) -> Starlette:
        model = "/art/v1/models/{project}/{model}"
        routes = [
            Route("/art/v1/server", self.guarded("server", self.server)),
            Route(model, self.guarded("register", self.submit("register")), methods=["PUT"]),
            Route(model, self.guarded("model", self.model)),
            Route(f"{model}/train", self.guarded("train", self.submit("train")), methods=["POST"]),
            Route(f"{model}/sft", self.guarded("sft", self.submit("sft")), methods=["POST"]),
            Route(f"{model}/log", self.guarded("log", self.log), methods=["POST"]),
            Route(f"{model}/checkpoints", self.guarded("checkpoints", self.list_checkpoints)),
            Route(
                f"{model}/checkpoints/{{step:int}}",
                self.guarded("delete", self.delete),
                methods=["DELETE"],
            ),
            Route(f"{model}/fork", self.guarded("fork", self.fork), methods=["POST"]),
            Route("/art/v1/jobs/{id}", self.guarded("job", self.job)),
            Route("/art/v1/jobs/{id}/events", self.guarded("events", self.events)),
            Route("/v1/chat/completions", self.guarded("chat", self.chat), methods=["POST"]),
        ]
        return Starlette(routes=routes)

    def guarded(self, name: str, handler: Any) -> Any:
        async def guard(request: Request) -> Response:
            self.calls[name] += 1
            if request.headers.get("authorization") != f"Bearer {TOKEN}":
                return error("no", "invalid_api_key", 401)
            for fault in self.faults.get(name, [])[:1]:
                self.faults[name].pop(0)
                if (answer := fault()) is not None:
                    return answer
            result: Response = await handler(request)
            return result

        return guard

    async def server(self, request: Request) -> Response:
        return JSONResponse(
            {
                "version": self.version,
                "protocol": self.protocol,
                "base_model": "tiny",
                "engine": "stand-in",
                "device": "none",
                "store": "none",
                "policies": [],
                "jobs_queued": 0,
                "requests_running": 0,
                "requests_waiting": 0,
                "training": None,
                "started_at": NOW,
            }
        )

    def submit(self, kind: str) -> Any:
        async def handler(request: Request) -> Response:
            id = request.headers[CALL_ID.lower()]
            if id not in self.jobs:
                project, model = request.path_params["project"], request.path_params["model"]
                job = {"id": id, "kind": kind, "project": project, "model": model}
                if self.fails_with is not None:
                    job |= {"state": "failed", "error": self.fails_with}
                else:
                    self.step += kind != "register"
                    policy = f"{project}/{model}@{self.step}"
                    result = {"step": self.step, "policy": policy, "metrics": {"loss": 0.5}}
                    job |= {"state": "done", "result": result}
                self.jobs[id] = job
                self.bodies[id] = await request.body()
            return JSONResponse(self.jobs[id], 202)

        return handler

    async def model(self, request: Request) -> Response:
        project, model = request.path_params["project"], request.path_params["model"]
        return JSONResponse(
            {
                "project": project,
                "model": model,
                "base_model": "tiny",
                "step": self.step,
                "policy": f"{project}/{model}@{self.step}",
                "context_length": 2048,
            }
        )

    async def job(self, request: Request) -> Response:
        return JSONResponse(self.jobs[request.path_params["id"]])

    async def events(self, request: Request) -> Response:
        id = request.path_params["id"]
        if id not in self.jobs:
            return error("unknown job", "not_found", 404)
        after = int(request.headers.get("last-event-id", "0"))
        self.last_event_ids.append(str(after))
        job = self.jobs[id]
        types = ["queued", "started", "progress", job["state"]]
        said = [{}, {}, {"done": 1, "total": 2}, job.get("result") or job.get("error")]
        script = self.scripts.pop(0) if self.scripts else list(range(after + 1, len(types) + 1))

        async def stream() -> AsyncIterator[ServerSentEvent]:
            for item in script:
                if item == DROP:
                    raise ConnectionResetError("told to")
                if item == PING:
                    yield ServerSentEvent(comment="ping")
                    continue
                if isinstance(item, str):
                    yield ServerSentEvent(item)
                    continue
                event = {"number": item, "type": types[item - 1], "time": NOW}
                yield ServerSentEvent(json.dumps(event | {"data": said[item - 1]}), id=str(item))

        return EventSourceResponse(stream())

    async def log(self, request: Request) -> Response:
        self.logged.append(await request.json())
        return JSONResponse({})

    async def list_checkpoints(self, request: Request) -> Response:
        return JSONResponse(self.checkpoints)

    async def delete(self, request: Request) -> Response:
        self.deleted.append(request.path_params["step"])
        return JSONResponse({})

    async def fork(self, request: Request) -> Response:
        self.forks.append(await request.json())
        wanted = self.forks[-1]
        return JSONResponse(
            checkpoint(wanted["step"] or 0, wanted["to_project"], wanted["to_model"]), 201
        )

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        policy = body["model"] if "@" in body["model"] else f"{body['model']}@{self.step}"
        sample = {
            "prompt_ids": [1, 2, len(body["messages"])],
            "completion_ids": [5, 6],
            "logprobs": [-0.25, -0.5],
            "policy": policy,
        }
        message = {"role": "assistant", "content": "5"}
        choice = {"index": 0, "finish_reason": "stop", "message": message, "sample": sample}
        return JSONResponse(
            {
                "id": "chatcmpl-1",
                "object": "chat.completion",
                "created": 0,
                "model": policy,
                "choices": [choice],
            }
        )


def checkpoint(step: int, project: str = "p", model: str = "m", **metrics: float) -> dict[str, Any]:
    return {
        "project": project,
        "model": model,
        "step": step,
        "kind": "train",
        "created_at": NOW,
        "bytes": 10,
        "metrics": metrics,
    }


@contextmanager
def serve(app: Any, port: int = 0, *, lifespan: Literal["on", "off"] = "off") -> Iterator[str]:
    """Serve `app` on loopback in a thread; the URL."""
    listener = socket.create_server(("127.0.0.1", port))
    config = uvicorn.Config(
        app, log_level="critical", lifespan=lifespan, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
        assert not thread.is_alive()
