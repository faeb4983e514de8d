"""The demo's experiment: tic-tac-toe against an opponent that plays at random."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from ..clusters.up import up
from ..model import TrainableModel
from ..rollouts.trajectory import History, Message, Messages, Trajectory
from ..shared.config import SFTConfig, TrainConfig
from ..shared.protocol import EngineName
from .experiment import Experiment, Result, run_experiment
from .game import REWARDS, Game
from .tiny import make_tiny_model

WARM_UP_GAMES = 1000
GROUPS = 16
HELD_OUT = range(1_000_000, 1_000_500)
"""Seeds of the games that are evaluated on: the same before, after and for the control."""


async def play(model: TrainableModel[Any], seed: int, *, step: int | None = None) -> Trajectory:
    """One game. Each move is a conversation of its own: the board, and the move."""
    client = model.openai_client()
    game = Game(seed)
    moves: list[History] = []
    while game.outcome is None:
        board: Message = {"role": "user", "content": str(game)}
        completion = await client.chat.completions.create(
            model=model.get_inference_name(step),
            messages=[board],
            max_tokens=4,
            seed=None if step is None else 10 * seed + len(moves),
        )
        choice = completion.choices[0]
        moves.append(History(messages_and_choices=[board, choice]))
        game.play(choice.message.content or "")
    return Trajectory(
        messages_and_choices=moves[0].messages_and_choices,
        additional_histories=moves[1:],
        reward=REWARDS[game.outcome],
        metrics={
            "win_rate": game.outcome == "win",
            **{outcome: game.outcome == outcome for outcome in ("draw", "loss", "illegal")},
            "moves": len(moves),
        },
        metadata={"seed": seed, "outcome": game.outcome},
    )


def random_moves(seed: int) -> list[Messages]:
    """Conversations of a game of random legal moves: they teach the format, not the skill."""
    game, moves = Game(seed), random.Random(~seed)  # noqa: S311
    conversations: list[Messages] = []
    while game.outcome is None:
        move = str(moves.choice(game.free()))
        conversations.append(
            [{"role": "user", "content": str(game)}, {"role": "assistant", "content": move}]
        )
        game.play(move)
    return conversations


def tic_tac_toe(steps: int) -> Experiment[int]:
    return Experiment(
        name="tic-tac-toe",
        measure="win_rate",
        rollout=play,
        tasks=lambda number: range(number * GROUPS, (number + 1) * GROUPS),
        held_out=HELD_OUT,
        warm_up=[move for seed in range(WARM_UP_GAMES) for move in random_moves(-seed - 1)],
        warm_up_config=SFTConfig(learning_rate=3e-3, batch_size=64),
        config=TrainConfig(learning_rate=7e-4),
        steps=steps,
    )


async def run_demo(
    folder: Path, *, steps: int = 40, control: bool = False, engine: EngineName = "transformers"
) -> Result:
    """Train the agent with a server of its own; `folder` keeps its base model and its steps.

    Raises:
        ConfigError: the server's packages are not installed here.
    """
    base_model = str(make_tiny_model(folder / "model"))
    run = time.strftime("%Y%m%d-%H%M%S")
    cluster = up(
        "local",
        name=f"demo-{run}",
        base_model=base_model,
        store=str(folder / "store"),
        engine=engine,
    )
    return await run_experiment(
        tic_tac_toe(steps), cluster, base_model, run=run, control=control, warm_up=True
    )
