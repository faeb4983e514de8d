"""A real HTTP server that speaks OpenAI's chat protocol and gives scripted answers.

It stands for judges and generators: models that know things, of which none can run in the tests.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..unit.stand_in import serve

KEY = "sk-a-key-of-the-tests"


@dataclass
class Answer:
    """What one request gets: a message, or an error where `status` is not 200."""

    content: str | None = None
    finish_reason: str = "stop"
    refusal: str | None = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    cost: float | None = None
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Tools that it calls, with their arguments as JSON."""


Reply = Callable[[dict[str, Any]], Answer]


class OpenAIServer:
    """Answers by `script`, one entry for each request, and then by `reply`."""

    def __init__(self, reply: Reply, *script: Answer | Reply) -> None:
        self.reply = reply
        self.script = list(script)
        self.takes_schema = True
        self.bodies: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.running = self.most_running = 0
        self.url = ""

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/v1/chat/completions", self.chat, methods=["POST"])])

    async def chat(self, request: Request) -> Response:
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return _error(401, f"Incorrect API key: {request.headers.get('authorization')}")
        body = await request.json()
        self.bodies.append(body)
        self.times.append(time.monotonic())
        if "response_format" in body and not self.takes_schema:
            return _error(400, "response_format is not supported here")
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            scripted = self.script.pop(0) if self.script else self.reply
            answer = scripted if isinstance(scripted, Answer) else scripted(body)
            await asyncio.sleep(answer.delay)
        finally:
            self.running -= 1
        if answer.status != 200:
            return _error(answer.status, answer.content or "told to", answer.headers)
        return JSONResponse(_completion(body["model"], answer))


def _completion(model: str, answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    message["refusal"] = answer.refusal
    if answer.calls:
        message["tool_calls"] = [
            {"id": f"call_{n}", "type": "function", "function": {"name": name, "arguments": text}}
            for n, (name, text) in enumerate(answer.calls)
        ]
    usage = {"prompt_tokens": 1000, "completion_tokens": 100, "total_tokens": 1100}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [{"index": 0, "finish_reason": answer.finish_reason, "message": message}],
        "usage": usage if answer.cost is None else usage | {"cost": answer.cost},
    }


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    body = {"error": {"message": message, "type": "scripted", "param": None, "code": None}}
    return JSONResponse(body, status, headers)


@contextmanager
def openai_server(reply: Reply, *script: Answer | Reply) -> Iterator[OpenAIServer]:
    server = OpenAIServer(reply, *script)
    with serve(server.app()) as url:
        server.url = f"{url}/v1"
        yield server


@dataclass
class Shown:
    """One trajectory as a judge was shown it: its id, and the JSON lines of its conversations."""

    id: str
    conversations: list[list[Any]]

    @property
    def text(self) -> str:
        """The content of its last message."""
        return str(self.conversations[0][-1]["content"])


def read_judge_prompt(body: dict[str, Any]) -> list[Shown]:
    """What a judge that keeps to its system prompt finds in a RULER request."""
    system, user = (message["content"] for message in body["messages"][:2])
    mark = re.search(r"carry the mark (\w+) are tags", system)
    assert mark, system
    tag = re.compile(rf"(</?)(\w+)-{mark[1]}((?: \w+=\"\w+\")*)>")
    contexts: dict[str, list[Any]] = {}
    shown: list[Shown] = []
    lines: list[Any] = []
    for line in user.split("\n"):
        found = tag.fullmatch(line)
        if found is None:
            if line.startswith(("{", "[")):
                lines.append(json.loads(line))
            continue
        opening, name = found[1] == "<", found[2]
        attributes = dict(re.findall(r'(\w+)="(\w+)"', found[3]))
        if opening and name == "trajectory":
            shown.append(Shown(attributes["id"], []))
        elif opening:
            lines = list(contexts.get(attributes.get("continues", ""), []))
            if name == "context":
                contexts[attributes["id"]] = lines
            else:
                shown[-1].conversations.append(lines)
    return shown


def judge_by(score: Callable[[Shown], float]) -> Reply:
    """A judge that gives each trajectory the score of its content."""

    def reply(body: dict[str, Any]) -> Answer:
        return Answer(scores({one.id: score(one) for one in read_judge_prompt(body)}))

    return reply


def generate(task: Callable[[int], str]) -> Reply:
    """A generator that writes `task(0)`, `task(1)` and so on, as many as it is asked for."""
    numbers = itertools.count()

    def reply(body: dict[str, Any]) -> Answer:
        count = int(body["messages"][1]["content"].split()[1])
        tasks = [
            {"task": task(n), "difficulty": n % 5 + 1} for n in itertools.islice(numbers, count)
        ]
        return Answer(json.dumps({"scenarios": tasks}))

    return reply


def either(generator: Reply, judge: Reply) -> Reply:
    """One endpoint for both."""

    def reply(body: dict[str, Any]) -> Answer:
        writes = body["messages"][0]["content"].startswith("You write tasks")
        return generator(body) if writes else judge(body)

    return reply


def scores(by_id: dict[str, float]) -> str:
    """A judge's answer, in an order of its own."""
    return json.dumps(
        {
            "scores": [
                {"trajectory_id": id, "explanation": f"It earns {score}.", "score": score}
                for id, score in sorted(by_id.items())
            ]
        }
    )
