"""The rules of examples/game_2048."""

from __future__ import annotations

import pytest

from ..rigs.example_modules import load

train = load("game_2048/train.py")
TINY = train.LEVELS["tiny"]


@pytest.mark.parametrize(
    ("row", "merged", "points"),
    [
        ([0, 0, 0], [0, 0, 0], 0),
        ([0, 2, 0], [2, 0, 0], 0),
        ([2, 0, 2], [4, 0, 0], 4),
        ([2, 2, 2], [4, 2, 0], 4),  # the two that come first
        ([2, 2, 4], [4, 4, 0], 4),  # each tile merges once
        ([4, 4, 4, 4], [8, 8, 0, 0], 16),
        ([2, 4, 2], [2, 4, 2], 0),
    ],
)
def test_a_row_slides_and_merges(row: list[int], merged: list[int], points: int) -> None:
    assert train.merge(row) == (merged, points)


@pytest.mark.parametrize(
    ("direction", "slid"),
    [
        ("L", [[4, 2, 0], [2, 0, 0], [4, 0, 0]]),
        ("R", [[0, 2, 4], [0, 0, 2], [0, 0, 4]]),
        ("U", [[2, 2, 4], [4, 0, 0], [0, 0, 0]]),
        ("D", [[0, 0, 0], [2, 0, 0], [4, 2, 4]]),
    ],
)
def test_a_board_slides_in_each_direction(direction: str, slid: list[list[int]]) -> None:
    board = [[2, 2, 2], [0, 0, 2], [4, 0, 0]]
    assert train.slide(board, direction)[0] == slid
    assert board == [[2, 2, 2], [0, 0, 2], [4, 0, 0]]


def test_tiles_are_repeatable() -> None:
    one, same, other = (train.Game(TINY, seed) for seed in (1, 1, 2))
    assert str(one) == str(same) != str(other)
    for game in (one, same):
        game.play(game.legal()[0])
    assert str(one) == str(same)


@pytest.mark.parametrize("move", ["", "l", "left", "L R", "U"])
def test_what_slides_nothing_is_illegal_and_ends_the_game(move: str) -> None:
    game = train.Game(TINY, 0, [[2, 0, 4], [0, 0, 0], [0, 0, 0]])
    assert game.legal() == ["L", "R", "D"]
    game.play(move)
    assert game.over
    assert game.illegal
    assert game.board == [[2, 0, 4], [0, 0, 0], [0, 0, 0]]
    assert game.reward == -train.PENALTY


def test_the_goal_ends_the_game_and_earns_more_than_any_other_end() -> None:
    game = train.Game(TINY, 0, [[8, 8, 0], [0, 0, 0], [0, 0, 0]])
    game.play(" L\n")
    assert game.largest == TINY.goal
    assert game.over
    assert game.points == 16
    assert game.reward == 1 + 16 / TINY.goal_points


def test_moves_are_limited() -> None:
    game = train.Game(TINY, 0, [[2, 0, 0], [0, 0, 0], [0, 0, 0]], moves=TINY.moves - 1)
    assert not game.over
    game.play("D")
    assert game.over
    assert not game.illegal


@pytest.mark.parametrize("name", train.LEVELS)
def test_a_game_begins_with_the_tiles_of_its_level(name: str) -> None:
    level = train.LEVELS[name]
    board = train.Game(level, 0).board
    assert [len(row) for row in board] == [level.size] * level.size
    assert sum(tile > 0 for row in board for tile in row) == level.tiles


def test_warm_up_games_are_legal_to_their_end() -> None:
    for seed in range(20):
        game = train.Game(TINY, seed)
        for board, move in train.random_moves(TINY, seed):
            assert board["content"] == str(game)
            assert not game.over
            game.play(move["content"])
        assert game.over
        assert not game.illegal
