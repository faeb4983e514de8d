"""From the optimizer step's end to the first token of the new version.

Ours is a `backend.train` call and what follows it, as its caller sees it: the step is saved, loaded
by vLLM, compared with the trainer (the canary), told to the client, and the first token of a stream
by the new step has come through the gateway. The peer is vLLM as it comes, with the same flags,
driven by hand as one does without a server like ours: `save_pretrained` of a PEFT model with an
adapter of the same size, `POST /v1/load_lora_adapter` from a new path, first token of a stream. It
has no canary.

`ours` is a server with `--durability async`: neither it nor the peer has the step on the disk at
the first token. `ours_durable` is one with "sync": the step is in the store before it counts. To it
belongs `peer_durable`: by hand, with the optimizer's state saved beside the adapter, and all of it
on the disk (fsync) before the adapter is served. `canary` is the part of `ours` in which the engine
is asked for the probe. All take turns, each when the one before it is through with its disk.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import torch
from harness import report
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM
from vllm_server import Servers, StockVllm

import art_cloud as art
from art_cloud.shared.config import LoRAConfig

STEPS, WARM_UP = 40, 3
PROMPT: dict[str, Any] = {"prompt": list(range(10, 42)), "max_tokens": 1, "stream": True}


def make_peer(folder: Path) -> tuple[PeftModel, torch.optim.AdamW]:
    lora = LoRAConfig()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.target_modules)
    adapted = get_peft_model(model, config)
    weights = [weight for weight in adapted.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights)
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    return adapted, optimizer


async def first_token(session: aiohttp.ClientSession, name: str) -> None:
    async with session.post("/v1/completions", json={**PROMPT, "model": name}) as answer:
        assert answer.status == 200, await answer.text()
        await answer.content.readany()


async def rollout(servers: Servers, reward: float) -> art.Trajectory:
    answer = await servers.model.openai_client().chat.completions.create(
        model=servers.model.get_inference_name(),
        messages=[{"role": "user", "content": "Your move?"}],
        max_tokens=16,
    )
    messages = [{"role": "user", "content": "Your move?"}, answer.choices[0]]
    return art.Trajectory(messages_and_choices=messages, reward=reward)


async def ours(servers: Servers, rng: random.Random) -> float:
    """The step is in the store at the end, but its seconds are those to the first token."""
    groups = await art.gather_trajectory_groups(
        [art.TrajectoryGroup(rollout(servers, rng.random()) for _ in range(4))], pbar_desc=None
    )
    await servers.backend.train(servers.model, groups)
    await first_token(servers.gateway, str(servers.model.full_name))
    took = time.monotonic() - float((servers.scratch / "stepped").read_text())
    while (await servers.backend.info()).not_durable:
        await asyncio.sleep(0.01)
    return took


def sync(folder: Path) -> None:
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


async def peer(
    vllm: aiohttp.ClientSession,
    folder: Path,
    model: PeftModel,
    optimizer: torch.optim.AdamW | None = None,
) -> float:
    """Durable if the optimizer is given."""
    name = f"by-hand-{folder.name}"
    start = time.monotonic()
    model.save_pretrained(folder)
    if optimizer is not None:
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
        sync(folder)
    body = {"lora_name": name, "lora_path": str(folder)}
    async with vllm.post("/v1/load_lora_adapter", json=body) as answer:
        assert answer.status == 200, await answer.text()
    await first_token(vllm, name)
    took = time.monotonic() - start
    async with vllm.post("/v1/unload_lora_adapter", json={"lora_name": name}):
        pass
    return took


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


async def main() -> None:
    rng = random.Random(0)
    taken: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        quick, durable = Servers(scratch / "async", "async"), Servers(scratch / "sync", "sync")
        async with quick, durable, StockVllm(scratch / "stock", quick.folder) as vllm:
            model, optimizer = make_peer(quick.folder)
            by_hand = scratch / "by-hand"
            for step in map(str, range(WARM_UP + STEPS)):
                seconds = {"ours": await ours(quick, rng)}
                seconds["canary"] = float((quick.scratch / "canary").read_text())
                seconds["peer"] = await peer(vllm, by_hand / step, model)
                seconds["ours_durable"] = await ours(durable, rng)
                seconds["peer_durable"] = await peer(
                    vllm, by_hand / f"{step}-durable", model, optimizer
                )
                for side, took in seconds.items():
                    taken.setdefault(side, []).append(took * 1000)
                print({side: round(took[-1], 1) for side, took in taken.items()}, file=sys.stderr)
    taken = {side: took[WARM_UP:] for side, took in taken.items()}
    p50 = {side: statistics.median(took) for side, took in taken.items()}
    p99 = {side: quantile(took, 0.99) for side, took in taken.items()}
    report(
        "swap",
        round(p50["ours"], 1),
        round(p50["peer"], 1),
        "stock vLLM by hand: save_pretrained, load_lora_adapter, first token",
        p50["peer"] / p50["ours"],
        "ms",
        ours_p99=round(p99["ours"], 1),
        peer_p99=round(p99["peer"], 1),
        canary=round(p50["canary"], 1),
        ratio_without_canary=round(p50["peer"] / (p50["ours"] - p50["canary"]), 2),
        ours_durable=round(p50["ours_durable"], 1),
        peer_durable=round(p50["peer_durable"], 1),
        ratio_durable=round(p50["peer_durable"] / p50["ours_durable"], 2),
        ours_durable_p99=round(p99["ours_durable"], 1),
        peer_durable_p99=round(p99["peer_durable"], 1),
        steps=STEPS,
    )


if __name__ == "__main__":
    asyncio.run(main())
