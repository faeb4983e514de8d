"""The keys and values of a running batch: rows join and leave between steps.

Rows are padded on the left, so that all of them end in the same column and one step of an
unmodified Hugging Face model extends them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

SPARE_COLUMNS = 64


class RowsLayer(DynamicLayer):
    """One layer's keys and values, [rows, heads, columns, head_dim], with columns to spare, so that
    a step writes one column in place where `DynamicLayer` would copy all of them.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.dtype, self.device = keys.dtype, keys.device
        self.keys, self.values = keys, values
        self.columns = keys.shape[2]
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        start, self.columns = self.columns, self.columns + key_states.shape[2]
        if self.columns > self.keys.shape[2]:
            spare = (
                0,
                0,
                0,
                self.columns + max(SPARE_COLUMNS, self.columns // 4) - self.keys.shape[2],
            )
            self.keys, self.values = pad(self.keys, spare), pad(self.values, spare)
        self.keys[:, :, start : self.columns] = key_states
        self.values[:, :, start : self.columns] = value_states
        return self.keys[:, :, : self.columns], self.values[:, :, : self.columns]

    def get_seq_length(self) -> int:
        return self.columns


class KVBatch:
    """`cache` and `padding_B`, the empty columns on the left of each row."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.clear()

    def clear(self) -> None:
        self.cache: Cache | None = None
        self.padding_B = torch.zeros(0, dtype=torch.long, device=self.device)

    @property
    def columns(self) -> int:
        return self.cache.get_seq_length() if self.cache is not None else 0

    def step_inputs(self) -> dict[str, Any]:
        """Mask, positions and cache for a forward that adds one token to every row."""
        columns_W = torch.arange(self.columns + 1, device=self.device)
        return {
            "attention_mask": columns_W >= self.padding_B[:, None],
            "position_ids": self.columns - self.padding_B[:, None],
            "past_key_values": self.cache,
        }

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all but `rows`, and the columns that are then empty in every row."""
        if not rows or self.cache is None:
            self.clear()
            return
        rows_B = torch.tensor(rows, device=self.device)
        self.padding_B = self.padding_B[rows_B]
        trim = int(self.padding_B.min())
        self.padding_B -= trim
        for layer in self.cache.layers:
            end = layer.columns
            layer.keys = layer.keys[:, :, trim:end][rows_B]
            layer.values = layer.values[:, :, trim:end][rows_B]
            layer.columns = end - trim

    def join(self, prefilled: DynamicCache, padding_B: Tensor, rows_B: Tensor) -> None:
        """Append rows of a prefilled cache (one of them any number of times: `rows_B`).

        `padding_B` is the padding of each appended row within the prefilled columns.
        """
        width = prefilled.get_seq_length()
        columns = max(width, self.columns)
        mine, theirs = columns - self.columns, columns - width
        self.padding_B = torch.cat([self.padding_B + mine, padding_B + theirs])
        old = self.cache.layers if self.cache is not None else [None] * len(prefilled.layers)
        self.cache = Cache(
            layers=[
                RowsLayer(
                    _stack(layer and layer.keys[:, :, : layer.columns], new.keys, rows_B, columns),
                    _stack(
                        layer and layer.values[:, :, : layer.columns], new.values, rows_B, columns
                    ),
                )
                for layer, new in zip(old, prefilled.layers, strict=True)
            ]
        )


def _stack(old: Tensor | None, new: Tensor, rows_B: Tensor, columns: int) -> Tensor:
    """Both under each other, [rows, heads, columns, head_dim], padded on the left with zeros."""
    new = pad(new[rows_B], (0, 0, columns - new.shape[2], 0))
    return new if old is None else torch.cat([pad(old, (0, 0, columns - old.shape[2], 0)), new])
