"""Warm-up, evaluation, GRPO, evaluation: the loop that every agent is trained with, in full.

With `control`, a copy of the warmed-up agent goes through the same with its rewards permuted within
each group. What the two differ by is what was learned from the reward, and from nothing else.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from ..backend import Backend
from ..cluster import up
from ..config import SFTConfig, TrainConfig
from ..errors import ConfigError
from ..model import TrainableModel
from ..progress import progress, say
from ..rollout import gather_trajectories, gather_trajectory_groups
from ..trajectory import History, Message, Messages, Trajectory, TrajectoryGroup
from .game import REWARDS, Game, Outcome

PROJECT = "tic-tac-toe"
STEPS = 40
WARM_UP_GAMES = 1000
WARM_UP = SFTConfig(learning_rate=3e-3, batch_size=64)
GROUPS, GROUP_SIZE = 16, 8
TRAIN = TrainConfig(learning_rate=7e-4)
HELD_OUT = range(1_000_000, 1_000_500)
"""Seeds of the games that are evaluated on: the same before, after and for the control."""


@dataclass
class Curve:
    """How one agent did: on the held-out games before and after, and while it learned."""

    before: Counter[Outcome] = field(default_factory=Counter)
    after: Counter[Outcome] = field(default_factory=Counter)
    by_step: list[float] = field(default_factory=list)
    """Win rate of the games that each step was trained on, sampled before the step."""


@dataclass
class DemoResult:
    trained: Curve
    control: Curve | None
    steps: int
    seconds: float

    def summary(self) -> dict[str, float]:
        """`win_rate_before`, `win_rate_after`, `steps`, `seconds`, and `win_rate_control`."""
        result = {
            "win_rate_before": win_rate(self.trained.before),
            "win_rate_after": win_rate(self.trained.after),
            "steps": self.steps,
            "seconds": round(self.seconds, 1),
        }
        if self.control is not None:
            result["win_rate_control"] = win_rate(self.control.after)
        return result


def win_rate(outcomes: Counter[Outcome]) -> float:
    return outcomes["win"] / outcomes.total()


async def play(model: TrainableModel[Any], seed: int, step: int | None = None) -> Trajectory:
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
        metrics={"win": game.outcome == "win", "moves": len(moves)},
        metadata={"seed": seed, "outcome": game.outcome},
    )


def random_moves(seed: int) -> list[Messages]:
    """A game of legal moves at random, a conversation each: the format, not the skill."""
    game, moves = Game(seed), random.Random(~seed)  # noqa: S311
    conversations: list[Messages] = []
    while game.outcome is None:
        move = str(moves.choice(game.free()))
        conversations.append(
            [{"role": "user", "content": str(game)}, {"role": "assistant", "content": move}]
        )
        game.play(move)
    return conversations


async def evaluate(model: TrainableModel[Any], label: str) -> Counter[Outcome]:
    """Play the held-out games with the newest weights, and keep the result beside their step."""
    step = await model.get_step()
    games = await gather_trajectories(
        (play(model, seed, step) for seed in HELD_OUT), pbar_desc=label
    )
    await model.log(games, split="val", step=step)
    return outcomes(games)


def outcomes(games: Iterable[Trajectory]) -> Counter[Outcome]:
    return Counter(cast(Outcome, game.metadata["outcome"]) for game in games)


async def learn(
    backend: Backend, model: TrainableModel[Any], curve: Curve, steps: int, *, permute: bool
) -> None:
    """`steps` of GRPO on games that are new in each; `permute` shuffles the rewards of a group."""
    shuffle = random.Random(0)  # noqa: S311
    with progress(f"{model.name}: GRPO steps", steps) as bar:
        for number in range(steps):
            seeds = range(number * GROUPS, (number + 1) * GROUPS)
            groups = await gather_trajectory_groups(
                (TrajectoryGroup(play(model, seed) for _ in range(GROUP_SIZE)) for seed in seeds),
                pbar_desc="rollouts",
            )
            rate = win_rate(outcomes(game for group in groups for game in group))
            curve.by_step.append(rate)
            if permute:
                for group in groups:
                    rewards = [game.reward for game in group]
                    shuffle.shuffle(rewards)
                    for game, reward in zip(group, rewards, strict=True):
                        game.reward = reward
            await backend.train(model, groups, TRAIN)
            bar.update(number + 1, note=f"win rate {rate:.0%}")


async def run_demo(
    folder: Path, *, steps: int = STEPS, control: bool = False, engine: str = "transformers"
) -> DemoResult:
    """Train the agent with a server of its own; `folder` keeps its base model and its steps.

    Raises:
        ConfigError: the server's packages are not installed here.
    """
    started = time.perf_counter()
    base_model = str(_make_base_model(folder / "model"))
    run = time.strftime("%Y%m%d-%H%M%S")
    agent: TrainableModel[Any] = TrainableModel(
        name=f"agent-{run}", project=PROJECT, base_model=base_model
    )
    copy: TrainableModel[Any] = TrainableModel(
        name=f"control-{run}", project=PROJECT, base_model=base_model
    )
    trained, permuted = Curve(), Curve()
    async with up(
        "local",
        name=f"demo-{run}",
        base_model=base_model,
        store=str(folder / "store"),
        engine=engine,
    ) as backend:
        await agent.register(backend)
        examples = [move for seed in range(WARM_UP_GAMES) for move in random_moves(-seed - 1)]
        await backend.train_sft(agent, examples, WARM_UP)
        trained.before = permuted.before = await evaluate(agent, "held-out games before")
        say(f"The agent wins {win_rate(trained.before):.0%} of {len(HELD_OUT)} held-out games.")
        if control:
            await backend.checkpoints(agent).fork(str(copy.full_name))
            await copy.register(backend)
        await learn(backend, agent, trained, steps, permute=False)
        trained.after = await evaluate(agent, "held-out games after")
        say(f"The agent wins {win_rate(trained.after):.0%} of them now.")
        if control:
            await learn(backend, copy, permuted, steps, permute=True)
            permuted.after = await evaluate(copy, "held-out games, control")
    seconds = time.perf_counter() - started
    return DemoResult(trained, permuted if control else None, steps, seconds)


def _make_base_model(folder: Path) -> Path:
    missing = [name for name in ("art_server", "torch", "matplotlib") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"The demo trains and plots on this machine, and {', '.join(missing)} is not "
            "installed here: pip install 'art-cloud[demo]'."
        )
    # a model this small is faster on one thread, and the server inherits it
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not (folder / "config.json").exists():
        say("Making a small language model of 1.7 M parameters ...")
        command = [sys.executable, "-m", "art_server.tiny_model", str(folder)]
        subprocess.run(command, check=True, capture_output=True)
    return folder
