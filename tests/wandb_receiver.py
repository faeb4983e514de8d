"""What W&B's client speaks to, on loopback: the run's start and resumption, and its history."""

from __future__ import annotations

import gzip
import json
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

PROJECT = {"id": "p", "name": "tracked", "entity": {"id": "e", "name": "me"}}


class WandbReceiver:
    def __init__(self) -> None:
        self.history: dict[str, list[dict[str, Any]]] = {}
        """By run."""
        self.url = ""

    def app(self) -> Starlette:
        return Starlette(
            routes=[Route("/{path:path}", self.receive, methods=["GET", "POST", "PUT"])]
        )

    async def receive(self, request: Request) -> Response:
        body = await request.body()
        if request.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        path = request.url.path
        if path == "/graphql":
            query = json.loads(body)
            return JSONResponse(
                {"data": self.answer(query["operationName"], query.get("variables") or {})}
            )
        if path.endswith("/file_stream"):
            run = path.split("/")[-2]
            sent = (json.loads(body).get("files") or {}).get("wandb-history.jsonl")
            if sent is not None:
                rows = [json.loads(line) for line in sent["content"]]
                self.history[run][sent["offset"] : sent["offset"] + len(rows)] = rows
        return JSONResponse({})

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        match operation:
            case "RunResumeStatus":
                name = variables["name"]
                run = self._run(name) if name in self.history else None
                return {"model": {**PROJECT, "bucket": run}}
            case "UpsertBucket":
                there = variables["name"] in self.history
                self.history.setdefault(variables["name"], [])
                return {
                    "upsertBucket": {
                        "bucket": self._run(variables["name"]) | {"project": PROJECT},
                        "inserted": not there,
                    }
                }
            case "CreateRunFiles":
                files = [{"name": n, "uploadUrl": f"{self.url}/{n}"} for n in variables["files"]]
                run = variables["run"]
                return {"createRunFiles": {"runID": run, "uploadHeaders": [], "files": files}}
            case _:
                return {}

    def _run(self, name: str) -> dict[str, Any]:
        rows = self.history[name]
        return {
            "id": name,
            "name": name,
            "displayName": name,
            "config": "{}",
            "summaryMetrics": "{}",
            "historyLineCount": len(rows),
            "historyTail": json.dumps([json.dumps(row) for row in rows[-1:]]),
            "eventsLineCount": 0,
            "eventsTail": "[]",
            "logLineCount": 0,
            "tags": [],
            "notes": "",
            "description": "",
            "sweepName": None,
            "wandbConfig": json.dumps({"t": {"1": [1]}}),  # it has started
        }
