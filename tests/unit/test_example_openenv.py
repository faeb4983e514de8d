"""Blackjack: its rules, and its server as OpenEnv's client sees it."""

from __future__ import annotations

import asyncio
from types import ModuleType
from typing import Any

import pytest

from ..rigs.example_modules import load
from .stand_in import serve


@pytest.fixture(scope="module")
def blackjack() -> ModuleType:
    return load("openenv/blackjack.py")


@pytest.mark.parametrize(
    ("hand", "points"),
    [
        ([10, 9], (19, False)),
        ([1, 10], (21, True)),
        ([1, 1], (12, True)),
        ([1, 1, 10], (12, False)),
        ([10, 10, 5], (25, False)),
    ],
)
def test_an_ace_counts_as_11_while_it_can(
    blackjack: ModuleType, hand: list[int], points: tuple[int, bool]
) -> None:
    assert blackjack.total(hand) == points


def play(blackjack: ModuleType, hand: list[int], dealer: list[int], *moves: str) -> Any:
    game = blackjack.Blackjack()
    game.reset(seed=0)
    game._hand, game._dealer = hand, dealer
    for move in moves:
        table = game.step(blackjack.Move(move=move))
    return table


@pytest.mark.parametrize(
    ("hand", "dealer", "reward"),
    [([10, 10], [10, 9], 1), ([10, 8], [10, 8], 0), ([10, 7], [10, 9], -1)],
)
def test_the_higher_hand_wins(
    blackjack: ModuleType, hand: list[int], dealer: list[int], reward: int
) -> None:
    table = play(blackjack, hand, dealer, "stand")
    assert (table.reward, table.done, table.legal) == (reward, True, True)


def test_more_than_21_and_what_is_no_move_lose(blackjack: ModuleType) -> None:
    bust = play(blackjack, [10, 10], [10], "hit", "hit", "hit")
    assert (bust.reward, bust.done) == (-1, True)
    assert bust.total > 21
    nonsense = play(blackjack, [10, 10], [10], "fold")
    assert (nonsense.reward, nonsense.done, nonsense.legal) == (-1, True, False)


async def test_sessions_are_games_of_their_own_and_a_seed_repeats_one(
    blackjack: ModuleType,
) -> None:
    from openenv.core import GenericEnvClient  # slow, so not while tests are collected

    async def game(url: str, seed: int) -> list[Any]:
        async with GenericEnvClient(base_url=url) as environment:
            seen = [await environment.reset(seed=seed)]
            while not seen[-1].done:
                seen.append(await environment.step({"move": "hit"}))
        return [(result.observation["total"], result.reward) for result in seen]

    with serve(blackjack.app, lifespan="on") as url:
        first, again, *others = await asyncio.gather(*(game(url, s) for s in (7, 7, 8, 9, 10)))
    assert first == again
    assert any(other != first for other in others)
    assert first[-1][1] == -1
