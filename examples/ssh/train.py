"""From a machine that you can log in to, to a trained agent.

    python examples/ssh/train.py --host gpu-box --store s3://my-bucket/art

The agent learns to name a capital in a sentence of eight words. Run it again: it goes on where
it was.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import AbstractAsyncContextManager
from typing import Any

import art_cloud as art

CAPITALS = {"Peru": "Lima", "Kenya": "Nairobi", "Latvia": "Riga", "Nepal": "Kathmandu"}
FORM = "Answer in one sentence of exactly eight words."
"""Most answers earn a part of the reward: what attempts differ by is what is learned from."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", help="as in `ssh HOST`; without it, this machine")
    parser.add_argument("--store", help="where steps are kept; on a host, one that it can reach")
    parser.add_argument("--base-model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--option", "-o", action="append", default=[], metavar="KEY=VALUE",
                        help="of the provider: -o price_per_hour=2.49")  # fmt: skip
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--smoke", action="store_true", help="one small step: does it work here?")
    return parser.parse_args()


def cluster(arguments: argparse.Namespace) -> AbstractAsyncContextManager[art.Backend]:
    if arguments.host is None:
        return art.up("local", store=arguments.store)
    options = dict(option.split("=", 1) for option in arguments.option)
    return art.up("ssh", host=arguments.host, store=arguments.store, idle="30m", **options)


async def rollout(model: art.TrainableModel[Any], country: str, capital: str) -> art.Trajectory:
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
    reward = 0.5 * float(capital in said) + 0.5 / (1 + abs(len(said.split()) - 8))
    return art.Trajectory(messages_and_choices=[*question, answer.choices[0]], reward=reward)


async def main() -> None:
    arguments = parse_arguments()
    model = art.TrainableModel(
        name="eight-words", project="capitals", base_model=arguments.base_model
    )
    tasks = list(CAPITALS.items())[: 2 if arguments.smoke else None]
    attempts = 2 if arguments.smoke else 8
    async with cluster(arguments) as backend:
        await model.register(backend)
        first = await model.get_step()
        for _ in range(first, first + 1 if arguments.smoke else arguments.steps):
            groups = await art.gather_trajectory_groups(
                art.TrajectoryGroup(rollout(model, *task) for _ in range(attempts))
                for task in tasks
            )
            result = await backend.train(model, groups, learning_rate=5e-5)
            print(f"step {result.step}: reward {result.metrics['reward']:.2f}")


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except KeyboardInterrupt:  # the block of `art.up` has said what is kept
        sys.exit(130)
