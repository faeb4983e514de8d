"""OpenAI's answers and chunks, each choice with its `sample`, from the news of the scheduler."""

from __future__ import annotations

import time
import uuid
from typing import Any, Literal

from art_cloud.shared.protocol import Sample

from ..openai.tool_calls import ToolCall, ToolCallParser
from .detokenize import INCOMPLETE, Decode
from .generation import Piece, Row, Token


class Responder:
    """The answer to one request. `model` is the policy that serves it.

    `choice` and `delta` share one path per choice: a whole answer is a stream of a single piece.
    """

    def __init__(
        self,
        kind: Literal["chat", "text"],
        model: str,
        decode: Decode,
        *,
        parse_tools: bool,
        logprobs: bool,
    ) -> None:
        self._chat = kind == "chat"
        self._model = model
        self._decode = decode
        self._parse_tools = parse_tools
        self._logprobs = logprobs
        self._id = ("chatcmpl-" if self._chat else "cmpl-") + uuid.uuid4().hex
        self._created = int(time.time())
        self._parsers: dict[int, ToolCallParser] = {}
        self._called: dict[int, int] = {}
        self._offsets: dict[int, int] = {}

    def whole(self, pieces: list[Piece], prompt_tokens: int) -> dict[str, Any]:
        choices = [self._choice(piece) for piece in sorted(pieces, key=lambda p: p.row.index)]
        return self._envelope("chat.completion" if self._chat else "text_completion", choices) | {
            "usage": usage(prompt_tokens, [piece.row for piece in pieces])
        }

    def opening(self, index: int) -> dict[str, Any]:
        """The first chunk of a choice in a chat."""
        delta = {"role": "assistant", "content": ""}
        return self._chunk(
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        )

    def chunk(self, piece: Piece) -> dict[str, Any] | None:
        """The next chunk of a choice; None where all of the piece is held back."""
        text, calls = self._split(piece)
        index = piece.row.index
        choice: dict[str, Any] = {"index": index}
        if self._chat:
            delta: dict[str, Any] = {"content": text} if text else {}
            if calls:
                first = self._called.get(index, 0) - len(calls)
                delta["tool_calls"] = [
                    {"index": first + i, **_tool_call(call)} for i, call in enumerate(calls)
                ]
            choice["delta"] = delta
        else:
            choice["text"] = text
        choice["logprobs"] = self._logprobs_of(index, piece.tokens) if self._logprobs else None
        choice["finish_reason"] = self._finish_reason(piece)
        if piece.finish_reason is not None:
            choice["sample"] = self._sample(piece.row)
        elif not text and not calls and not piece.tokens:
            return None
        return self._chunk(choice)

    def usage_chunk(self, prompt_tokens: int, rows: list[Row]) -> dict[str, Any]:
        return self._chunk() | {"usage": usage(prompt_tokens, rows)}

    def _choice(self, piece: Piece) -> dict[str, Any]:
        text, calls = self._split(piece)
        choice: dict[str, Any] = {"index": piece.row.index}
        if self._chat:
            message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
            if calls:
                message["content"] = text or None
                message["tool_calls"] = [_tool_call(call) for call in calls]
            choice["message"] = message
        else:
            choice["text"] = text
        choice["logprobs"] = (
            self._logprobs_of(piece.row.index, piece.tokens) if self._logprobs else None
        )
        choice["finish_reason"] = self._finish_reason(piece)
        choice["sample"] = self._sample(piece.row)
        return choice

    def _split(self, piece: Piece) -> tuple[str, list[ToolCall]]:
        if not self._parse_tools:
            return piece.text, []
        index = piece.row.index
        parser = self._parsers.setdefault(index, ToolCallParser())
        text, calls = parser.feed(piece.text)
        if piece.finish_reason is not None:
            text += parser.finish()
        self._called[index] = self._called.get(index, 0) + len(calls)
        return text, calls

    def _finish_reason(self, piece: Piece) -> str | None:
        if piece.finish_reason == "stop" and self._called.get(piece.row.index):
            return "tool_calls"
        return piece.finish_reason

    def _sample(self, row: Row) -> dict[str, Any]:
        return Sample(
            prompt_ids=row.generation.prompt_ids,
            completion_ids=row.ids,
            logprobs=row.logprobs,
            policy=self._model,
            temperature=row.generation.params.temperature,
        ).model_dump()

    def _logprobs_of(self, index: int, tokens: list[Token]) -> dict[str, Any]:
        if self._chat:
            return {
                "content": [
                    self._entry(token.id, token.logprob)
                    | {"top_logprobs": [self._entry(*pair) for pair in token.top]}
                    for token in tokens
                ],
                "refusal": None,
            }
        texts = [self._token_text(token.id) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(text)
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [
                {self._token_text(i): logprob for i, logprob in reversed(token.top)}
                for token in tokens
            ],
            "text_offset": offsets,
        }

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        """The logprob entry of a token. `bytes` is null where the token is only a part of a
        character."""
        text = self._token_text(token_id)
        whole = INCOMPLETE not in text
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}

    def _token_text(self, token_id: int) -> str:
        return self._decode([token_id])

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return self._envelope(kind, list(choices))

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }


def usage(prompt_tokens: int, rows: list[Row]) -> dict[str, int]:
    completion_tokens = sum(len(row.ids) for row in rows)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _tool_call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": "call_" + uuid.uuid4().hex[:24],
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
