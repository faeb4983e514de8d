"""A plain agent that calls tools until it has an answer: one rollout of it is a trajectory."""

from __future__ import annotations

import json
from typing import Any, cast

from ..model import Model
from ..rollouts.trajectory import Message, Trajectory
from .tools import ToolResult, ToolSession

TURNS = 10


async def run_agent(
    model: Model[Any],
    task: str,
    session: ToolSession | None = None,
    *,
    system: str | None = None,
    step: int | None = None,
    max_turns: int = TURNS,
    max_tokens: int | None = None,
    until: str | None = None,
) -> Trajectory:
    """Let `model` work on `task` with the tools of `session`. The caller sets the reward.

    It ends with an answer that calls no tool, after `max_turns` answers, or where the context is
    full. Metrics: `turns`, `tool_calls`, `tool_errors`, `answered` (1 if it ended by itself).

    Args:
        step: the weights to sample from; None: the newest at each request.
        max_tokens: of each answer; None: what the server allows.
        until: the tool that gives the answer: its call is the last one.

    Raises:
        openai.APIError: the model does not answer.
        ServerUnavailableError: the tools' server is gone.
    """
    import openai

    system_message: list[Any] = [{"role": "system", "content": system}] if system else []
    trajectory = Trajectory(
        messages_and_choices=[*system_message, {"role": "user", "content": task}],
        tools=(session.tools if session else None) or None,
        metadata={"task": task},
        metrics={"turns": 0, "tool_calls": 0, "tool_errors": 0, "answered": 0},
    )
    request: dict[str, Any] = {"model": model.get_inference_name(step)}
    if trajectory.tools:
        request["tools"] = trajectory.tools
    if max_tokens is not None:
        request["max_tokens"] = max_tokens
    metrics = trajectory.metrics
    while metrics["turns"] < max_turns:
        try:
            completion = await model.openai_client().chat.completions.create(
                messages=trajectory.messages(), **request
            )
        except openai.BadRequestError as error:
            if not metrics["turns"] or error.code != "context_length_exceeded":
                raise
            trajectory.log("The context is full.")
            break
        choice = completion.choices[0]
        trajectory.messages_and_choices.append(choice)
        metrics["turns"] += 1
        if session is None or not choice.message.tool_calls:
            metrics["answered"] = int(choice.finish_reason != "length")
            break
        for call in choice.message.tool_calls:
            result = await _call(session, call)
            metrics["tool_calls"] += 1
            metrics["tool_errors"] += result.failed
            message = {"role": "tool", "tool_call_id": call.id, "content": result.text}
            trajectory.messages_and_choices.append(cast(Message, message))
        if until in [call.function.name for call in choice.message.tool_calls]:
            metrics["answered"] = 1
            break
    return trajectory.finish()


async def _call(session: ToolSession, call: Any) -> ToolResult:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except ValueError as error:
        return ToolResult(f"The arguments are not JSON: {error}", failed=True)
    if not isinstance(arguments, dict):
        return ToolResult("The arguments are not a JSON object.", failed=True)
    return await session.call(call.function.name, arguments)
