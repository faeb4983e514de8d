"""Blackjack as an OpenEnv environment: its rules and its server know nothing of art-cloud.

uvicorn blackjack:app --port 8000        # serves it to any OpenEnv client
"""

from __future__ import annotations

import random
from typing import Any

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

SESSIONS = 64
"""Games that are played at once."""


class Move(Action):
    move: str
    """"hit" or "stand"; anything else loses the game."""


class Table(Observation):
    """`reward` is 1 for a game that is won, 0 for a draw, -1 for one that is lost."""

    total: int
    soft: bool
    """Whether an ace counts as 11."""
    dealer: int
    """The card that the dealer shows; an ace is 1."""
    legal: bool = True


class Blackjack(Environment[Move, Table, State]):
    """One player, a deck without end. The dealer stands on 17. The cards follow from the seed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Table:
        self._cards = random.Random(seed)  # noqa: S311
        self._state = State(episode_id=episode_id)
        self._dealer = [self._draw()]
        self._hand = [self._draw(), self._draw()]
        return self._table()

    def step(self, action: Move, timeout_s: float | None = None, **kwargs: Any) -> Table:
        self._state.step_count += 1
        if action.move == "hit":
            self._hand.append(self._draw())
            lost = total(self._hand)[0] > 21
            return self._table(reward=-1) if lost else self._table()
        if action.move != "stand":
            return self._table(reward=-1, legal=False)
        while total(self._dealer)[0] < 17:
            self._dealer.append(self._draw())
        mine, other = total(self._hand)[0], total(self._dealer)[0]
        return self._table(reward=1 if other > 21 else (mine > other) - (mine < other))

    @property
    def state(self) -> State:
        return self._state

    def _draw(self) -> int:
        return min(self._cards.randint(1, 13), 10)

    def _table(self, *, reward: int | None = None, legal: bool = True) -> Table:
        points, soft = total(self._hand)
        return Table(
            total=points,
            soft=soft,
            dealer=self._dealer[0],
            legal=legal,
            reward=reward,
            done=reward is not None,
        )


def total(hand: list[int]) -> tuple[int, bool]:
    """The points of a hand, and whether one of its aces counts as 11."""
    soft = 1 in hand and sum(hand) <= 11
    return sum(hand) + 10 * soft, soft


app = create_fastapi_app(Blackjack, Move, Table, max_concurrent_envs=SESSIONS)
