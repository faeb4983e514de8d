"""Tool calls in the Hermes convention, as Qwen writes them: `<tool_call>{json}</tool_call>`.

The convention: https://github.com/NousResearch/Hermes-Function-Calling.
"""

from __future__ import annotations

import json
from typing import NamedTuple

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class ToolCall(NamedTuple):
    name: str
    arguments: str
    """The arguments as the text of a JSON object, as in OpenAI's `function.arguments`."""


def parse_call(inside: str) -> ToolCall | None:
    """The call between two tags, or None if it is not `{"name": str, "arguments": object}`."""
    try:
        call = json.loads(inside)
    except ValueError:
        return None
    if not isinstance(call, dict):
        return None
    name, arguments = call.get("name"), call.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def split_partial(text: str, *needles: str) -> tuple[str, str]:
    """Cut off the longest end of `text` that one of the `needles` could begin with."""
    longest = max((len(needle) for needle in needles), default=0) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(needle.startswith(text[-size:]) for needle in needles):
            return text[:-size], text[-size:]
    return text, ""


class ToolCallParser:
    """Splits a text that arrives in pieces into what is said and what is called.

    Text that may turn out to be part of a call is held back. A malformed or unfinished call is
    text, letter for letter; whitespace around well-formed calls is dropped.
    """

    def __init__(self) -> None:
        self._held = ""
        self._called = False

    def feed(self, piece: str) -> tuple[str, list[ToolCall]]:
        self._held += piece
        said = ""
        calls: list[ToolCall] = []
        while (start := self._held.find(OPEN)) >= 0:
            end = self._held.find(CLOSE, start)
            if end < 0:
                return said + self._say_before(start), calls
            call = parse_call(self._held[start + len(OPEN) : end])
            if call is None:
                said += self._say(end + len(CLOSE))
                continue
            said += self._say_before(start)
            calls.append(call)
            self._called = True
            self._held = self._held[self._held.index(CLOSE) + len(CLOSE) :]
        whole, _ = split_partial(self._held, OPEN)
        return said + self._say_before(len(whole)), calls

    def finish(self) -> str:
        """The pieces that were still held back, now that no call can follow."""
        return self._say(len(self._held.rstrip() if self._called else self._held))

    def _say_before(self, position: int) -> str:
        return self._say(len(self._held[:position].rstrip()))

    def _say(self, size: int) -> str:
        said, self._held = self._held[:size], self._held[size:]
        return said
