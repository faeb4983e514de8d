"""Tokens per second of the local server against `model.generate`, with a LoRA, 32 at once.

Ours is the whole way: a server of its own process, started by `art.up("local")`, and 32 requests at
once through HTTP and the openai client, to the newest step of a registered model. The peer is
Hugging Face's `generate` on one static batch of the same 32 prompts in this process, under a LoRA
of the same rank through PEFT. Both sample at temperature 1, with no end before the last token. Both
sides run in turn, and each side's figure is that of its fastest round.

`streamed` is ours with 32 streams in place of 32 whole answers. Both sides take as many threads as
`OMP_NUM_THREADS` allows; a model this small is faster on one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from art_server.tiny_model import make_tiny_model
from harness import report
from openai import AsyncOpenAI
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

import art_cloud as art
from art_cloud.shared.config import LoRAConfig

REQUESTS, PROMPT_TOKENS, COMPLETION_TOKENS = 32, 64, 128
ROUNDS = 5
TOKENS = REQUESTS * COMPLETION_TOKENS


def make_peer(folder: Path) -> PeftModel:
    lora = LoRAConfig()
    torch.manual_seed(lora.seed)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.target_modules)
    return get_peft_model(model, config).eval()


def run_peer(model: PeftModel, prompts: list[list[int]]) -> None:
    input_ids_BT = torch.tensor(prompts)
    with torch.inference_mode():
        output_BT = model.generate(
            input_ids=input_ids_BT,
            attention_mask=torch.ones_like(input_ids_BT),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=COMPLETION_TOKENS,
            max_new_tokens=COMPLETION_TOKENS,
        )
    assert output_BT.shape == (REQUESTS, PROMPT_TOKENS + COMPLETION_TOKENS)


async def run_ours(client: AsyncOpenAI, name: str, prompts: list[list[int]]) -> None:
    async def one(prompt: list[int]) -> Any:
        return await client.completions.create(
            model=name,
            prompt=prompt,
            max_tokens=COMPLETION_TOKENS,
            extra_body={"ignore_eos": True},
        )

    for answer in await asyncio.gather(*map(one, prompts)):
        assert answer.usage.completion_tokens == COMPLETION_TOKENS
        assert len(answer.choices[0].sample["completion_ids"]) == COMPLETION_TOKENS


async def run_streams(client: AsyncOpenAI, name: str, prompts: list[list[int]]) -> None:
    async def one(prompt: list[int]) -> Any:
        stream = await client.completions.create(
            model=name,
            prompt=prompt,
            max_tokens=COMPLETION_TOKENS,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        return [chunk async for chunk in stream][-1].choices[0]

    for last in await asyncio.gather(*map(one, prompts)):
        assert len(last.sample["completion_ids"]) == COMPLETION_TOKENS


async def main() -> None:
    transformers_logging.disable_progress_bar()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    random.seed(0)
    prompts = [random.choices(range(3, 500), k=PROMPT_TOKENS) for _ in range(REQUESTS)]
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["ART_CLOUD_HOME"] = scratch
        folder = make_tiny_model(Path(scratch) / "tiny")
        peer_model = make_peer(folder)
        model = art.TrainableModel(name="bench", project="bench", base_model=str(folder))
        seconds: dict[str, list[float]] = {"ours": [], "streamed": [], "peer": []}
        async with art.up("local", name="bench", base_model=str(folder)) as backend:
            await model.register(backend)
            client, name = model.openai_client(), model.get_inference_name()
            for round_number in range(ROUNDS + 1):
                start = time.perf_counter()
                await run_ours(client, name, prompts)
                middle = time.perf_counter()
                await run_streams(client, name, prompts)
                streamed = time.perf_counter()
                run_peer(peer_model, prompts)
                end = time.perf_counter()
                if round_number > 0:  # the first one warms both sides up
                    seconds["ours"].append(middle - start)
                    seconds["streamed"].append(streamed - middle)
                    seconds["peer"].append(end - streamed)
                    print({side: round(TOKENS / taken[-1]) for side, taken in seconds.items()})
    speed = {side: round(TOKENS / min(taken)) for side, taken in seconds.items()}
    report(
        "embedded_inference",
        speed["ours"],
        speed["peer"],
        "transformers generate, one static batch with PEFT",
        speed["ours"] / speed["peer"],
        "tokens/s",
        streamed=speed["streamed"],
        threads=torch.get_num_threads(),
        requests=REQUESTS,
        prompt_tokens=PROMPT_TOKENS,
        completion_tokens=COMPLETION_TOKENS,
    )


if __name__ == "__main__":
    asyncio.run(main())
