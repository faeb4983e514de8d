"""Whether a request is sampled from another distribution than the model's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "tool_choice": ("auto", "none"),
}
"""Parameters of OpenAI and vLLM that change which token is drawn, each with the values that change
nothing. Temperature is not among them, as a sample records it; nor are top-p and top-k, which cut
what is drawn from and not the logprobs that are reported."""


def is_masked(body: Mapping[str, Any]) -> bool:
    """Whether the samples of the request `body` are masked, as `Sample.masked` means it."""
    return any(
        body.get(name) is not None and body[name] not in neutral
        for name, neutral in NEUTRAL.items()
    )
