"""Text from token ids, piece by piece: whole characters only, and nothing past a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..openai.tool_calls import split_partial

Decode = Callable[[Sequence[int]], str]
INCOMPLETE = "\ufffd"


class TextStream:
    """The text of one choice.

    A token may be a part of a character, and a tokenizer may write a token differently at the start
    of a text. So a piece is what tokens add to the text of the piece before them, once that ends in
    a whole character (the scheme of text-generation-inference and vLLM).
    """

    def __init__(self, decode: Decode, stops: Sequence[str]) -> None:
        self.stopped = False
        self._decode = decode
        self._stops = stops
        self._before: list[int] = []
        self._before_text = ""
        self._ids: list[int] = []
        self._held = ""

    def push(self, *token_ids: int) -> str:
        """The text that can be shown after these tokens; `stopped` is set when a stop string was
        found."""
        self._ids += token_ids
        text = self._decode(self._before + self._ids)
        if text.endswith(INCOMPLETE) or len(text) == len(self._before_text):
            return ""
        piece = text[len(self._before_text) :]
        self._before, self._ids = self._ids, []
        self._before_text = self._decode(self._before)
        return self._show(piece)

    def finish(self) -> str:
        """The text that was held back, once no token follows."""
        if self.stopped:
            return ""
        rest = self._decode(self._before + self._ids)[len(self._before_text) :]
        shown = self._show(rest)
        return shown if self.stopped else shown + self._held

    def _show(self, piece: str) -> str:
        if not self._stops:
            return piece
        text = self._held + piece
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            return text[: min(found)]
        shown, self._held = split_partial(text, *self._stops)
        return shown
