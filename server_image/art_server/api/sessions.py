"""Recorded sessions: what an agent asked and was answered, kept in memory until its rollout is
over.

Messages are kept once for each session, however often an agent sends its history, and token ids as
the 32-bit numbers that they are.
"""

from __future__ import annotations

import hmac
import json
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from art_cloud.shared.errors import (
    ArtCloudError,
    AuthError,
    ConflictError,
    NotFoundError,
    RequestTooLargeError,
)
from art_cloud.shared.protocol import RecordedCall, RecordedChoice, Recording, Sample
from art_cloud.shared.wire import PackedSample, TrainBatch, encode_batch

from ..inference import Route

PATH = "/sessions/"
OPEN_AT_ONCE = 4096
SESSION_BYTES = 64 << 20
TOTAL_BYTES = 1 << 30
ABANDONED_SECONDS = 6 * 3600.0
"""After so long without a request a session is dropped: its client was killed."""


class Choices:
    """The choices of one answer, put together from its chunks; a whole answer is one chunk."""

    def __init__(self) -> None:
        self.by_index: dict[int, dict[str, Any]] = {}

    def add(self, choice: dict[str, Any]) -> None:
        entry = self.by_index.setdefault(choice["index"], {"message": {"role": "assistant"}})
        said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        _accumulate(entry["message"], said)
        for key in ("finish_reason", "sample"):
            if choice.get(key) is not None:
                entry[key] = choice[key]


class Session:
    """One rollout's calls of `model`, a model's plain name or one of its policies."""

    def __init__(self, model: str) -> None:
        self.id = uuid4().hex
        self.key = secrets.token_urlsafe(32)
        self.model = model
        self.open = True
        self.bytes = 0
        self.touched = time.monotonic()
        self._running = 0
        self._cancelled = 0
        self._order = 0
        self._texts: dict[str, int] = {}
        self._calls: dict[int, list[RecordedCall]] = {}
        self._samples: list[PackedSample] = []

    @property
    def abandoned(self) -> bool:
        return not self._running and time.monotonic() - self.touched > ABANDONED_SECONDS

    @contextmanager
    def request(self, route: Route, body: dict[str, Any]) -> Iterator[Choices]:
        """Record one request with the choices that the block adds.

        One that ends with an error was answered with that error and leaves no trace; one that is
        cancelled is counted as such.
        """
        if self.bytes > SESSION_BYTES:
            raise RequestTooLargeError(
                f"This session has recorded {SESSION_BYTES >> 20} MiB, as much as one may. End its "
                "`record()` block and go on in another."
            )
        choices = Choices()
        self._order += 1
        order = self._order
        self._running += 1
        try:
            yield choices
            if self.open:
                self._calls[order] = list(self._record(route, body, choices))
        except ArtCloudError:
            raise
        except BaseException:
            self._cancelled += 1
            raise
        finally:
            self._running -= 1
            self.touched = time.monotonic()

    def close(self) -> Recording:
        """End the recording; the session's key is refused from then on. Safe to repeat."""
        if self.open:
            self.open = False
            self._cancelled += self._running
        batch = TrainBatch(groups=[], samples=[packed.unpack() for packed in self._samples])
        return Recording(
            texts=[json.loads(text) for text in self._texts],
            calls=[call for order in sorted(self._calls) for call in self._calls[order]],
            cancelled=self._cancelled,
            samples=encode_batch(batch),
        )

    def _record(self, route: Route, body: dict[str, Any], said: Choices) -> Iterator[RecordedCall]:
        """Record one call for a chat, or one for each prompt of a text completion."""
        tools = self._keep(body["tools"]) if body.get("tools") else None
        each = body.get("n") or 1
        for number, messages in enumerate(_conversations(route, body)):
            yield RecordedCall(
                messages=[self._keep(message) for message in messages],
                tools=tools,
                choices=[
                    self._choice(said.by_index[index])
                    for index in range(number * each, (number + 1) * each)
                ],
            )

    def _choice(self, entry: dict[str, Any]) -> RecordedChoice:
        packed = PackedSample.of(Sample.model_validate(entry["sample"]))
        self._samples.append(packed)
        self.bytes += packed.bytes
        return RecordedChoice(
            message=self._keep(_tidy(entry["message"])),
            finish_reason=entry["finish_reason"],
            sample=len(self._samples) - 1,
        )

    def _keep(self, content: Any) -> int:
        """The place of `content` among the session's texts, where it is added if it is new."""
        text = json.dumps(content, ensure_ascii=False, sort_keys=True)
        if text not in self._texts:
            self._texts[text] = len(self._texts)
            self.bytes += len(text)
        return self._texts[text]


class Sessions:
    """All sessions that are open, and those that were closed and not fetched yet. They live in
    memory."""

    def __init__(self) -> None:
        self._by_id: dict[str, Session] = {}

    def create(self, model: str) -> Session:
        for session in list(self._by_id.values()):
            if session.abandoned:
                del self._by_id[session.id]
        held = sum(session.bytes for session in self._by_id.values())
        if len(self._by_id) >= OPEN_AT_ONCE or held > TOTAL_BYTES:
            raise ConflictError(
                f"{len(self._by_id)} recorded sessions hold {held >> 20} MiB, as much as this "
                "server keeps. End some, or run fewer rollouts at once."
            )
        session = Session(model)
        self._by_id[session.id] = session
        return session

    def get(self, id_: str) -> Session:
        try:
            return self._by_id[id_]
        except KeyError:
            raise NotFoundError(
                f"There is no session {id_[:32]} on this server: it was ended, or the server was "
                "restarted and what it had recorded is lost. Run the rollout again."
            ) from None

    def delete(self, id_: str) -> None:
        self._by_id.pop(id_, None)

    def check_key(self, path: str, authorization: bytes) -> None:
        """Raise `AuthError` unless `authorization` is the key of the open session at `path`."""
        session = self._by_id.get(path.removeprefix(PATH).partition("/")[0])
        key = session.key if session is not None and session.open else secrets.token_urlsafe(32)
        if not hmac.compare_digest(authorization, f"Bearer {key}".encode()):
            raise AuthError(
                "Incorrect API key provided: this is not the key of a session that is open. A key "
                "works for its own session only, and until its `record()` block ends."
            )


def _conversations(route: Route, body: dict[str, Any]) -> list[list[dict[str, Any]]]:
    if route == "chat/completions":
        return [body["messages"]]
    prompt = body["prompt"]
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    return [
        [{"role": "user", "content": one if isinstance(one, str) else json.dumps(one)}]
        for one in (prompt if several else [prompt])
    ]


def _accumulate(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add a chunk's `delta` to what came before it: strings are continued, all else is replaced.

    `tool_calls` become a dict by their index.
    """
    for key, value in delta.items():
        if value is None:
            continue
        if key == "tool_calls":
            calls = message.setdefault(key, {})
            for number, call in enumerate(value):
                _accumulate(calls.setdefault(call.get("index", number), {}), call)
        elif isinstance(value, dict):
            _accumulate(message.setdefault(key, {}), value)
        elif isinstance(value, str) and key not in ("role", "type"):
            message[key] = message.get(key, "") + value
        else:
            message[key] = value


def _tidy(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = [
        {key: value for key, value in call.items() if key != "index"}
        for _, call in sorted(message["tool_calls"].items())
    ]
    return {**message, "tool_calls": calls}
