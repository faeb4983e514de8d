"""Rows join, grow and leave; what a row holds never changes on the way."""

import torch
from art_server.inference.transformers.kv_batch import KVBatch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

LAYERS = 2
step = (
    st.tuples(st.just("join"), st.lists(st.integers(1, 90), min_size=1, max_size=3))
    | st.tuples(st.just("grow"), st.integers(1, 80))
    | st.tuples(st.just("keep"), st.sets(st.integers(0, 5)))
)


def states(values_BT, layer):
    """Keys for numbered tokens, [rows, 1, columns, 1], different in each layer."""
    keys = torch.tensor(values_BT, dtype=torch.float32)[:, None, :, None]
    return keys + layer / 10, -keys - layer / 10


@given(st.lists(step, max_size=12))
def test_every_row_keeps_its_keys_and_values(steps):
    batch = KVBatch(torch.device("cpu"))
    rows: list[list[int]] = []
    number = 0
    for what, argument in steps:
        if what == "join":
            prompts = []
            for length in argument:
                prompts.append(list(range(number + 1, number + 1 + length)))
                number += length
            width = max(argument)
            padding = torch.tensor([width - length for length in argument])
            cache = DynamicCache()
            for layer in range(LAYERS):
                padded = [[0] * (width - len(p)) + p for p in prompts]
                cache.update(*states(padded, layer), layer)
            twice = torch.tensor([*range(len(prompts)), 0])
            batch.join(cache, padding[twice], twice)
            rows += [list(prompts[i]) for i in twice.tolist()]
        elif what == "grow" and rows:
            for _ in range(argument):
                inputs = batch.step_inputs()
                assert inputs["position_ids"][:, 0].tolist() == [len(row) for row in rows]
                assert inputs["attention_mask"].sum(-1).tolist() == [len(row) + 1 for row in rows]
                for row in rows:
                    number += 1
                    row.append(number)
                for layer in range(LAYERS):
                    batch.cache.update(*states([[row[-1]] for row in rows], layer), layer)
        elif what == "keep":
            kept = sorted(i for i in argument if i < len(rows))
            batch.keep(kept)
            rows = [rows[i] for i in kept]
            if rows:
                assert batch.columns == max(map(len, rows))
        assert len(batch.padding_B) == len(rows)
        for layer in range(LAYERS if rows else 0):
            held = batch.cache.layers[layer]
            for i, row in enumerate(rows):
                first = int(batch.padding_B[i])
                keys, values = states([row], layer)
                assert torch.equal(held.keys[i, :, first : batch.columns], keys[0])
                assert torch.equal(held.values[i, :, first : batch.columns], values[0])
