"""Codenames: what lies on the board, and what a clue and a guess do."""

from __future__ import annotations

from ..rigs.example_modules import load

codenames = load("codenames/train.py")


def test_only_the_spymaster_knows_whose_the_words_are() -> None:
    game = codenames.Game(3)
    assert set(game.ours) == set(codenames.KINDS[game.kind])
    assert len(set(game.board)) == codenames.OURS + codenames.OTHERS
    assert set(game.ours) < set(game.board)
    assert str(game.to_spymaster()["content"]).endswith(" ".join(game.ours))
    to_guesser = str(game.to_guesser("clue")["content"])
    assert " ".join(game.board) in to_guesser
    boards = {tuple(codenames.Game(seed).board.index(w) for w in codenames.Game(seed).ours)
              for seed in range(50)}  # fmt: skip
    assert len(boards) > 4, "where our words lie says nothing"


def test_a_clue_is_one_word_that_does_not_lie_on_the_board() -> None:
    game = codenames.Game(3)
    assert game.is_clue(game.kind)
    assert not game.is_clue(game.board[0])
    assert not game.is_clue(f"{game.kind} {game.kind}")
    assert not game.is_clue("")


def test_the_first_wrong_guess_ends_the_game() -> None:
    game = codenames.Game(3)
    other = next(word for word in game.board if word not in game.ours)
    assert game.guess(game.ours[0])
    assert game.ours[0] not in game.board
    assert not game.guess(other)
    assert (game.found, game.broken) == (1, False)


def test_a_word_that_is_not_there_breaks_the_rules() -> None:
    game = codenames.Game(3)
    assert game.guess(game.ours[0])
    assert not game.guess(game.ours[0])
    assert (game.found, game.broken) == (1, True)
    won = codenames.Game(3)
    assert won.guess(won.ours[1])
    assert not won.guess(won.ours[0])
    assert (won.found, won.broken) == (2, False)


def test_the_spymaster_is_not_taught_what_to_say() -> None:
    said = [next(codenames.warm_up(seed)) for seed in range(400)]
    right = sum(
        conversation[1]["content"] == codenames.Game(seed).kind
        for seed, conversation in enumerate(said)
    )
    assert 0.15 < right / 400 < 0.35
