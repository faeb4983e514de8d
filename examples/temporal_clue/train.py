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
from art_cloud.rollouts.trajectory import Message, Messages

NAME, TITLE = "temporal-clue", "Temporal Clue"
STEPS = 24
QUESTIONS = ("who", "where", "what", "when")
GROUPS = 16
WARM_UP = 1500
HELD_OUT = range(1_000_000, 1_000_200)
MAX_TOKENS = 1000
RULES = "Solve the crime. Last line: who where what when, a word each."
OWN = " Each suspect was in a place, had a thing and came at an hour of their own."


def ask(level: Level, puzzle: Puzzle) -> list[Message]:
    rules = RULES if level.kinds == ("direct",) else RULES + OWN
    return [{"role": "system", "content": rules}, {"role": "user", "content": str(puzzle)}]


def temporal_clue(level: Level) -> Experiment[int]:
    async def rollout(
        model: art.TrainableModel[Any], seed: int, *, step: int | None = None
    ) -> art.Trajectory:
        puzzle = make_puzzle(level, seed, held_out=seed in HELD_OUT)
        messages = ask(level, puzzle)
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
        warm_up=[clumsy_answer(level, -seed) for seed in range(1, WARM_UP + 1)]
        if level == LEVELS["tiny"]
        else (),
        warm_up_config=art.SFTConfig(learning_rate=3e-3, batch_size=4),
        config=art.TrainConfig(learning_rate=1.2e-3),
        steps=STEPS,
    )


def clumsy_answer(level: Level, seed: int) -> Messages:
    """The format, and a little of the skill: every second word is right, the others are any name of
    the puzzle that fits."""
    chance = random.Random(seed)  # noqa: S311
    puzzle = make_puzzle(level, seed)
    words = [
        chance.choice((right, chance.choice(names)))
        for right, names in zip(puzzle.answer, puzzle.cast, strict=True)
    ]
    return [*ask(level, puzzle), {"role": "assistant", "content": " ".join(words)}]


if __name__ == "__main__":
    parser = experiment_parser(NAME, TITLE, STEPS)
    parser.add_argument("--level", choices=LEVELS, default="tiny", help="how hard the puzzles are")
    options = parser.parse_args()
    run_example(temporal_clue(LEVELS[options.level]), TITLE, options)
