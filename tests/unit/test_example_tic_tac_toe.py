"""The games of examples/tic_tac_toe; the rules themselves are tested with the demo."""

from __future__ import annotations

import pytest

from art_cloud.demo.game import Game

from ..rigs.example_modules import load

train = load("tic_tac_toe/train.py")


def test_an_answer_is_played() -> None:
    game = Game(0)
    game.move(" \x1e5\n")
    game.answer(" 1\n")
    assert (game.squares[4], game.squares[0]) == ("X", "O")


@pytest.mark.parametrize("blunder", ["5", "0", "none", "\x1e9 2", "\u0669", ""])
def test_what_is_no_free_square_is_replaced(blunder: str) -> None:
    game = Game(0)
    game.move("5")
    game.answer(blunder)
    assert sorted(game.squares) == [*[""] * 7, "O", "X"]


def test_the_opponent_sees_itself_as_x() -> None:
    game = Game(0, squares=["X", "", "", "", "O", "", "", "", "X"])
    assert str(game).translate(train.OTHER_SIDE) == "O 2 3 | 4 X 6 | 7 8 O"


@pytest.mark.parametrize("begins", [0, 1])
def test_warm_up_games_are_legal_to_their_end(begins: int) -> None:
    for seed in range(begins, 20, 2):
        game = Game(seed)
        if seed % 2:
            game.answer()
        for *_, board, move in train.random_moves(seed):
            assert board["content"] == str(game)
            assert game.outcome is None
            game.play(move["content"])
        assert game.outcome in ("win", "draw", "loss")


@pytest.mark.parametrize(
    ("opponent", "step", "version"),
    [("random", 9, None), ("first", 9, 1), ("first", 1, 1), ("first", 0, 0), ("earlier", 9, 5)],
)
async def test_who_plays_the_other_side(opponent: str, step: int, version: int | None) -> None:
    model = train.art.TrainableModel(name="agent", project="games", base_model="tiny")
    assert await train.opponent_step(model, train.Task(0, opponent), step) == version


def test_held_out_games_are_never_trained_on() -> None:
    held_out = {task.seed for task in train.HELD_OUT}
    for number in range(1000):
        seeds = {task.seed for task in (*train.tasks(number), *train.watched(number))}
        assert not held_out & seeds
