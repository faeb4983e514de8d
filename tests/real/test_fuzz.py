"""Requests that nobody means: whatever is sent, the server answers, with no fault of its own.

The routes are the app's, so one that is added is tried without a line here. What a route's body is
made from is found by the annotations of the schemas; a route that has none gets all of them.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock
from urllib.parse import quote

import pytest
from art_server.api.app import Gate, make_app
from art_server.inference.openai.requests import ChatRequest, CompletionRequest
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.routing import Mount, Route

import art_cloud as art
from art_cloud.shared import protocol
from art_cloud.shared.names import ModelName
from art_cloud.shared.wire import _compress, _decompress, _pack, _unpack, encode_batch

from ..rigs.server_process import TOKEN, ServerProcess
from ..rigs.synthetic import as_groups, batch

MODEL = ModelName("fuzz", "agent")
AT_ONCE = 8
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
ODD_STRINGS = (
    *("", " ", "-", "..", "../../etc/passwd", "a/b", "%2F", "%00", "\0", "é" * 40, "\U0001f600"),
    *("\ud800", "x" * 300, "x" * 5000, "0", "-1", "9" * 9, "9" * 10, "9" * 300, "9" * 4400),
    *("NaN", "1e999", "{{7*7}}", "{% for a in range(10**9) %}", "<|im_end|>", "' OR 1=1 --"),
)
ODD_NUMBERS = ("0", "-1", "-0.0", "1e-320", "1e308", "1e999", "NaN", "Infinity", "-Infinity",
               "0.0001", str(2**31), str(2**63), str(2**64), "9" * 300, "9" * 4400)  # fmt: skip
ODD_VALUES = ("null", "true", "false", "[]", "{}", '""', "[[]]", "[null]", '{"": null}',
              "[" * 500 + "]" * 500, '{"a":' * 300 + "1" + "}" * 300)  # fmt: skip
ODD_HEADERS = (
    ("Content-Type", "text/plain"),
    ("Content-Type", "application/json; charset=utf-7"),
    ("Accept", "x" * 2000),
    ("Accept-Encoding", "gzip;q=abc"),
    ("Last-Event-ID", "-1"),
    ("Last-Event-ID", "9" * 5000),
    ("Last-Event-ID", "99"),
    ("Art-Call-Id", "../x"),
    ("Art-Call-Id", "0" * 32),
    ("Art-Call-Id", "{" + "0" * 32 + "}"),
    ("Art-After", "../x"),
    ("Authorization", "Bearer"),
    ("Authorization", "Basic Og=="),
    ("Expect", "100-continue"),
    ("Connection", "close"),
    ("Transfer-Encoding", "chunked"),
    ("X-Forwarded-For", "1.2.3.4, é"),
    ("Range", "bytes=0-1,5-"),
    ("Cookie", "a" * 9000),
)
SCHEMAS: list[type[BaseModel]] = [
    protocol.ForkRequest,
    protocol.LogRequest,
    protocol.PruneRequest,
    protocol.RegisterRequest,
    protocol.SessionRequest,
    protocol.SFTRequest,
    protocol.StoreCredentials,
    ChatRequest,
    CompletionRequest,
]


def all_routes() -> list[tuple[str, str]]:
    """Method and path, with its parameters in braces, of whatever the app serves."""
    gate = make_app(MagicMock(), MagicMock(), MagicMock(), token=TOKEN)
    assert isinstance(gate, Gate)
    assert isinstance(gate.app, Starlette)
    return [
        (method, mount.path + route.path)
        for mount in gate.app.routes
        if isinstance(mount, Mount)
        for route in mount.routes
        if isinstance(route, Route)
        for method in sorted(route.methods or ())
    ]


class Literal_(str):
    """JSON that is put into a body as it stands."""


class Fuzzer:
    def __init__(self, seed: int, base: Path, session: tuple[str, str]) -> None:
        self.rng = random.Random(seed)
        self.routes = all_routes()
        self.base = base
        self.session = session

    def request(self) -> bytes:
        method, route = self.rng.choice(self.routes)
        path = "/".join(self._part(part) for part in route.split("/"))
        if self._rarely(20):
            method = self.rng.choice(["GET", "PUT", "POST", "DELETE", "PATCH", "OPTIONS", "HEAD"])
        if self._rarely(20):
            path += self.rng.choice(["/", "//", "?a=%ff", "?step=" + "9" * 5000, "/.."])
        key = self.session[1] if path.startswith("/sessions") else TOKEN
        body = self._body(route) if method not in ("GET", "HEAD") or self._rarely(10) else b""
        headers = [("Host", "x"), ("Authorization", f"Bearer {key}")]
        headers.append(("Content-Length", str(len(body))))
        while self._rarely(3):
            headers.append(self.rng.choice(ODD_HEADERS))
        self.rng.shuffle(headers)
        if ("Transfer-Encoding", "chunked") in headers:
            headers = [header for header in headers if header[0] != "Content-Length"]
            body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
        head = "".join(f"{name}: {value}\r\n" for name, value in headers)
        return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body

    def _rarely(self, times: int) -> bool:
        return self.rng.randrange(times) == 0

    def _part(self, part: str) -> str:
        if not part.startswith("{"):
            return part
        usual = {
            "{project}": MODEL.project,
            "{model}": MODEL.model,
            "{step}": "0",
            "{session}": self.session[0],
        }.get(part, "0" * 32)
        if not self._rarely(4):
            return usual
        odd = self.rng.choice(ODD_STRINGS).encode(errors="surrogatepass")
        return quote(odd, safe="" if self._rarely(2) else "/%.")

    def _body(self, route: str) -> bytes:
        if route.endswith("/train") and not self._rarely(5):
            return self._batch()
        fitting = {
            "chat/completions": ChatRequest,
            "v1/completions": CompletionRequest,
            "sft": protocol.SFTRequest,
            "log": protocol.LogRequest,
            "prune": protocol.PruneRequest,
            "fork": protocol.ForkRequest,
            "sessions": protocol.SessionRequest,
            "credentials": protocol.StoreCredentials,
            "{model}": protocol.RegisterRequest,
        }
        schemas = [schema for end, schema in fitting.items() if route.endswith(end)]
        schema = self.rng.choice(SCHEMAS) if self._rarely(10) or not schemas else schemas[0]
        content = self._valid(schema)
        for _ in range(self.rng.choice([0, 1, 1, 1, 2, 4])):
            content = self._mutated(content)
        text = _dump(content).encode(errors="surrogatepass")
        if self._rarely(20):
            cut = self.rng.randrange(len(text) + 1)
            text = text[:cut] + self.rng.choice([b"", b"\xff", b"\0", b"}", text])
        return text

    def _valid(self, schema: type[BaseModel]) -> Any:
        """A body that is legal, and does not keep the server busy."""
        message = {"role": "user", "content": "a fox"}
        generated: dict[str, Any] = {
            **{"model": str(MODEL), "n": 1, "max_tokens": 2, "temperature": 1.0, "top_p": 1.0},
            **{"seed": 1, "stop": ["x"], "stream": self._rarely(2), "logprobs": None},
        }
        sampled = base64.b64encode(encode_batch(batch(MODEL, 1))).decode()
        row = {"group": 0, "trajectory": 0, "reward": 1.0, "metrics": {}, "metadata": {}}
        return {
            ChatRequest: {
                **generated,
                "messages": [
                    {"role": "system", "content": [{"type": "text", "text": "x"}]},
                    message,
                ],
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
                "tool_choice": "auto",
                "chat_template_kwargs": {"enable_thinking": False},
            },
            CompletionRequest: {
                **generated,
                "prompt": self.rng.choice(["a fox", [1, 2], [[1], [2]]]),
            },
            protocol.SFTRequest: {
                "examples": [{"messages": [message, {"role": "assistant", "content": "!"}]}],
                "config": {"learning_rate": 1e-4, "epochs": 1, "batch_size": 1, "seed": 1},
            },
            protocol.LogRequest: {
                **{"split": "val", "step": 0, "metrics": {"reward": 1.0}, "samples": sampled},
                "trajectories": [{**row, "messages": [message], "logs": ["x"], "samples": [0]}],
            },
            protocol.PruneRequest: {"retention": {"keep_last": 1000}, "dry_run": True},
            protocol.ForkRequest: {
                "to_project": "fuzz",
                "to_model": f"f{self.rng.random()}",
                "step": 0,
            },
            protocol.SessionRequest: {"model": str(MODEL)},
            protocol.StoreCredentials: {"variables": {"AWS_ACCESS_KEY_ID": "x"}},
            protocol.RegisterRequest: {
                "base_model": str(self.base),
                "lora": {"rank": 8, "alpha": 32, "target_modules": "all-linear", "seed": 0},
                "retention": None,
            },
        }[schema]

    def _mutated(self, content: Any) -> Any:
        """The same with one value another one, gone, or a new one beside it."""
        if isinstance(content, dict) and content and not self._rarely(6):
            key = self.rng.choice(list(content))
            if key == "dry_run" or (key == "max_tokens" and not self._rarely(50)):
                return content
            if self._rarely(10):
                return {name: value for name, value in content.items() if name != key}
            if self._rarely(10):
                return {**content, self.rng.choice(ODD_STRINGS): content[key]}
            return {**content, key: self._mutated(content[key])}
        if isinstance(content, list) and content and not self._rarely(4):
            place = self.rng.randrange(len(content))
            if self._rarely(6):
                return content * self.rng.choice([0, 3, 100])
            return [*content[:place], self._mutated(content[place]), *content[place + 1 :]]
        odd: Callable[[], Any] = self.rng.choice(
            [
                lambda: self.rng.choice(ODD_STRINGS),
                lambda: Literal_(self.rng.choice(ODD_NUMBERS)),
                lambda: Literal_(self.rng.choice(ODD_VALUES)),
            ]
        )
        return odd()

    def _batch(self) -> bytes:
        body = bytearray(encode_batch(batch(MODEL, self.rng.randrange(10), groups=1)))
        match self.rng.randrange(10):
            case 0:
                for _ in range(self.rng.randrange(1, 4)):
                    body[self.rng.randrange(len(body))] ^= self.rng.randrange(1, 256)
            case 1:
                del body[self.rng.randrange(len(body)) :]
            case 2:
                body = bytearray(_compress(bytes(20 << 20)))
            case 3:
                body = bytearray(self.rng.randbytes(self.rng.randrange(200)))
            case 4 | 5 | 6 | 7:  # sound, but for what its header says
                tensors = _unpack(_decompress(body, 8 << 20))
                header = json.loads(tensors["header"])
                for _ in range(self.rng.randrange(1, 3)):
                    header = self._mutated(header)
                text = _dump(header).encode(errors="surrogatepass")
                body = bytearray(_compress(_pack({**tensors, "header": text})))
            case _:  # a sound stream of a file that is not
                file = bytearray(_decompress(body, 8 << 20))
                for _ in range(self.rng.randrange(1, 4)):
                    file[self.rng.randrange(len(file))] ^= self.rng.randrange(1, 256)
                body = bytearray(_compress(file))
        return bytes(body)


def _dump(content: Any) -> str:
    if isinstance(content, Literal_):
        return content
    if isinstance(content, dict):
        return "{" + ",".join(f"{json.dumps(k)}:{_dump(v)}" for k, v in content.items()) + "}"
    if isinstance(content, list):
        return "[" + ",".join(map(_dump, content)) + "]"
    return json.dumps(content)


async def answered(port: int, request: bytes) -> bytes:
    """The head of the answer, and what was read of the rest until the server had said it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        head = b""
        async with asyncio.timeout(120):
            while b"\r\n\r\n" not in head:
                part = await reader.read(65536)
                if not part:
                    break
                head = (head + part).removeprefix(CONTINUE)
        return head
    finally:
        writer.close()


async def fuzz(server: ServerProcess, base: Path, count: int, seed: int) -> None:
    async with server.backend() as backend, server.http() as http:
        model = art.TrainableModel(
            name=MODEL.model,
            project=MODEL.project,
            base_model=str(base),
            lora=art.LoRAConfig(rank=8),
        )
        await model.register(backend)
        session = (await http.post("/art/v1/sessions", json={"model": str(MODEL)})).json()
    fuzzer = Fuzzer(seed, base, (session["id"], session["key"]))
    faults: list[str] = []
    requests = iter([fuzzer.request() for _ in range(count)])

    async def one_after_another(requests: Iterator[bytes]) -> None:
        for request in requests:
            head = await answered(server.port, request)
            if not head.startswith((b"HTTP/1.1 2", b"HTTP/1.1 3", b"HTTP/1.1 4")):
                faults.append(f"{request[:1500]!r}\n -> {head[:600]!r}")

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(one_after_another(requests))
    assert not faults, f"seed {seed}: {len(faults)}\n" + "\n".join(faults[:20])


async def check_whole(server: ServerProcess) -> None:
    """It lives, trains, and has said neither its token nor too much."""
    async with server.backend() as backend:
        async with asyncio.timeout(300):
            while (await backend.info()).jobs_queued:
                await asyncio.sleep(0.1)
        model = art.TrainableModel(
            name="after", project=MODEL.project, base_model=(await backend.info()).base_model or ""
        )
        await model.register(backend)
        result = await backend.train(model, as_groups(batch(model.full_name, 1)))
        assert result.step == 1
        assert all(map(math.isfinite, result.metrics.values()))
    assert server.terminate() == 0
    assert TOKEN not in server.output
    assert "Traceback" not in server.output, server.output[
        server.output.index("Traceback") - 500 :
    ][:3000]


@pytest.mark.parametrize(
    "count", [200, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
async def test_nothing_that_is_sent_is_the_servers_fault(
    tmp_path: Path, tiny_model: Path, count: int, record_property: Callable[[str, object], None]
) -> None:
    seed = random.SystemRandom().randrange(2**32) if count > 200 else 1
    print(f"seed {seed}")
    record_property("fuzzed requests", count)
    with ServerProcess(tmp_path, "--model", tiny_model, "--max-body", "8") as server:
        await fuzz(server, tiny_model, count, seed)
        await check_whole(server)
        assert len(server.output) < 10_000 + 300 * count


def test_all_routes_are_known() -> None:
    routes = all_routes()
    assert ("POST", "/v1/chat/completions") in routes
    assert ("DELETE", "/art/v1/models/{project}/{model}/checkpoints/{step}") in routes
    assert ("POST", "/sessions/{session}/v1/completions") in routes
    assert len(routes) > 25
