"""Progress that a person can see: bars on a terminal, or in a notebook that has ipywidgets; else
lines at milestones.

`ART_PROGRESS=0` turns both off. All goes to standard error, so that output can be piped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec

from rich import filesize
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

MILESTONES = 4
"""How many lines a whole bar prints at most where there is no terminal."""
PAUSE_SECONDS = 10.0
"""Where there is no terminal, a bar that ends sooner prints one line, its last."""

console = Console(stderr=True)


class Bar:
    """The progress of one thing: `done` of `total`, and a few words about it."""

    def __init__(self, description: str, total: float | None, in_bytes: bool = False) -> None:
        self.description = description
        self.total = total
        self.in_bytes = in_bytes
        self.done = 0.0

    def update(
        self, done: float | None = None, total: float | None = None, note: str | None = None
    ) -> None:
        """Update the progress; arguments that are None stay as they were."""
        self.done = self.done if done is None else done
        self.total = self.total if total is None else total
        self._show(note)

    def _show(self, note: str | None) -> None:
        """Draw the bar. This class draws nothing; subclasses do."""


class _Amount(ProgressColumn):
    """ "3/10", or "1.2/3.4 MB 5.6 MB/s"."""

    count, size, rate = MofNCompleteColumn(), DownloadColumn(), TransferSpeedColumn()

    def render(self, task: Task) -> Text:
        if not task.fields["in_bytes"]:
            return self.count.render(task)
        known = bool(task.finished_speed or task.speed)
        return Text(" ").join([self.size.render(task), *([self.rate.render(task)] * known)])


@dataclass
class _Terminal:
    """The display that all bars share: rich draws one at a time."""

    bars: int = 0
    progress: Progress = field(
        default_factory=lambda: Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            _Amount(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("left", style="progress.remaining"),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
        )
    )

    def add(self, bar: Bar) -> TaskID:
        if self.bars == 0:
            self.progress.start()
        self.bars += 1
        return self.progress.add_task(
            bar.description, total=bar.total, note="", in_bytes=bar.in_bytes
        )

    def remove(self, bar: Bar, task: TaskID) -> None:
        """The last bar stays on the screen as it ended; one within another makes room."""
        self.bars -= 1
        if self.bars == 0:
            if bar.total is None:
                self.progress.update(task, visible=False)
            self.progress.stop()
        self.progress.remove_task(task)


_terminal = _Terminal()


class _TerminalBar(Bar):
    def __init__(self, description: str, total: float | None, in_bytes: bool = False) -> None:
        super().__init__(description, total, in_bytes)
        self.note = ""
        self.task = _terminal.add(self)

    def _show(self, note: str | None) -> None:
        self.note = self.note if note is None else note
        _terminal.progress.update(self.task, completed=self.done, total=self.total, note=self.note)


class _LineBar(Bar):
    def __init__(self, description: str, total: float | None, in_bytes: bool = False) -> None:
        super().__init__(description, total, in_bytes)
        self.start = self.shown_at = time.monotonic()
        self.reached = 0
        self.shown = 0.0
        """The share that was done when the last line was printed."""
        self.note: str | None = None

    def _show(self, note: str | None) -> None:
        self.note = note or self.note
        milestone = int(MILESTONES * self.done / self.total) if self.total else 0
        if milestone > self.reached and time.monotonic() - self.shown_at >= PAUSE_SECONDS:
            self.reached = milestone
            self.print()

    def print(self) -> None:
        if not self.total or self.done == self.shown:
            return
        self.shown, self.shown_at = self.done, time.monotonic()
        done, total = (
            filesize.decimal(int(amount)) if self.in_bytes else f"{amount:g}"
            for amount in (self.done, self.total)
        )
        words = f"{self.description}: {done}/{total} in {self.shown_at - self.start:.0f} s"
        say(", ".join(filter(None, [words, self.note])))


def enabled() -> bool:
    return os.environ.get("ART_PROGRESS", "1") != "0"


@contextmanager
def progress(
    description: str | None, total: float | None = None, *, in_bytes: bool = False
) -> Iterator[Bar]:
    """Show a bar while the block runs; with `description` None, or turned off, show nothing.

    With `in_bytes`, a bar of bytes has their rate too.
    """
    if description is None or not enabled():
        yield Bar("", total)
    elif console.is_terminal or (console.is_jupyter and find_spec("ipywidgets")):
        bar = _TerminalBar(description, total, in_bytes)
        try:
            yield bar
        finally:
            _terminal.remove(bar, bar.task)
    else:
        line = _LineBar(description, total, in_bytes)
        try:
            yield line
        finally:
            line.print()


def say_once(message: str) -> None:
    """Print a line unless it was printed before by this process."""
    if message not in _said:
        _said.add(message)
        say(message)


_said: set[str] = set()


def say(message: str) -> None:
    """Print one line, above the bars if there are any. It is shown even where bars are off."""
    console.print(message, highlight=False, markup=False, soft_wrap=True)
