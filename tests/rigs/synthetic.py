"""Batches of samples whose ids and logprobs are given: the same in every run."""

from __future__ import annotations

import random
from collections.abc import Sequence

from openai.types.chat.chat_completion import Choice

import art_cloud as art
from art_cloud.shared.names import ModelName
from art_cloud.shared.protocol import Sample, TrainGroup
from art_cloud.shared.wire import TrainBatch

VOCABULARY = 512


def sample(rng: random.Random, policy: str, prompt: Sequence[int], length: int = 12) -> Sample:
    return Sample(
        prompt_ids=list(prompt),
        completion_ids=[rng.randrange(VOCABULARY) for _ in range(length)],
        logprobs=[-6.2 + rng.gauss(0, 0.2) for _ in range(length)],
        policy=policy,
    )


def batch(
    name: ModelName,
    seed: int,
    *,
    groups: int = 2,
    rewards: Sequence[float] = (0.0, 1.0, 0.5),
    length: int = 12,
    learning_rate: float = 1e-3,
) -> TrainBatch:
    """`groups` tasks, each with a trajectory of one sample for each reward."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(20)] for _ in range(groups)]
    samples = [sample(rng, str(name.at(0)), prompt, length) for prompt in prompts for _ in rewards]
    each = len(rewards)
    return TrainBatch(
        groups=[
            TrainGroup(rewards=list(rewards), samples=[[number * each + k] for k in range(each)])
            for number in range(groups)
        ],
        samples=samples,
        config=art.TrainConfig(learning_rate=learning_rate),
    )


def as_groups(train: TrainBatch) -> list[art.TrajectoryGroup]:
    """The batch as a script would hold it."""
    return [
        art.TrajectoryGroup(
            art.Trajectory(
                messages_and_choices=[
                    {"role": "user", "content": "."},
                    *(choice(train.samples[index]) for index in indices),
                ],
                reward=reward,
            )
            for reward, indices in zip(group.rewards, group.samples, strict=True)
        )
        for group in train.groups
    ]


def choice(of: Sample) -> Choice:
    return Choice.model_validate(
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "."},
            "sample": of.model_dump(),
        }
    )
