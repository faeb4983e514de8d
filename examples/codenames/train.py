"""A spymaster and a guesser, both the agent that is trained: neither can win alone.

    python examples/codenames/train.py --control
    python examples/codenames/train.py --provider ssh -o host=gpu --base-model Qwen/Qwen3-4B

On the board lie four words. Two of them are ours, and belong together; only the spymaster knows
which. It says one word that does not lie on the board, and the guesser, in conversations of its
own, points at two words; the first wrong one ends the game. The reward is the share of our words
that were found, for the spymaster's word as for each guess; -0.5 for a word that breaks the rules.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import art_cloud as art
from art_cloud.demo import NO_THINKING, Experiment, run_example

KINDS = {
    "pet": ["cat", "dog"],
    "hue": ["red", "blue"],
    "metal": ["iron", "gold"],
    "tree": ["oak", "fir"],
}
OURS, OTHERS = 2, 2
GROUPS = 16
WARM_UP_GAMES = 1000
HELD_OUT = range(1_000_000, 1_000_300)


@dataclass
class Game:
    """What lies on the board is a function of the seed."""

    seed: int
    kind: str = ""
    ours: list[str] = field(default_factory=list)
    board: list[str] = field(default_factory=list)
    found: int = 0
    broken: bool = False

    def __post_init__(self) -> None:
        chance = random.Random(self.seed)  # noqa: S311
        self.kind, *others = chance.sample(sorted(KINDS), 1 + OTHERS)
        self.ours = KINDS[self.kind]
        self.board = [*self.ours, *(chance.choice(KINDS[kind]) for kind in others)]
        chance.shuffle(self.board)

    def to_spymaster(self) -> art.Message:
        others = [word for word in self.board if word not in self.ours]
        return {
            "role": "user",
            "content": f"Not for: {' '.join(others)}. One word for: {' '.join(self.ours)}",
        }

    def to_guesser(self, clue: str) -> art.Message:
        return {"role": "user", "content": f"{' '.join(self.board)}. Which is {clue}?"}

    def is_clue(self, clue: str) -> bool:
        return clue.isalpha() and clue not in self.board

    def guess(self, word: str) -> bool:
        """Whether the guesser goes on."""
        self.broken = word not in self.board
        if word not in self.ours or self.broken:
            return False
        self.board.remove(word)
        self.found += 1
        return self.found < OURS


async def play(
    model: art.TrainableModel[Any], seed: int, *, step: int | None = None
) -> art.Trajectory:
    """One game. The spymaster's word is the first conversation, each guess one more."""
    game, said = Game(seed), list[art.History]()

    async def ask(message: art.Message) -> str:
        completion = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(step),
            messages=[message],
            max_tokens=8,
            extra_body=NO_THINKING,
            seed=None if step is None else 10 * seed + len(said),
        )
        choice = completion.choices[0]
        said.append(art.History(messages_and_choices=[message, choice]))
        return (choice.message.content or "").strip(" .\n").lower()

    clue = await ask(game.to_spymaster())
    if game.is_clue(clue):
        while game.guess(await ask(game.to_guesser(clue))):
            pass
    else:
        game.broken = True
    return art.Trajectory(
        messages_and_choices=said[0].messages_and_choices,
        additional_histories=said[1:],
        reward=-0.5 if game.broken else game.found / OURS,
        metrics={
            "found": game.found / OURS,
            "won": game.found == OURS,
            "broken": game.broken,
            "named": clue == game.kind,
        },
        metadata={"seed": seed, "clue": clue},
    )


def warm_up(seed: int) -> Iterator[art.Messages]:
    """The guesser knows what the words mean, as any real model does; the spymaster says any."""
    game, chance = Game(seed), random.Random(~seed)  # noqa: S311
    yield [game.to_spymaster(), _says(chance.choice(sorted(KINDS)))]
    for word in chance.sample(game.ours, OURS):
        yield [game.to_guesser(game.kind), _says(word)]
        game.guess(word)


def _says(word: str) -> art.Message:
    return {"role": "assistant", "content": word}


EXPERIMENT = Experiment(
    name="codenames",
    measure="found",
    rollout=play,
    tasks=lambda number: range(number * GROUPS, (number + 1) * GROUPS),
    held_out=HELD_OUT,
    warm_up=[said for seed in range(WARM_UP_GAMES) for said in warm_up(-seed - 1)],
    warm_up_config=art.SFTConfig(learning_rate=3e-3, batch_size=64, epochs=2),
    config=art.TrainConfig(learning_rate=7e-4),
    steps=40,
)

if __name__ == "__main__":
    run_example(EXPERIMENT, "Codenames: a spymaster and a guesser")
