"""What an agent did: a trajectory of messages and choices, with its reward.

A choice that the art-cloud server returned carries, in its extra field `sample`, the exact ids that
the model saw and sampled. Training uses those and nothing else, so the messages around them may be
of any form.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, cast

from pydantic import BaseModel, BeforeValidator, Field, PlainSerializer

from ..shared.errors import UntrainableError
from ..shared.protocol import Sample

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
    from openai.types.chat.chat_completion import Choice

    Message: TypeAlias = ChatCompletionMessageParam
    MessageOrChoice: TypeAlias = ChatCompletionMessageParam | Choice
    Tools: TypeAlias = list[ChatCompletionToolParam]
else:

    def _restore(value: Any) -> Any:
        """Make a choice that was written as JSON a `Choice` again; leave all else as it is."""
        if isinstance(value, dict) and "role" not in value and "message" in value:
            from openai.types.chat.chat_completion import Choice

            return Choice.model_validate(value)
        return value

    def _dump(value: Any) -> Any:
        return value.model_dump(mode="json") if isinstance(value, BaseModel) else value

    Message = Any
    MessageOrChoice = Annotated[Any, BeforeValidator(_restore), PlainSerializer(_dump)]
    Tools = list[dict[str, Any]]

Messages: TypeAlias = list[Message]
MessagesAndChoices: TypeAlias = list[MessageOrChoice]
MetadataValue: TypeAlias = float | int | str | bool | None
MESSAGE_FIELDS = {"role", "content", "tool_calls", "tool_call_id", "name"}


def is_choice(value: object) -> bool:
    """Whether `value` is a choice of the `openai` package, which need not be imported for this."""
    return (
        isinstance(value, BaseModel)
        and {"message", "finish_reason"} <= type(value).model_fields.keys()
    )


class History(BaseModel):
    """One conversation. A trajectory has one of its own, and one more for each sub-agent."""

    messages_and_choices: MessagesAndChoices = []
    tools: Tools | None = None

    def messages(self) -> Messages:
        """The conversation as plain messages, fit to be sent in the next request."""
        return [_message(item) for item in self.messages_and_choices]

    def samples(self) -> list[Sample]:
        """The samples of this server's choices, in order.

        Raises:
            UntrainableError: something that is neither a message nor a choice was appended.
        """
        found = []
        for place, item in enumerate(self.messages_and_choices):
            if is_choice(item):
                sample = getattr(item, "sample", None)
                if sample is not None:
                    found.append(Sample.model_validate(sample))
            elif not isinstance(item, dict):
                raise UntrainableError(
                    f"messages_and_choices[{place}] is a {type(item).__name__}: neither a message "
                    "(a dict) nor a choice. Append response.choices[0]."
                )
        return found


class Trajectory(History):
    """One rollout and its reward. More conversations of it (sub-agents) go to additional_histories.

    `metrics` are numbers that are averaged over trajectories; `metadata` says what it was about.
    """

    reward: float = 0.0
    metrics: dict[str, float | int | bool] = {}
    metadata: dict[str, MetadataValue] = {}
    additional_histories: list[History] = []
    logs: list[str] = []
    start_time: datetime = Field(default_factory=lambda: datetime.now(UTC), exclude=True)

    def samples(self) -> list[Sample]:
        """The samples of this and of the additional histories, in order."""
        return super().samples() + [
            sample for history in self.additional_histories for sample in history.samples()
        ]

    def log(self, message: str) -> None:
        self.logs.append(message)

    def finish(self) -> Trajectory:
        """Set the metric `duration`: the seconds since this trajectory was made."""
        elapsed = datetime.now(UTC) - self.start_time
        self.metrics["duration"] = elapsed.total_seconds()
        return self

    @asynccontextmanager
    async def track_duration(self, metric_name: str) -> AsyncIterator[None]:
        """Add the seconds spent in the block to the metric `{metric_name}_duration`."""
        start = time.monotonic()
        try:
            yield
        finally:
            key = f"{metric_name}_duration"
            self.metrics[key] = self.metrics.get(key, 0.0) + time.monotonic() - start

    def __str__(self) -> str:
        return (
            f"Trajectory(reward={self.reward}, metrics={self.metrics}, metadata={self.metadata}, "
            f"{len(self.messages_and_choices)} messages)"
        )


class RolloutFailure(BaseModel):
    """An exception that ended a rollout, in a form that can be kept as JSON."""

    type: str
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> RolloutFailure:
        return cls(
            type=type(error).__name__,
            message=str(error),
            traceback="".join(traceback.format_exception(error)),
        )


def _message(item: Any) -> Message:
    """The item as a message for a chat template: `content` is never None."""
    if is_choice(item):
        item = item.message
    if isinstance(item, BaseModel):
        item = item.model_dump(mode="json", exclude_none=True, include=MESSAGE_FIELDS)
    return cast("Message", {**item, "content": item.get("content") or ""})
