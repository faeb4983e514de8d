"""The data cursor: a function of the step."""

from __future__ import annotations

import random
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

import art_cloud as art

sizes = st.integers(1, 40)


@given(sizes, st.integers(1, 9), st.integers(0, 4), st.integers(0, 60), st.integers())
def test_a_run_that_goes_on_has_the_batches_it_would_have_had(
    length: int, groups_per_step: int, num_epochs: int, step: int, seed: int
) -> None:
    def batches(initial_step: int) -> list[art.DatasetBatch[int]]:
        return list(
            art.iterate_dataset(
                range(length), groups_per_step, num_epochs, initial_step, False, seed=seed
            )
        )

    whole = batches(0)
    random.random()  # whoever else draws random numbers has no part in it
    assert batches(step) == whole[step:]
    assert [batch.step for batch in whole] == list(range(len(whole)))


@given(sizes, st.integers(1, 9))
def test_each_epoch_has_each_item_once_in_its_own_order(length: int, groups_per_step: int) -> None:
    batches = list(art.iterate_dataset(range(length), groups_per_step, 3, use_tqdm=False))
    epochs = [[i for b in batches if b.epoch == n for i in b.items] for n in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(length))] * 3
    if length > 12:
        assert epochs[0] != epochs[1] != epochs[2]
    assert {len(b.items) for b in batches if (b.epoch_step + 1) * groups_per_step <= length} <= {
        groups_per_step
    }
    assert [b.epoch_step for b in batches if b.epoch == 1] == list(range(len(batches) // 3))


def test_the_order_is_the_same_on_every_machine_and_seeds_differ() -> None:
    def first(seed: int) -> list[int]:
        return next(art.iterate_dataset(range(8), 8, use_tqdm=False, seed=seed)).items

    assert first(0) == [0, 2, 1, 4, 6, 7, 3, 5]
    assert first(1) != first(0)


def test_what_cannot_be_iterated_over_is_refused_at_once() -> None:
    with pytest.raises(art.ConfigError, match="empty"):
        art.iterate_dataset([])
    with pytest.raises(art.ConfigError, match="groups_per_step is 0"):
        art.iterate_dataset([1], 0)
    assert list(islice(art.iterate_dataset([1], 1, 1, initial_step=7), 1)) == []
