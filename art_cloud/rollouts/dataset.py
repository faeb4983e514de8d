"""The order in which a run sees its dataset: a function of the step, so that a run that goes on
after a break has the very batch it would have had."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..shared.errors import ConfigError
from ..shared.progress import progress

T = TypeVar("T")


@dataclass(frozen=True)
class DatasetBatch(Generic[T]):
    """What one step trains on."""

    items: list[T]
    step: int
    """The number of the batch over all epochs, from 0. It equals the step of the model before
    training on it."""
    epoch: int
    epoch_step: int


def iterate_dataset(
    dataset: Sequence[T],
    groups_per_step: int = 1,
    num_epochs: int = 1,
    initial_step: int = 0,
    use_tqdm: bool = True,
    *,
    seed: int = 0,
) -> Iterator[DatasetBatch[T]]:
    """Batches of `groups_per_step` items, each epoch in an order of its own.

        first = await model.get_step()
        for batch in art.iterate_dataset(scenarios, 4, num_epochs=3, initial_step=first):
            ...

    Which items a step gets depends on `dataset`, `groups_per_step`, `seed` and the step, and on
    nothing else: no cursor has to be kept. The last batch of an epoch may be smaller.

    Args:
        initial_step: Go on at this step. Past the last one there are no batches.
        use_tqdm: Show how far it is. (The name is OpenPipe ART's; the bar is art-cloud's own.)
        seed: Of the order; another one gives another order.

    Raises:
        ConfigError: the dataset is empty, or a number is out of its range.
    """
    if not dataset:
        raise ConfigError("iterate_dataset: the dataset is empty.")
    if groups_per_step < 1 or num_epochs < 0 or initial_step < 0:
        raise ConfigError(
            f"iterate_dataset: groups_per_step is {groups_per_step}, num_epochs {num_epochs} and "
            f"initial_step {initial_step}. The first is at least 1, the others at least 0."
        )
    return _batches(dataset, groups_per_step, num_epochs, initial_step, seed, use_tqdm)


def _batches(
    dataset: Sequence[T], size: int, epochs: int, first: int, seed: int, show: bool
) -> Iterator[DatasetBatch[T]]:
    steps_per_epoch = -(-len(dataset) // size)
    last = epochs * steps_per_epoch
    with progress("steps" if show else None, last) as bar:
        bar.update(min(first, last))
        for step in range(first, last):
            epoch, epoch_step = divmod(step, steps_per_epoch)
            places = _order(len(dataset), seed, epoch)[epoch_step * size : (epoch_step + 1) * size]
            yield DatasetBatch([dataset[place] for place in places], step, epoch, epoch_step)
            bar.update(step + 1)


def _order(length: int, seed: int, epoch: int) -> list[int]:
    places = list(range(length))
    random.Random(f"{seed}/{epoch}").shuffle(places)  # noqa: S311
    return places
