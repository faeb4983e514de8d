"""The canary: do the weights that the engine serves give the logprobs of those that were trained?

A fixed prompt goes to the engine as any rollout does, through its queue, its adapters and its
prefix cache. The trainer says what it expects meanwhile; that is kept with the step, so that it is
known of a step that is fetched again too. Right weights differ by rounding only.
"""

from __future__ import annotations

from typing import Any

import torch

from art_cloud.shared.errors import CanaryError
from art_cloud.shared.protocol import Sample

from ..inference import Engine
from ..training import BaseModel

PROBE = "Here are some words that came to nobody's mind before, one after the other. The first one:"
"""It ends where much can follow: a token that is all but certain has the same logprob under most
weights."""
PROBE_TOKENS = 20
"""More than a block of vLLM's prefix cache (16 tokens on a GPU): a stale one would show."""
EXPECTED = 20
"""How many of the likeliest tokens the trainer gives a logprob for."""

TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}
"""By the base model's precision, in nats. Rounding alone stays below a tenth of these."""


class Canary:
    """Compares an engine with what the trainer expects of it."""

    def __init__(self, base: BaseModel) -> None:
        ids: list[int] = base.tokenizer.encode(PROBE, add_special_tokens=False)
        self.prompt_ids = (ids * PROBE_TOKENS)[-PROBE_TOKENS:]
        self.tolerance = TOLERANCES[base.dtype]

    async def sample(self, engine: Engine, policy: str) -> Sample:
        """The engine's likeliest token after the probe."""
        body: dict[str, Any] = {
            "model": policy,
            "prompt": self.prompt_ids,
            "max_tokens": 1,
            "temperature": 0,
            "ignore_eos": True,
        }
        answer = await engine.create("completions", body, policy)
        return Sample.model_validate(answer["choices"][0]["sample"])

    def compare(self, sample: Sample, expected: dict[int, float], advice: str) -> float:
        """How far the logprob of the engine's token is from what the trainer expects, in nats.

        A token that is not among those `expected` has at most the least of their logprobs. Raises
        `CanaryError`, with `advice` on what to do next, past the tolerance.
        """
        [token], [logprob] = sample.completion_ids, sample.logprobs
        difference = abs(logprob - expected.get(token, min(expected.values())))
        if not difference <= self.tolerance:
            raise CanaryError(
                f"{sample.policy}: the engine's logprob of a probe differs from the trainer's by "
                f"{difference:.3g} (tolerance {self.tolerance:g}): it would serve other weights "
                f"than were trained. {advice}"
            )
        return difference
