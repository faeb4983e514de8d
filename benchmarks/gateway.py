"""Tokens per second at 32 requests at once: through the gateway, and from vLLM directly.

Ours is `art-server --engine vllm`: the gateway on TCP, with its token, its policies and the sample
on every choice. The peer is the very vLLM behind it, asked on its socket for what a rollout needs
from it: token ids and logprobs. Both are asked by the same client (aiohttp), in turn, for the same
completions by the same adapter; each side's figure is that of its median round. `bare` is vLLM
without token ids and logprobs, which nobody could train on. `added_ms` is what the gateway adds to
the median latency of a single request of one token.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
from harness import report
from vllm_server import Servers

REQUESTS, PROMPT_TOKENS, COMPLETION_TOKENS = 32, 64, 128
ROUNDS, SINGLES = 7, 100
TOKENS = REQUESTS * COMPLETION_TOKENS

ASKED: dict[str, Any] = {"ignore_eos": True, "max_tokens": COMPLETION_TOKENS}
SAMPLED: dict[str, Any] = {"return_token_ids": True, "logprobs": 0}


async def whole(session: aiohttp.ClientSession, body: dict[str, Any]) -> None:
    async with session.post("/v1/completions", json=body) as answer:
        content = json.loads(await answer.read())
    assert answer.status == 200, content
    assert content["usage"]["completion_tokens"] == body["max_tokens"]


async def streamed(session: aiohttp.ClientSession, body: dict[str, Any]) -> None:
    text, last = b"", b""
    async with session.post("/v1/completions", json={**body, "stream": True}) as answer:
        async for part in answer.content.iter_any():
            text, last = text + part, part
    assert answer.status == 200, text
    assert last.rstrip().endswith(b"[DONE]")
    for line in text.split(b"\n"):
        if line.startswith(b"data: {"):
            json.loads(line[6:])


async def seconds(calls: list[Awaitable[None]]) -> float:
    start = time.perf_counter()
    await asyncio.gather(*calls)
    return time.perf_counter() - start


async def main() -> None:
    rng = random.Random(0)
    prompts = [rng.choices(range(3, 500), k=PROMPT_TOKENS) for _ in range(REQUESTS)]
    with tempfile.TemporaryDirectory() as scratch:
        async with Servers(Path(scratch)) as servers:
            sides = {
                "ours": (servers.gateway, {**ASKED, "model": servers.policy}),
                "peer": (servers.vllm, {**ASKED, **SAMPLED, "model": servers.alias}),
                "bare": (servers.vllm, {**ASKED, "model": servers.alias}),
            }
            ways: dict[str, Callable[..., Awaitable[None]]] = {
                "plain": whole,
                "streaming": streamed,
            }
            taken: dict[tuple[str, str], list[float]] = {(w, s): [] for w in ways for s in sides}
            for round_number in range(ROUNDS + 1):
                for way, ask in ways.items():
                    for side, (session, body) in sides.items():
                        calls = [ask(session, {**body, "prompt": prompt}) for prompt in prompts]
                        took = await seconds(calls)
                        if round_number > 0:  # the first one warms all sides up
                            taken[way, side].append(took)
                print({f"{w} {s}": round(TOKENS / t[-1]) for (w, s), t in taken.items() if t})
            single: dict[str, list[float]] = {side: [] for side in sides}
            for _ in range(SINGLES):
                for side, (session, body) in sides.items():
                    one = {**body, "prompt": prompts[0], "max_tokens": 1}
                    single[side].append(await seconds([whole(session, one)]))
    speed = {key: round(TOKENS / statistics.median(times)) for key, times in taken.items()}
    latency = {side: statistics.median(times) * 1000 for side, times in single.items()}
    report(
        "gateway",
        speed["plain", "ours"],
        speed["plain", "peer"],
        "vLLM directly, with token ids and logprobs",
        speed["plain", "ours"] / speed["plain", "peer"],
        "tokens/s",
        streaming_ours=speed["streaming", "ours"],
        streaming_peer=speed["streaming", "peer"],
        streaming_ratio=round(speed["streaming", "ours"] / speed["streaming", "peer"], 2),
        plain_bare=speed["plain", "bare"],
        streaming_bare=speed["streaming", "bare"],
        single_ms=round(latency["ours"], 2),
        added_ms=round(latency["ours"] - latency["peer"], 2),
        requests=REQUESTS,
        prompt_tokens=PROMPT_TOKENS,
        completion_tokens=COMPLETION_TOKENS,
    )


if __name__ == "__main__":
    asyncio.run(main())
