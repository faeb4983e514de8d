"""The puzzles of examples/temporal_clue: their clues are true and leave one answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ..rigs.example_modules import load

puzzles = load("temporal_clue/puzzles.py")


@pytest.mark.parametrize("name", ["tiny", "small", "full"])
def test_the_clues_are_enough(name: str) -> None:
    level = puzzles.LEVELS[name]
    for seed in range(3 if name == "full" else 30):
        puzzle = puzzles.make_puzzle(level, seed)
        assert puzzles.solve(puzzle) == {puzzle.answer}
        assert len(puzzles.solve(replace(puzzle, clues=()))) == level.suspects**4


def test_a_tiny_puzzle_has_no_clue_too_many() -> None:
    for seed in range(30):
        puzzle = puzzles.make_puzzle(puzzles.LEVELS["tiny"], seed)
        for left_out in puzzle.clues:
            clues = tuple(clue for clue in puzzle.clues if clue != left_out)
            assert len(puzzles.solve(replace(puzzle, clues=clues))) == 2


def test_the_same_seed_gives_the_same_puzzle_and_others_differ() -> None:
    level = puzzles.LEVELS["small"]
    made = [puzzles.make_puzzle(level, seed) for seed in range(50)]
    puzzles.make_puzzle.cache_clear()
    assert made == [puzzles.make_puzzle(level, seed) for seed in range(50)]
    assert len(set(made)) == 50


def test_no_answer_of_training_is_held_out() -> None:
    level = puzzles.LEVELS["tiny"]
    trained, held_out = (
        {puzzles.make_puzzle(level, seed, held_out=held_out).answer for seed in range(600)}
        for held_out in (False, True)
    )
    assert not trained & held_out
    assert len(trained | held_out) > 200  # of 256


@pytest.mark.parametrize("held_out", [False, True])
def test_answers_are_spread_evenly(held_out: bool) -> None:
    level = puzzles.LEVELS["tiny"]
    answers = [puzzles.make_puzzle(level, seed, held_out=held_out).answer for seed in range(600)]
    for column, names in enumerate(puzzles.NAMES):
        for name in names:
            assert 100 < sum(answer[column] == name for answer in answers) < 200


def test_what_clues_say_is_what_they_rule_out() -> None:
    # Joe: hall, bat, 3; Lee: mill, net, 1, and he did it; Pat: pool, oar, 2
    world = puzzles.World(((0, 0, 0, 2), (1, 1, 1, 0), (2, 2, 2, 1)), 1)
    who, where, what, when = range(4)
    said = {
        "It was Lee.": puzzles.Crime(who, 1, True),
        "It was not in the pool.": puzzles.Crime(where, 2, False),
        "Joe had the bat.": puzzles.Link((who, what), (0, 0), True),
        "Whoever was in the mill did not come at 2.": puzzles.Link((where, when), (1, 1), False),
        "Lee came before Pat.": puzzles.Order(who, (1, 2)),
        "Whoever had the oar came before whoever had the bat.": puzzles.Order(what, (2, 0)),
    }
    for sentence, clue in said.items():
        assert clue.say(puzzles.NAMES) == sentence
        assert clue.holds(world)
    for lie in (
        puzzles.Crime(who, 1, False),
        puzzles.Crime(when, 2, True),
        puzzles.Link((who, where), (0, 1), True),
        puzzles.Order(where, (0, 1)),
    ):
        assert not lie.holds(world)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("Lee mill net 1", [True, True, True, True]),
        ("Because of the pool:\nlee, MILL, bat, 2.\n", [True, True, False, False]),
        ("Lee mill net", [False] * 4),
        ("Lee mill net 1 2", [False] * 4),
        ("", [False] * 4),
    ],
)
def test_the_last_line_is_the_answer(answer: str, right: list[bool]) -> None:
    assert puzzles.Puzzle((), (), ("Lee", "mill", "net", "1")).right(answer) == right
