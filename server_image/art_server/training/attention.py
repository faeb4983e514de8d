"""Attention over a packed row, plugged into an unmodified Hugging Face model.

On a CPU the row is cut into *tiles*, contiguous rectangles of the score matrix that hold little but
what is needed. A run of tokens without a branch is one tile: its keys are the run, its queries the
run and everything below it, which in depth-first order come right after. So a shared prompt meets
all its completions in one call of the fused kernel, without a copy. Small subtrees are taken
together into one square tile with a mask, so that the number of calls stays near T / `SQUARE`.

A query's tiles are merged by their log-sum-exp, and each tile's backward is given the merged
output and log-sum-exp, as in ring attention (Liu et al. 2023, arXiv:2310.01889, section 3; torch
does the same in torch/distributed/tensor/experimental/_context_parallel/_attention.py).

On CUDA the same visibility rule is a block mask of FlexAttention.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface, PretrainedConfig

from art_cloud.shared.errors import ConfigError

logger = logging.getLogger(__name__)

NAME = "art_trie"
SQUARE = 192
"""Subtrees of up to this many tokens are computed as one masked square."""


@dataclass(frozen=True)
class Tile:
    """Queries `start:stop` against keys `start:key_stop`; `root` if no tile before has seen them.

    Without `bias` the tile is causal, counted from its upper left corner.
    """

    start: int
    stop: int
    key_stop: int
    root: bool
    bias: Tensor | None = None


@dataclass(frozen=True)
class Layout:
    """The attention pattern of a row: `tiles` on a CPU, a `block_mask` on CUDA."""

    tiles: list[Tile]
    block_mask: BlockMask | None = None

    @classmethod
    def of(
        cls, positions_T: Tensor, ends_T: Tensor, device: torch.device, dtype: torch.dtype
    ) -> Layout:
        if device.type == "cuda":
            return cls([], block_mask(ends_T.to(device)))
        return cls(list(_tiles(positions_T, ends_T, dtype)))


def block_mask(ends_T: Tensor) -> BlockMask:
    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends_T[key])

    length = len(ends_T)
    return create_block_mask(visible, None, None, length, length, device=ends_T.device)


def _tiles(positions_T: Tensor, ends_T: Tensor, dtype: torch.dtype) -> Iterator[Tile]:
    length = len(ends_T)
    # A run breaks between i and i + 1 unless i + 1 is the only child of i: then their subtrees end
    # together and i + 1 lies inside i's.
    inside = ends_T[:-1] > torch.arange(1, length)
    joined = inside & (ends_T[1:] == ends_T[:-1])
    starts = [0, *(torch.nonzero(~joined).flatten() + 1).tolist()]
    ends = ends_T[starts].tolist()
    roots = (positions_T[starts] == 0).tolist()
    stops = [*starts[1:], length]
    i = 0
    while i < len(starts):
        start, stop = starts[i], ends[i]
        if stop - start > SQUARE:
            yield Tile(start, stop, stops[i], roots[i])
            i += 1
            continue
        first = i
        while True:
            while i < len(starts) and starts[i] < stop:
                i += 1
            if i == len(starts) or ends[i] - start > SQUARE or roots[i] != roots[first]:
                break
            stop = ends[i]
        bias = None
        if i - first > 1:
            query, key = torch.arange(start, stop)[:, None], torch.arange(start, stop)
            visible = (key <= query) & (query < ends_T[start:stop])
            bias = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -torch.inf)
        yield Tile(start, stop, stop, roots[first], bias)


class _TiledAttention(torch.autograd.Function):
    """Shapes: query (K, G, T, D), key and value (K, T, D), for K key heads, each with G queries."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, tiles: list[Tile], scale: float
    ) -> Tensor:
        heads, group, length, _ = query.shape
        # Laid out as (T, K, G, D), which is what the model's output projection reads.
        out = query.new_empty(length, heads, group, value.shape[-1]).permute(1, 2, 0, 3)
        lse = torch.empty(
            heads, group, length, dtype=torch.promote_types(query.dtype, torch.float32)
        )
        for tile in tiles:
            rows = slice(tile.start, tile.stop)
            out_tile, lse_tile = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query[:, :, rows],
                *_grouped(key, value, tile, group),
                is_causal=tile.bias is None,
                attn_mask=_expand(tile.bias),
                scale=scale,
            )
            if tile.root:
                out[:, :, rows], lse[:, :, rows] = out_tile, lse_tile
            else:
                before = lse[:, :, rows]
                merged = torch.logaddexp(before, lse_tile)
                out[:, :, rows].mul_((before - merged).exp_()[..., None])
                out[:, :, rows].addcmul_(out_tile, (lse_tile - merged).exp_()[..., None])
                lse[:, :, rows] = merged
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.tiles, ctx.scale = tiles, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        grad_query, grad_key, grad_value = map(torch.empty_like, (query, key, value))
        for tile in ctx.tiles:
            rows, keys = slice(tile.start, tile.stop), slice(tile.start, tile.key_stop)
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_out[:, :, rows],
                query[:, :, rows],
                *_grouped(key, value, tile, query.shape[1]),
                out[:, :, rows],
                lse[:, :, rows],
                0.0,
                tile.bias is None,
                attn_mask=_expand(tile.bias),
                scale=ctx.scale,
            )
            if tile.root:
                grad_query[:, :, rows] = dq
            else:
                grad_query[:, :, rows] += dq
            torch.sum(dk, 1, out=grad_key[:, keys])
            torch.sum(dv, 1, out=grad_value[:, keys])
        return grad_query, grad_key, grad_value, None, None


def _grouped(key: Tensor, value: Tensor, tile: Tile, group: int) -> tuple[Tensor, Tensor]:
    keys = slice(tile.start, tile.key_stop)
    return key[:, None, keys].expand(-1, group, -1, -1), value[:, None, keys].expand(
        -1, group, -1, -1
    )


def _expand(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias[None, None]


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=True)


def trie_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    trie: Layout,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """A transformers attention function: query (1, H, T, D) to output (1, T, H, D)."""
    if softcap is not None or s_aux is not None or attention_mask is not None:
        raise ConfigError(
            "This base model's attention has capped scores, sinks or a mask of its own, and its "
            "config.json does not say so. It can't be trained here: choose another base model."
        )
    if trie.block_mask is not None:
        flex = _compiled_flex() if query.is_cuda else cast(Callable[..., Tensor], flex_attention)
        out = flex(query, key, value, block_mask=trie.block_mask, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None
    grouped = query[0].unflatten(0, (key.shape[1], -1))
    out = _TiledAttention.apply(grouped, key[0], value[0], trie.tiles, scaling)
    return out.permute(2, 0, 1, 3).flatten(1, 2)[None], None


AttentionInterface.register(NAME, trie_attention)


def can_share(config: PretrainedConfig) -> bool:
    """Whether samples of this model may share a row: every layer is plain full attention.

    Otherwise (sliding windows, linear attention, state-space layers, capped scores, sinks) each
    sample has a row of its own and the model's own attention.
    """
    odd = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        odd.add("sliding_window")
    if getattr(config, "attn_logit_softcapping", None):
        odd.add("attn_logit_softcapping")
    if odd:
        logger.warning(
            "%s has %s: samples do not share their prefixes in training, each is computed whole.",
            config.model_type,
            ", ".join(sorted(odd)),
        )
    return not odd
