"""The canary: do the weights that the engine serves give the logprobs of those that were trained?

A fixed prompt goes to the engine as any rollout does, through its queue, its adapters and its
prefix cache; what it samples is scored by the trainer. Right weights differ by rounding only.
"""

from __future__ import annotations

from typing import Any

import torch

from art_cloud.errors import CanaryError
from art_cloud.protocol import Sample

from .inference import Engine
from .training import BaseModel, Datum

PROBE = (
    "The quick brown fox jumps over the lazy dog. What is the answer to the question, and why? "
    "You are a helpful agent. Answer with one short line. 0 1 2 3 4 5 6 7 8 9"
)
PROBE_TOKENS = 40
"""More than two blocks of vLLM's prefix cache (16 tokens each): a stale one would show."""
CHOICES, TOKENS = 2, 2
"""What is sampled: a first token after the prompt, and one after a token of the engine's own."""

TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}
"""By the base model's precision, in nats. Rounding alone stays below a tenth of these."""


class Canary:
    """Compares `engine` with what the trainer says of the engine's samples."""

    def __init__(self, base: BaseModel) -> None:
        ids: list[int] = base.tokenizer.encode(PROBE, add_special_tokens=False)
        self.prompt_ids = (ids * PROBE_TOKENS)[:PROBE_TOKENS]
        self.tolerance = TOLERANCES[base.dtype]

    async def sample(self, engine: Engine, policy: str) -> list[Datum]:
        """What the engine samples after the probe, with the logprobs that it gives."""
        body: dict[str, Any] = {
            "model": policy,
            "prompt": self.prompt_ids,
            "n": CHOICES,
            "max_tokens": TOKENS,
            "temperature": 1.0,
            "seed": 0,
            "ignore_eos": True,
        }
        answer = await engine.create("completions", body, policy)
        samples = [Sample.model_validate(choice["sample"]) for choice in answer["choices"]]
        return [
            Datum(sample.prompt_ids, sample.completion_ids, sample.logprobs) for sample in samples
        ]

    def compare(self, policy: str, sampled: list[Datum], scores: list[list[float]]) -> float:
        """The largest difference of the engine's logprobs from the trainer's `scores`, in nats.

        Raises `CanaryError` if it is past the tolerance.
        """
        difference = max(
            abs(engine - trainer)
            for datum, score in zip(sampled, scores, strict=True)
            for engine, trainer in zip(datum.logprobs, score, strict=True)
        )
        if not difference <= self.tolerance:
            raise CanaryError(
                f"{policy}: the engine's logprobs differ from the trainer's by {difference:.3g} "
                f"(tolerance {self.tolerance:g}): it would serve other weights than were trained. "
                "The step was not made, and the one before it is still served. Repeat the call; if "
                "it fails again, restart the server and see its log (`art-cloud logs`)."
            )
        return difference
