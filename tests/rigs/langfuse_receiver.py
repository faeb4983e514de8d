"""What Langfuse's SDK sends to, on loopback: OTLP traces and scores, kept as they came."""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

PUBLIC_KEY, SECRET_KEY = "pk-lf-of-a-test", "sk-lf-of-a-test"
PROJECT = {
    "id": "p",
    "name": "tests",
    "organization": {"id": "o", "name": "tests"},
    "metadata": {},
}


class LangfuseReceiver:
    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self.scores: list[dict[str, Any]] = []
        self.status = 200
        """Of every answer."""
        self.url = ""

    def app(self) -> Starlette:
        return Starlette(
            routes=[Route("/{path:path}", self.receive, methods=["GET", "POST"])],
        )

    async def receive(self, request: Request) -> Response:
        basic = base64.b64encode(f"{PUBLIC_KEY}:{SECRET_KEY}".encode()).decode()
        if request.headers["authorization"] != f"Basic {basic}":
            return JSONResponse({"message": "Invalid credentials"}, 401)
        if self.status != 200:
            return JSONResponse({"message": "told to"}, self.status)
        body = await request.body()
        if request.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        match request.url.path:
            case "/api/public/projects":
                return JSONResponse({"data": [PROJECT]})
            case "/api/public/otel/v1/traces":
                sent = ExportTraceServiceRequest.FromString(body)
                for resource in sent.resource_spans:
                    for scope in resource.scope_spans:
                        self.spans += [
                            {
                                "trace": span.trace_id.hex(),
                                "id": span.span_id.hex(),
                                "parent": span.parent_span_id.hex(),
                                "name": span.name,
                                **{a.key: _value(a.value) for a in span.attributes},
                            }
                            for span in scope.spans
                        ]
                answer = ExportTraceServiceResponse().SerializeToString()
                return Response(answer, media_type="application/x-protobuf")
            case "/api/public/scores":
                scores = json.loads(body)
                self.scores += scores
                return JSONResponse({"accepted": len(scores), "rejected": 0, "errors": []}, 207)
            case path:
                return JSONResponse({"message": f"{path} is not known"}, 404)


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
