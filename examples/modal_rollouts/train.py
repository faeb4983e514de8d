"""Rollouts fan out as Modal functions, and one server trains. Without --modal: all of it here.

    python examples/modal_rollouts/train.py --modal --gpu L4 --store s3://my-bucket/art

The agent learns to name a capital in a sentence of eight words. Run it again: it goes on where
it was.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import art_cloud as art

CAPITALS = {"Peru": "Lima", "Kenya": "Nairobi", "Latvia": "Riga", "Nepal": "Kathmandu"}
FORM = "Answer in one sentence of exactly eight words."
"""Most answers earn a part of the reward: what attempts differ by is what is learned from."""


async def rollout(model: art.TrainableModel[Any], country: str) -> art.Trajectory:
    question: art.Messages = [
        {"role": "user", "content": f"What is the capital of {country}? {FORM}"}
    ]
    answer = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(),
        messages=question,
        max_tokens=32,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    said = answer.choices[0].message.content or ""
    reward = 0.5 * float(CAPITALS[country] in said) + 0.5 / (1 + abs(len(said.split()) - 8))
    return art.Trajectory(messages_and_choices=[*question, answer.choices[0]], reward=reward)


async def group(model: art.TrainableModel[Any], country: str, attempts: int) -> art.TrajectoryGroup:
    """All attempts at one task: what one Modal function does."""
    [found] = await art.gather_trajectory_groups(
        [art.TrajectoryGroup(rollout(model, country) for _ in range(attempts))]
    )
    return found


class Here:
    """Rolls out in this process."""

    async def groups(
        self, model: art.TrainableModel[Any], countries: list[str], attempts: int
    ) -> list[art.TrajectoryGroup]:
        return await asyncio.gather(*(group(model, country, attempts) for country in countries))


@asynccontextmanager
async def rollouts(*, on_modal: bool) -> AsyncIterator[Any]:
    if not on_modal:
        yield Here()
        return
    import fan_out

    async with fan_out.app.run():
        yield fan_out.OnModal()


def cluster(arguments: argparse.Namespace) -> AbstractAsyncContextManager[art.Backend]:
    if not arguments.modal:
        return art.up("local", store=arguments.store)
    return art.up("modal", gpu=arguments.gpu, serverless=True, store=arguments.store, idle="10m")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modal", action="store_true", help="server and rollouts on Modal")
    parser.add_argument("--gpu", default="L4", help="of the server on Modal")
    parser.add_argument("--store", help="where steps are kept; on Modal, one that it can reach")
    parser.add_argument("--base-model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--smoke", action="store_true", help="one small step: does it work here?")
    return parser.parse_args()


async def main() -> None:
    arguments = parse_arguments()
    model = art.TrainableModel(name="fan-out", project="capitals", base_model=arguments.base_model)
    countries = list(CAPITALS)[: 2 if arguments.smoke else None]
    attempts = 2 if arguments.smoke else 8
    async with cluster(arguments) as backend, rollouts(on_modal=arguments.modal) as where:
        await model.register(backend)
        first = await model.get_step()
        for _ in range(first, first + 1 if arguments.smoke else arguments.steps):
            groups = await where.groups(model, countries, attempts)
            result = await backend.train(model, groups, learning_rate=5e-5)
            print(f"step {result.step}: reward {result.metrics['reward']:.2f}")


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except KeyboardInterrupt:  # the block of `art.up` has said what is kept
        sys.exit(130)
