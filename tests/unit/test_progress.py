"""Bars on a terminal: shared, and gone when their block ends."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from art_cloud.shared import progress


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    monkeypatch.delenv("ART_PROGRESS", raising=False)
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=120, legacy_windows=False)
    monkeypatch.setattr(progress, "console", console)
    monkeypatch.setattr(progress, "_terminal", progress._Terminal())
    return written


def test_two_bars_share_the_terminal(terminal: io.StringIO) -> None:
    with progress.progress("play", total=4) as play:
        with progress.progress("train") as train:
            play.update(1, note="reward 0.5")
            train.update(3, 10)
            tasks = {task.description: task for task in progress._terminal.progress.tasks}
            assert (tasks["play"].completed, tasks["play"].total) == (1, 4)
            assert tasks["play"].fields["note"] == "reward 0.5"
            assert (tasks["train"].completed, tasks["train"].total) == (3, 10)
        play.update(4)
        assert progress._terminal.progress.live.is_started
    assert not progress._terminal.progress.live.is_started
    shown = terminal.getvalue()
    assert "4/4" in shown
    assert "reward 0.5" in shown


def test_a_bar_of_bytes_has_their_units(terminal: io.StringIO) -> None:
    with progress.progress("pull", in_bytes=True) as bar:
        bar.update(1_500_000, 4_000_000)
        bar.update(4_000_000)
    assert "4.0/4.0 MB" in terminal.getvalue()


def test_without_a_terminal_bytes_have_units_too(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.delenv("ART_PROGRESS", raising=False)
    monkeypatch.setattr(progress, "console", Console(file=written))
    with progress.progress("pull", in_bytes=True) as bar:
        bar.update(4_000_000, 4_000_000)
    assert written.getvalue().startswith("pull: 4.0 MB/4.0 MB in ")


def test_without_a_terminal_what_is_over_soon_makes_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written, now = io.StringIO(), [0.0]
    monkeypatch.delenv("ART_PROGRESS", raising=False)
    monkeypatch.setattr(progress, "console", Console(file=written))
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.progress("gather", total=8) as bar:
        for done in range(1, 9):
            bar.update(done)
    assert written.getvalue().splitlines() == ["gather: 8/8 in 0 s"]
    with progress.progress("gather", total=8) as bar:
        for done in range(1, 9):
            now[0] += progress.PAUSE_SECONDS
            bar.update(done)
    assert len(written.getvalue().splitlines()) == 1 + progress.MILESTONES


def test_an_error_in_the_block_ends_the_bar(terminal: io.StringIO) -> None:
    with pytest.raises(ValueError, match="no"), progress.progress("play", total=4):
        raise ValueError("no")
    assert not progress._terminal.progress.live.is_started


def test_it_can_be_turned_off(terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ART_PROGRESS", "0")
    with progress.progress("play", total=4) as bar:
        bar.update(2)
    with progress.progress(None, total=4) as bar:
        bar.update(2)
    assert terminal.getvalue() == ""


def test_words_in_brackets_are_words(terminal: io.StringIO) -> None:
    progress.say("[/nonsense] [bold]stays[/bold]")
    assert "[/nonsense] [bold]stays[/bold]" in terminal.getvalue()
    with progress.progress("train [a]", total=1) as bar:
        bar.update(1, note="[/x]")
    assert "[/x]" in terminal.getvalue()
