"""The demo as a user runs it: the whole loop, and whether anything is learned by it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from art_cloud.demo.game import Game
from art_cloud.demo.run import random_moves

ART_CLOUD = Path(sys.executable).with_name("art-cloud")
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_agent_learns_and_its_control_does_not(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            ART_CLOUD,
            "demo",
            "--steps",
            "20",
            "--control",
            "--json",
            "--plot",
            tmp_path / "plot.png",
        ],
        env=os.environ | {"ART_CLOUD_HOME": str(tmp_path / "home")},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result = json.loads(done.stdout.splitlines()[-1])
    print(result)
    assert result["win_rate_after"] >= result["win_rate_before"] + 0.30
    assert result["win_rate_control"] <= result["win_rate_before"] + 0.08
    assert (tmp_path / "plot.png").read_bytes().startswith(PNG)


def test_the_opponent_is_repeatable() -> None:
    boards = []
    for _ in range(2):
        game = Game(7)
        game.play("5")
        boards.append(str(game))
    assert boards[0] == boards[1]
    assert boards[0].count("O") == 1


@pytest.mark.parametrize("move", ["", "0", "10", "x", "5 5"])
def test_what_is_no_move_is_illegal(move: str) -> None:
    game = Game(0)
    game.play(move)
    assert game.outcome == "illegal"


def test_a_taken_square_is_illegal() -> None:
    game = Game(0)
    game.play("5")
    game.play("5")
    assert game.outcome == "illegal"


def test_three_in_a_row_win() -> None:
    game = Game(0, squares=["X", "X", "", "O", "O", "", "", "", ""])
    game.play("3")
    assert game.outcome == "win"


def test_warm_up_games_are_legal_to_their_end() -> None:
    for seed in range(20):
        game = Game(seed)
        for board, move in random_moves(seed):
            assert board["content"] == str(game)
            assert game.outcome is None
            game.play(str(move["content"]))
        assert game.outcome in ("win", "draw", "loss")
