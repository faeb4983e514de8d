"""Who did it, where, with what, and when? GRPO on puzzles that a generator makes.

Reward: the share of the four questions that are answered right; 0 for anything but four words.

    python examples/temporal_clue/train.py --control
"""

from __future__ import annotations

import random
from statistics import fmean
from typing import Any

from puzzles import LEVELS, Level, Puzzle, make_puzzle

import art_cloud as art
from art_cloud.demo import Experiment, experiment_parser, run_example
from art_cloud.trajectory import Message, Messages

NAME, TITLE = "temporal-clue", "Temporal Clue"
STEPS = 40
QUESTIONS = ("who", "where", "what", "when")
GROUPS = 16
WARM_UP = 2500
HELD_OUT = range(1_000_000, 1_000_300)
MAX_TOKENS = 1000
RULES = """\
Solve the crime. Each suspect was in a place, had a thing and came at an hour of their own. \
Last line: who where what when, a word each."""


def ask(puzzle: Puzzle) -> list[Message]:
    return [{"role": "system", "content": RULES}, {"role": "user", "content": str(puzzle)}]


def temporal_clue(level: Level) -> Experiment[int]:
    async def rollout(
        model: art.TrainableModel[Any], seed: int, *, step: int | None = None
    ) -> art.Trajectory:
        puzzle = make_puzzle(level, seed, held_out=seed in HELD_OUT)
        messages = ask(puzzle)
        completion = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(step),
            messages=messages,
            max_tokens=MAX_TOKENS,
            seed=None if step is None else seed,
        )
        choice = completion.choices[0]
        found = puzzle.right(choice.message.content or "")
        return art.Trajectory(
            messages_and_choices=[*messages, choice],
            reward=fmean(found),
            metrics={"share_right": fmean(found), "solved": all(found)}
            | dict(zip(QUESTIONS, found, strict=True)),
        )

    return Experiment(
        name=NAME,
        measure="share_right",
        rollout=rollout,
        tasks=lambda number: range(number * GROUPS, (number + 1) * GROUPS),
        held_out=HELD_OUT,
        warm_up=[guess(level, -seed) for seed in range(1, WARM_UP + 1)],
        warm_up_config=art.SFTConfig(learning_rate=3e-3, batch_size=16),
        config=art.TrainConfig(learning_rate=7e-4),
        steps=STEPS,
    )


def guess(level: Level, seed: int) -> Messages:
    """A puzzle and four of its names at random: the format of an answer, not the skill."""
    chance = random.Random(seed)  # noqa: S311
    puzzle = make_puzzle(level, seed)
    words = " ".join(map(chance.choice, puzzle.cast))
    return [*ask(puzzle), {"role": "assistant", "content": words}]


if __name__ == "__main__":
    parser = experiment_parser(NAME, TITLE, STEPS)
    parser.add_argument("--level", choices=LEVELS, default="tiny", help="how hard the puzzles are")
    options = parser.parse_args()
    run_example(temporal_clue(LEVELS[options.level]), TITLE, options)
