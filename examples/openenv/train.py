"""An OpenEnv environment, over its own protocol: the agent learns not to bust in blackjack.

    python examples/openenv/train.py --control
    python examples/openenv/train.py --provider ssh -o host=gpu --base-model Qwen/Qwen3-4B

The environment (blackjack.py) is a server of its own; each rollout has a session with it, through
OpenEnv's client. The reward is the environment's: 1 for a game that is won, 0 for a draw, -1 for
one that is lost, or for a move that is none.
"""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from blackjack import SESSIONS, app
from openenv.core import GenericEnvClient

import art_cloud as art
from art_cloud.demo import NO_THINKING, Experiment, run_example

MOVES = ("hit", "stand")
GROUPS = 16
WARM_UP = 2000
HELD_OUT = range(1_000_000, 1_001_000)
START_SECONDS = 60.0


class Player:
    """Plays at the environment that answers at `url`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._seats = asyncio.Semaphore(SESSIONS)

    async def play(
        self, model: art.TrainableModel[Any], seed: int, *, step: int | None = None
    ) -> art.Trajectory:
        """One game. Each decision is a conversation of its own: the table, and the move."""
        decisions: list[art.History] = []
        async with self._seats, GenericEnvClient(base_url=self._url) as environment:
            result = await environment.reset(seed=seed)
            while not result.done:
                table = describe(result.observation)
                completion = await model.openai_client().chat.completions.create(
                    model=model.get_inference_name(step),
                    messages=[table],
                    max_tokens=8,
                    extra_body=NO_THINKING,
                    seed=None if step is None else 10 * seed + len(decisions),
                )
                choice = completion.choices[0]
                decisions.append(art.History(messages_and_choices=[table, choice]))
                move = (choice.message.content or "").strip(" .\n").lower()
                result = await environment.step({"move": move})
        reward = float(result.reward or 0.0)
        return art.Trajectory(
            messages_and_choices=decisions[0].messages_and_choices,
            additional_histories=decisions[1:],
            reward=reward,
            metrics={
                "win_rate": reward > 0,
                "draws": reward == 0,
                "busts": result.observation["total"] > 21,
                "illegal": not result.observation["legal"],
                "decisions": len(decisions),
            },
            metadata={"seed": seed},
        )


def describe(table: dict[str, Any]) -> art.Message:
    hand = f"{'soft ' if table['soft'] else ''}{table['total']}"
    return {
        "role": "user",
        "content": f"Blackjack. Dealer: {table['dealer']}. You: {hand}. hit or stand?",
    }


def warm_up(seed: int) -> art.Messages:
    """A move at random: the format, not the skill."""
    chance = random.Random(seed)  # noqa: S311
    soft = chance.random() < 0.2
    total = chance.randint(12 if soft else 4, 21)
    table = {"soft": soft, "total": total, "dealer": chance.randint(1, 10)}
    return [describe(table), {"role": "assistant", "content": chance.choice(MOVES)}]


@contextmanager
def environment() -> Iterator[str]:
    """The environment's server, on loopback; its URL. Any other OpenEnv server would do."""
    listener = socket.create_server(("127.0.0.1", 0))
    # OpenEnv 0.3 logs a traceback for each session that its client closes
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    deadline = time.monotonic() + START_SECONDS
    try:
        while not server.started:
            if time.monotonic() > deadline or not thread.is_alive():
                raise TimeoutError("The environment's server did not start.")
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def experiment(url: str) -> Experiment[int]:
    return Experiment(
        name="openenv",
        measure="win_rate",
        rollout=Player(url).play,
        tasks=lambda number: range(number * GROUPS, (number + 1) * GROUPS),
        held_out=HELD_OUT,
        warm_up=[warm_up(seed) for seed in range(WARM_UP)],
        warm_up_config=art.SFTConfig(learning_rate=3e-3, batch_size=64),
        config=art.TrainConfig(learning_rate=7e-4),
        steps=15,
    )


if __name__ == "__main__":
    with environment() as url:
        run_example(experiment(url), "Blackjack in an OpenEnv environment")
