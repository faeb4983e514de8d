"""Samples are packed into rows, in which what they share is computed once.

Samples are sorted by temperature and ids, so that those with the longest common prefix are
neighbours, and inserted one after the other into a row until its token budget is spent. A row is a
forest in depth-first order, in which token q sees token k if and only if `k <= q < ends[k]`, where
`ends[k]` is the end of k's subtree; a token's position is its depth.

The last token of a sample is a target only and is not computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .data import Datum

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Row:
    """T tokens of a forest, N distinct sampled tokens, M completion tokens of its samples.

    `members` are the samples' numbers in the batch; their completions, one after the other, are the
    M tokens, and `sampled_M` says which of the N each one is.
    """

    tokens_T: Tensor
    positions_T: Tensor
    ends_T: Tensor
    predecessors_N: Tensor
    targets_N: Tensor
    temperatures_N: Tensor
    members: list[int]
    sampled_M: Tensor


class _Builder:
    """A row as it grows: `path` holds the flat index of every token of the last sample."""

    def __init__(self) -> None:
        self.length = 0
        self.members: list[int] = []
        self.tokens: list[Ids] = []
        self.positions: list[Ids] = []
        self.cut: list[tuple[Ids, int]] = []
        self.predecessors: list[Ids] = []
        self.targets: list[Ids] = []
        self.temperatures: list[npt.NDArray[np.float64]] = []
        self.path: Ids = np.empty(0, np.int64)

    def add(self, number: int, datum: Datum, ids: Ids, shared: int) -> None:
        new = len(ids) - shared
        self.cut.append((self.path[shared:], self.length))
        self.path = np.concatenate([self.path[:shared], np.arange(self.length, self.length + new)])
        self.tokens.append(ids[shared:])
        self.positions.append(np.arange(shared, len(ids)))
        self.length += new
        self.members.append(number)
        self.predecessors.append(self.path[len(datum.prompt_ids) - 1 :])
        self.targets.append(np.asarray(datum.completion_ids, np.int64))
        self.temperatures.append(np.full(len(datum.completion_ids), datum.temperature))

    def row(self) -> Row:
        ends = np.empty(self.length, np.int64)
        for path, end in [*self.cut, (self.path, self.length)]:
            ends[path] = end
        predecessors, targets = np.concatenate(self.predecessors), np.concatenate(self.targets)
        # One number for each (predecessor, target) pair; ids and lengths are below 2**31.
        pairs, first, inverse = np.unique(
            predecessors << 32 | targets, return_index=True, return_inverse=True
        )
        return Row(
            tokens_T=torch.from_numpy(np.concatenate(self.tokens)),
            positions_T=torch.from_numpy(np.concatenate(self.positions)),
            ends_T=torch.from_numpy(ends),
            predecessors_N=torch.from_numpy(pairs >> 32),
            targets_N=torch.from_numpy(pairs & 0xFFFFFFFF),
            temperatures_N=torch.from_numpy(np.concatenate(self.temperatures)[first]),
            members=self.members,
            sampled_M=torch.from_numpy(inverse),
        )


def pack(
    data: Sequence[Datum], numbers: Sequence[int], token_budget: int, *, share: bool = True
) -> list[Row]:
    """Pack the samples `numbers` of `data` into rows of at most `token_budget` trie tokens.

    A row may always hold twice the tokens of its first sample, so that samples longer than the
    budget still share their prefixes. Without `share` each sample has a row of its own.
    """
    ids: dict[int, Ids] = {}
    for n in numbers:
        seen = (data[n].prompt_ids, data[n].completion_ids[:-1])
        ids[n] = np.concatenate([np.asarray(part, np.int64) for part in seen])
    # Big-endian words compare as bytes like the ids compare as numbers.
    order = sorted(numbers, key=lambda n: (data[n].temperature, ids[n].astype(">u4").tobytes(), n))
    rows: list[Row] = []
    builder = _Builder()
    last: int | None = None
    limit = 0
    for number in order:
        shared = 0
        if last is not None and data[last].temperature == data[number].temperature:
            shared = _common_prefix(ids[last], ids[number])
        grown = builder.length + len(ids[number]) - shared
        if last is not None and (not share or grown > limit):
            rows.append(builder.row())
            builder, shared = _Builder(), 0
        if not builder.length:
            limit = max(token_budget, 2 * len(ids[number]))
        builder.add(number, data[number], ids[number], shared)
        last = number
    if last is not None:
        rows.append(builder.row())
    return rows


def _common_prefix(a: Ids, b: Ids) -> int:
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length
