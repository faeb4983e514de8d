"""Conversations that a judge has to score."""

from __future__ import annotations

from typing import Any

import art_cloud as art

from .openai_server import (
    KEY,
    OpenAIServer,
    Shown,
)

SYSTEM: Any = {"role": "system", "content": "You answer questions about a very long text. " * 20}
QUESTION: Any = {"role": "user", "content": "How good are you?"}


def quality(shown: Shown) -> float:
    """The number that a trajectory ends with."""
    return float(shown.text)


def conversation(answer: object) -> Any:
    return [SYSTEM, QUESTION, {"role": "assistant", "content": str(answer)}]


def group_of(*answers: object, **more: Any) -> art.TrajectoryGroup:
    return art.TrajectoryGroup(
        [art.Trajectory(messages_and_choices=conversation(a), reward=0.25) for a in answers], **more
    )


async def ask(
    judge: OpenAIServer, group: art.TrajectoryGroup, **options: Any
) -> art.TrajectoryGroup:
    reached = {"base_url": judge.url, "api_key": KEY}
    return await art.ruler_score_group(group, "a-judge", **{**reached, **options})


async def rewards(judge: OpenAIServer, *answers: object, **options: Any) -> list[float]:
    return [t.reward for t in await ask(judge, group_of(*answers), **options)]
