"""Calls to a server."""

from __future__ import annotations

from typing import Any

import openai

from art_cloud.client.http import ServerClient
from art_cloud.links.tunnel import Tunnel

from .server_process import TOKEN

MESSAGES: Any = [{"role": "user", "content": "Your move?"}]


async def ask(tunnel: Tunnel) -> None:
    """One call, which is not repeated."""
    client = ServerClient(tunnel.url, TOKEN, patience=0)
    try:
        assert b'"version"' in await client.call("GET", "server")
    finally:
        await client.close()


async def greedy(client: openai.AsyncOpenAI, name: str) -> list[float]:
    """Logprobs of what `name` says to MESSAGES: they tell one set of weights from another."""
    answer = await client.chat.completions.create(
        model=name, messages=MESSAGES, max_tokens=4, temperature=0, seed=1
    )
    assert answer.choices[0].model_extra is not None
    logprobs: list[float] = answer.choices[0].model_extra["sample"]["logprobs"]
    return logprobs
