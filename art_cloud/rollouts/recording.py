"""Recorded sessions: an agent as it is, in any language or framework, becomes a trajectory.

The server records what passes through a session's own endpoint; here, its calls become
conversations. A call whose messages begin with a conversation (or, where a client wrote them
anew, whose token ids do) goes on with it; any other begins a conversation of its own: a sub-agent,
one of several parallel calls, a history that was compacted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from ..shared.protocol import Recording, Sample
from ..shared.wire import decode_batch
from .trajectory import History, Trajectory

MAX_BYTES = 1 << 30
"""The largest size of a recording's samples after decompression."""


class RecordedTrajectory(Trajectory):
    """A trajectory that the server fills in while its `record()` block runs.

    `base_url` and `api_key` are what an OpenAI-compatible client needs; both stop working with the
    block. The conversation is here once the block has ended; `reward`, `metrics` and `metadata` may
    be set at any time.
    """

    base_url: str = Field("", exclude=True)
    api_key: str = Field("", exclude=True, repr=False)


def fill(trajectory: Trajectory, recording: Recording) -> None:
    """Put the recorded calls into `trajectory`: the first conversation is its own, others are
    additional."""
    samples = decode_batch(recording.samples, MAX_BYTES).unpack().samples
    conversations: list[_Conversation] = []
    for call in recording.calls:
        for number, choice in enumerate(call.choices):
            sample = samples[choice.sample]
            messages = [recording.texts[place] for place in call.messages]
            tools = None if call.tools is None else recording.texts[call.tools]
            found = _continued(conversations, messages, tools, sample) if number == 0 else None
            if found is None:
                found = _Conversation(tools)
                conversations.append(found)
            found.add(messages, recording.texts[choice.message], choice.finish_reason, sample)
    histories = [conversation.history() for conversation in conversations]
    if histories:
        trajectory.messages_and_choices = histories[0].messages_and_choices
        trajectory.tools = histories[0].tools
        trajectory.additional_histories = [*histories[1:], *trajectory.additional_histories]
    if recording.cancelled:
        trajectory.metrics["cancelled_requests"] = recording.cancelled
        trajectory.log(
            f"{recording.cancelled} requests were cancelled before they were answered. What had "
            "been sampled for them is not trained on."
        )


class _Conversation:
    """A conversation that grows: the messages that a client would send to continue it."""

    def __init__(self, tools: Any) -> None:
        self.tools = tools
        self.items: list[Any] = []
        self.keys: list[str] = []
        self.ids: list[int] = []

    def begins(self, keys: Sequence[str]) -> bool:
        """Whether messages with these `keys` continue this conversation."""
        return len(keys) > len(self.keys) and keys[: len(self.keys)] == self.keys

    def begins_ids(self, messages: Sequence[Any], sample: Sample) -> bool:
        """Whether these token ids continue the conversation, where a client wrote its messages in
        another way."""
        roles = [_role(item) for item in self.items]
        return (
            len(messages) > len(roles)
            and roles == [_role(message) for message in messages[: len(roles)]]
            and sample.prompt_ids[: len(self.ids)] == self.ids
        )

    def add(
        self, messages: Sequence[Any], message: Any, finish_reason: str, sample: Sample
    ) -> None:
        from openai.types.chat.chat_completion import Choice

        choice = Choice.model_validate(
            {
                "index": 0,
                "finish_reason": finish_reason,
                "message": message,
                "sample": sample.model_dump(),
            }
        )
        self.items += [*messages[len(self.items) :], choice]
        self.keys = [*map(_key, messages), _key(message)]
        self.ids = sample.prompt_ids + sample.completion_ids

    def history(self) -> History:
        return History(messages_and_choices=self.items, tools=self.tools)


def _continued(
    conversations: list[_Conversation], messages: list[Any], tools: Any, sample: Sample
) -> _Conversation | None:
    """The longest conversation that a call continues; None if it continues none."""
    keys = [_key(message) for message in messages]
    same_tools = [one for one in conversations if one.tools == tools]
    candidates = [one for one in same_tools if one.begins(keys)] or [
        one for one in same_tools if one.begins_ids(messages, sample)
    ]
    return max(candidates, key=lambda conversation: len(conversation.keys), default=None)


def _role(item: Any) -> str:
    return "assistant" if not isinstance(item, dict) else str(item.get("role"))


def _key(message: dict[str, Any]) -> str:
    """The parts of a message that are equal whichever client library wrote it."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content)
    calls = [
        (call.get("id"), call["function"]["name"], _arguments(call["function"]["arguments"]))
        for call in message.get("tool_calls") or []
    ]
    return json.dumps([message.get("role"), content, calls, message.get("tool_call_id")])


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
