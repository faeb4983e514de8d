"""The phases of a launch: shown while they last, with the seconds they take, and kept.

A provider names its own (`with phase("image"): ...`) within its `launch` or `endpoint`; what they
take does not count for the phase around them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ..shared.progress import console, enabled, say
from .registry import ClusterRecord, Registry


class Phase:
    """A phase that has begun and not ended."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.within: list[tuple[str, float]] = []
        """The phases inside this one, with their seconds."""

    def had(self, label: str, seconds: float) -> None:
        """Put a phase before those inside this one, which was measured elsewhere."""
        self.within.insert(0, (label, seconds))


_launch: ContextVar[ClusterRecord | str] = ContextVar("launch")
"""The launch that phases belong to: a record that keeps them, or only a name to show."""
_around: ContextVar[Phase | None] = ContextVar("phase", default=None)


@contextmanager
def phases_of(cluster: ClusterRecord | str) -> Iterator[None]:
    """Show the phases in the block under the cluster's name; with a record, keep them too."""
    token = _launch.set(cluster)
    try:
        yield
    finally:
        _launch.reset(token)


@contextmanager
def phase(label: str) -> Iterator[Phase]:
    around, this = _around.get(), Phase(label)
    token = _around.set(this)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    hidden = not (enabled() and console.is_terminal and _name())
    started = time.monotonic()
    try:
        with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
            progress.add_task(f"{_name()}: {label}", total=None)
            yield this
    finally:
        _around.reset(token)
        seconds = time.monotonic() - started - sum(part for _, part in this.within)
        ended = [(label, max(0.0, seconds)), *this.within]
        if around is not None:
            around.within += ended
    if around is None:
        for each, part in ended:
            _keep(each, part)


def _keep(label: str, seconds: float) -> None:
    cluster = _launch.get("")
    if isinstance(cluster, ClusterRecord):
        Registry().add_phase(cluster, label, seconds)
    if enabled() and cluster:
        say(f"{_name()}: {label}, {seconds:.1f} s")


def _name() -> str:
    cluster = _launch.get("")
    return cluster if isinstance(cluster, str) else cluster.name
