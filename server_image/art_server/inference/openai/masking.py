"""Which requests are sampled from another distribution than the model's own."""

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
"""Parameters, OpenAI's and vLLM's, that change which token is drawn, unless they are one of these.
Temperature is none of them: a sample says what it was. Nor are top-p and top-k: they cut what is
drawn from, not the logprobs that are told of it.
"""


def is_masked(body: Mapping[str, Any]) -> bool:
    """Whether the samples of the request `body` are masked, as `Sample.masked` means it."""
    return any(
        body.get(name) is not None and body[name] not in neutral
        for name, neutral in NEUTRAL.items()
    )
