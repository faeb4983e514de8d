"""Which steps of a model stay, and the removal of the others."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress

from ..shared.config import Retention
from ..shared.errors import NotFoundError
from ..shared.protocol import CheckpointInfo
from .checkpoints import Checkpoints, best


def to_remove(
    retention: Retention, infos: Sequence[CheckpointInfo], keep: Collection[int] = ()
) -> list[int]:
    """The steps among `infos` (in order) that no rule keeps, and that are not in `keep`.

    Raises:
        NotFoundError: no step has the metric of `keep_best`: there is no telling which is best.
    """
    steps = [info.step for info in infos]
    kept = {*keep, *steps[:1], *steps[-1:]}
    if retention.keep_last is not None:
        kept.update(steps[-retention.keep_last :])
    if retention.keep_every is not None:
        kept.update(step for step in steps if step % retention.keep_every == 0)
    if retention.keep_best is not None:
        kept.add(best(infos, retention.keep_best).step)
        measured = [info.step for info in infos if retention.keep_best in info.metrics]
        kept.update(step for step in steps if step > measured[-1])
    return [step for step in steps if step not in kept]


def prune(
    checkpoints: Checkpoints,
    retention: Retention,
    *,
    keep: Collection[int] = (),
    dry_run: bool = False,
) -> list[CheckpointInfo]:
    """Remove the steps that no rule keeps. Their blobs go with the next garbage collection.

    Beside the newest and the oldest step, those in `keep` and those that were forked stay.

    Returns:
        What was removed or, in a dry run, would be.
    """
    logged = "/" in (retention.keep_best or "")  # how what was logged is named
    infos = checkpoints.infos(logged=logged)
    steps = set(to_remove(retention, infos, {*keep, *checkpoints.forked()}))
    going = checkpoints.with_logged([info for info in infos if info.step in steps])
    if not dry_run:
        for step in sorted(steps):
            with suppress(NotFoundError):  # somebody else prunes too
                checkpoints.delete(step)
    return going
