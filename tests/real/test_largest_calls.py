"""The largest calls that are legal, and some beyond, beside clients with small ones."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import httpx
import pytest

import art_cloud as art
from art_cloud.shared.names import ModelName
from art_cloud.shared.wire import _compress, _pack, encode_batch

from ..rigs.server_process import ServerProcess
from ..rigs.synthetic import batch

MODEL = ModelName("large", "agent")
ART = f"/art/v1/models/{MODEL}"
MIB = 1 << 20
MAX_BODY = 64


def _time_callbacks() -> None:
    """In the server: whatever takes its event loop over 50 ms of processor time is said."""
    import time
    from asyncio.events import Handle

    run = Handle._run  # type: ignore[attr-defined]

    def timed(self: Handle) -> None:
        before = time.thread_time()
        run(self)
        if (taken := time.thread_time() - before) > 0.05:
            print(f"SLOW: {taken:.3f} s in {self!r}"[:500], flush=True)

    Handle._run = timed  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def large_server(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("large")
    server = ServerProcess(folder, "--model", tiny_model, "--max-body", str(MAX_BODY))
    server.prepare = _time_callbacks
    with server:
        yield server


@asynccontextmanager
async def registered(server: ServerProcess, base: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a model that has answered before, so that all is loaded."""
    async with server.backend() as backend, server.http() as http:
        model = art.TrainableModel(
            name=MODEL.model,
            project=MODEL.project,
            base_model=str(base),
            lora=art.LoRAConfig(rank=8),
        )
        await model.register(backend)
        for _ in range(2):
            assert (await small(http)).status_code == 200
        yield http


async def small(http: httpx.AsyncClient) -> httpx.Response:
    return await http.post(
        "/v1/completions", json={"model": str(MODEL), "prompt": "a fox", "max_tokens": 2}
    )


def chat(messages: list[dict[str, str]]) -> bytes:
    return json.dumps({"model": str(MODEL), "messages": messages, "max_tokens": 2}).encode()


def incompressible(size: int) -> bytes:
    """A batch of that many bytes without groups: the job fails, once it has been read."""
    ids = random.Random(0).randbytes(size // 64 // 4 * 64 * 4)
    entry = {"prompt": len(ids) // 256, "completion": 0, "policy": 0, "temperature": 1}
    header = {
        "entries": [entry] * 64,
        "policies": [str(MODEL.at(0))],
        "groups": [],
        "config": {},
        "metrics": {},
    }
    tensors = {"header": json.dumps(header).encode(), "ids": ids, "logprobs": b""}
    return _compress(_pack(tensors))


def largest() -> dict[str, tuple[str, bytes, int]]:
    """By what they are: path, body, and the status that answers them."""
    turn = {"role": "user", "content": "fox"}
    example = {
        "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    }
    values = MAX_BODY * MIB // 128
    ids = [[1] * 2000] * (values // 2001 - 10)
    logged = {"split": "val", "step": 0, "metrics": {}}
    text = "the fox " * ((16 * MIB - 1000) // 8)
    return {
        "a long message": ("/v1/chat/completions", chat([{**turn, "content": text}]), 400),
        "many messages": ("/v1/chat/completions", chat([turn] * (values // 7)), 400),
        "long tools": (
            "/v1/chat/completions",
            json.dumps(
                {
                    "model": str(MODEL),
                    "messages": [turn],
                    "tools": [{"type": "function", "function": {"name": "f", "text": text}}],
                }
            ).encode(),
            400,
        ),
        "a long prompt": (
            "/v1/completions",
            json.dumps({"model": str(MODEL), "prompt": text}).encode(),
            400,
        ),
        "many ids": (
            "/v1/completions",
            json.dumps({"model": str(MODEL), "prompt": ids, "max_tokens": 10**6}).encode(),
            400,
        ),
        "a long example": (
            f"{ART}/sft",
            json.dumps({"examples": [{"messages": [{**turn, "content": text[:-2000]}]}]}).encode(),
            202,
        ),
        "many examples": (
            f"{ART}/sft",
            json.dumps(
                {"examples": [example] * (values // 14), "config": {"schedule": "?"}}
            ).encode(),
            400,
        ),
        "a long log": (
            f"{ART}/log",
            json.dumps({**logged, "metrics": {text[:-2000]: 1.0}}).encode(),
            200,
        ),
        "a batch": (f"{ART}/train", incompressible((MAX_BODY - 1) * MIB), 202),
    }


async def test_the_largest_calls_do_not_hold_the_event_loop(
    large_server: ServerProcess, tiny_model: Path
) -> None:
    async with registered(large_server, tiny_model) as http:
        calls = largest()
        before = len(large_server.output)
        answered = 0

        async def others() -> None:
            nonlocal answered
            while True:
                assert (await small(http)).status_code == 200
                assert (await http.get("/art/v1/server")).status_code == 200
                answered += 1

        beside = asyncio.create_task(others())
        for what, (path, body, status) in calls.items():
            answer = await http.post(path, content=body, timeout=300)
            assert answer.status_code == status, (what, answer.text[:300])
            if status == 202:
                events = f"/art/v1/jobs/{answer.json()['id']}/events"
                assert "failed" in (await http.get(events, timeout=300)).text
        assert not beside.done()
        beside.cancel()
        assert answered > len(calls)
        slow = [line for line in large_server.output[before:].splitlines() if "SLOW" in line]
        assert slow == []


async def test_a_prompt_of_20_mib_does_not_wait_for_a_tokenizer(
    large_server: ServerProcess, tiny_model: Path
) -> None:
    """One that might fit has another tokenizer than short ones; one that can't is not read."""
    async with registered(large_server, tiny_model) as http:
        fits = {"model": str(MODEL), "prompt": [1, 2, 3], "max_tokens": 2, "stop": "x" * 100_000}
        assert (await http.post("/v1/completions", json=fits)).status_code == 200
        for size, code in ((20 * MIB, "request_too_large"), (MIB, "context_length_exceeded")):
            refused = await http.post(
                "/v1/completions", json={"model": str(MODEL), "prompt": "x" * size}
            )
            assert refused.json()["error"]["code"] == code


async def test_the_end_of_a_job_ends_its_events(
    large_server: ServerProcess, tiny_model: Path
) -> None:
    async with registered(large_server, tiny_model) as http:
        call = {"Art-Call-Id": uuid4().hex}
        body = encode_batch(batch(MODEL, 1))
        job = (await http.post(f"{ART}/train", content=body, headers=call)).json()["id"]
        path = f"/art/v1/jobs/{job}/events"
        assert "event: done" in (await http.get(path)).text
        for last in ("99", "999999999"):
            answer = await http.get(path, headers={"Last-Event-ID": last})
            assert (answer.status_code, answer.text) == (200, "")
