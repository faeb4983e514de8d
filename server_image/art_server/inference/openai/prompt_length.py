"""A check of a prompt's length before a tokenizer spends its time on it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from art_cloud.shared.errors import ContextLengthError

LONG = 64 << 10
"""With so many characters, tokenizing a request takes more than milliseconds."""
KEEPING = {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"}
"""Pre-tokenizers that drop nothing of a text, unless they say so."""
COMPOSED = 3
"""How many times shorter Unicode's normal form C makes a text in UTF-8, at most (Unicode Standard
Annex 15 gives the factors of the other direction; three bytes of each jamo become a syllable's)."""


def is_long(content: Any) -> bool:
    """Whether JSON holds more than `LONG` characters and values. Stops counting there."""
    seen, waiting = 0, [content]
    while waiting and seen <= LONG:
        value = waiting.pop()
        seen += len(value) + 1 if isinstance(value, str | list | dict) else 1
        if seen <= LONG:
            if isinstance(value, dict):
                waiting += value.values()
            elif isinstance(value, list):
                waiting += value
    return seen > LONG


@dataclass(frozen=True)
class PromptLength:
    """`text_bytes`: the longest text, in UTF-8, of which the tokenizer may make no more tokens than
    `context_length`; None where its rules let a token stand for any length of text."""

    context_length: int
    text_bytes: int | None

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, context_length: int) -> PromptLength:
        longest = longest_token(tokenizer)
        return cls(context_length, None if longest is None else longest * context_length)

    def check(self, text: str, what: str = "The prompt") -> None:
        """Raise `ContextLengthError` for a text that can't fit, whatever its tokens are."""
        if self.text_bytes is None or len(text) <= self.text_bytes // 4:
            return
        size = len(text.encode(errors="surrogatepass"))
        if size > self.text_bytes:
            raise ContextLengthError(
                f"{what} has {size:,} bytes of text. The model's context length is "
                f"{self.context_length} tokens, which hold {self.text_bytes:,} bytes at most. "
                "Shorten it."
            )


def longest_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The most bytes of text that one token can stand for; None if there may be no such bound.

    There is one for byte-level BPE, and for BPE that falls back to bytes, as long as nothing of the
    text is dropped: each byte is then in just one token.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    rules = json.loads(backend.to_str())
    model = rules["model"]
    splits = [*_steps(rules.get("pre_tokenizer"), "pretokenizers")]
    shrinks = [_shrinks(step) for step in _steps(rules.get("normalizer"), "normalizers")]
    byte_level = any(step["type"] == "ByteLevel" for step in splits)
    drops = (
        model.get("type") != "BPE"
        or not (byte_level or model.get("byte_fallback"))
        or rules.get("truncation") is not None
        or any(step["type"] not in KEEPING or step.get("behavior") == "Removed" for step in splits)
        or any(token["lstrip"] or token["rstrip"] for token in rules["added_tokens"])
    )
    if drops or None in shrinks:
        return None
    # each character of a byte-level token is a byte
    known = (len(token) if byte_level else len(token.encode()) for token in model["vocab"])
    added = (len(token["content"].encode()) for token in rules["added_tokens"])
    return math.prod(filter(None, shrinks)) * max([*known, *added])


def _shrinks(step: Mapping[str, Any]) -> int | None:
    """By which factor a normalizer may shorten a text; None: by any."""
    match step:
        case {"type": "NFC"}:
            return COMPOSED
        case {"type": "Replace", "pattern": {"String": old}, "content": new}:
            return 1 if len(new.encode()) >= len(old.encode()) else None
        case {"type": "Prepend"}:
            return 1
    return None


def _steps(rules: Mapping[str, Any] | None, several: str) -> Iterator[Mapping[str, Any]]:
    """The steps of a normalizer or pre-tokenizer as a flat list, without sequences within
    sequences."""
    if rules is not None and rules["type"] == "Sequence":
        for step in rules[several]:
            yield from _steps(step, several)
    elif rules is not None:
        yield rules
