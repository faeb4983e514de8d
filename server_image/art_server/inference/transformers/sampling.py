"""The next token of every row of a batch at once, each with its own temperature, top-p and seed.

A row draws by inverting its cumulative distribution at one uniform number, which depends on the
row's seed and position only. So what else is in the batch never changes what a seed gives.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class SamplingParams:
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = field(default_factory=lambda: secrets.randbits(63))
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None
    """How many alternatives are reported for each token; None: no logprobs were asked for."""
    ignore_eos: bool = False


class Drawn(NamedTuple):
    """One token for each of B rows. The `top` tokens are B x K pairs of id and logprob, likeliest
    first; None unless asked for. All logprobs are as `art_cloud.shared.protocol.Sample` defines
    them."""

    ids: list[int]
    logprobs: list[float]
    top: list[list[tuple[int, float]]] | None


def mix(values_B: np.ndarray) -> np.ndarray:
    """SplitMix64's mixing function (Steele et al., OOPSLA 2014) of uint64s, wrapping."""
    values_B = (values_B ^ (values_B >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values_B = (values_B ^ (values_B >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values_B ^ (values_B >> np.uint64(31))


class Sampler:
    """The sampling state of the rows of one batch; rebuilt when rows come or go.

    `choices_B` numbers the choices of one request, so that they differ under one seed; `drawn_B`
    counts the tokens that each row has drawn already.
    """

    def __init__(
        self,
        params_B: Sequence[SamplingParams],
        choices_B: Sequence[int],
        drawn_B: Sequence[int],
        device: torch.device,
    ) -> None:
        temperatures = [p.temperature for p in params_B]
        greedy = [t == 0 for t in temperatures]
        self._scaled = any(t not in (0, 1) for t in temperatures)
        self._greedy_B = torch.tensor(greedy, device=device) if any(greedy) else None
        self._all_greedy = all(greedy)
        self._temperature_B1 = torch.tensor([t or 1.0 for t in temperatures], device=device)[
            :, None
        ]
        top_p = [p.top_p for p in params_B]
        self._top_p_B1 = (
            torch.tensor(top_p, device=device)[:, None] if any(p < 1 for p in top_p) else None
        )
        self._top = max(
            (p.top_logprobs for p in params_B if p.top_logprobs is not None), default=None
        )
        seeds_B = np.array([p.seed % 2**64 for p in params_B], dtype=np.uint64)
        choices = np.array(choices_B, dtype=np.uint64)
        self._streams_B = mix(mix(seeds_B) + choices * np.uint64(GOLDEN))
        self._drawn_B = np.array(drawn_B, dtype=np.uint64)

    def draw(self, logits_BV: Tensor) -> Drawn:
        logits_BV = logits_BV.float()
        scaled_BV = logits_BV / self._temperature_B1 if self._scaled else logits_BV
        logprobs_BV = scaled_BV.log_softmax(dim=-1)
        ids_B1 = self._choose(logprobs_BV)
        ids = ids_B1[:, 0].tolist()
        logprobs = logprobs_BV.gather(-1, ids_B1)[:, 0].tolist()
        if self._top is None:
            return Drawn(ids, logprobs, None)
        values, tokens = (t.tolist() for t in logprobs_BV.topk(self._top, dim=-1))
        top = [list(zip(*row, strict=True)) for row in zip(tokens, values, strict=True)]
        return Drawn(ids, logprobs, top)

    def _choose(self, logprobs_BV: Tensor) -> Tensor:
        uniforms_B = self._uniforms()
        if self._all_greedy:
            return logprobs_BV.argmax(dim=-1, keepdim=True)
        probs_BV = logprobs_BV.exp()
        if self._top_p_B1 is not None:
            probs_BV = cut_top_p(probs_BV, self._top_p_B1)
        cumulative_BV = probs_BV.cumsum(dim=-1, dtype=torch.float64)
        points_B1 = (
            torch.from_numpy(uniforms_B).to(probs_BV.device)[:, None] * cumulative_BV[:, -1:]
        )
        ids_B1 = torch.searchsorted(cumulative_BV, points_B1, right=True)
        ids_B1.clamp_(max=probs_BV.shape[-1] - 1)
        if self._greedy_B is None:
            return ids_B1
        return torch.where(self._greedy_B[:, None], logprobs_BV.argmax(-1, keepdim=True), ids_B1)

    def _uniforms(self) -> np.ndarray:
        """One number in [0, 1) for each row, 53 bits; moves every row on by one."""
        self._drawn_B += np.uint64(1)
        bits_B = mix(self._streams_B + self._drawn_B * np.uint64(GOLDEN))
        return (bits_B >> np.uint64(11)) * 2.0**-53


def cut_top_p(probs_BV: Tensor, top_p_B1: Tensor) -> Tensor:
    """Zero all but the smallest set of likeliest tokens whose mass reaches top-p.

    Nucleus sampling: Holtzman et al., arXiv:1904.09751, section 3.1.
    """
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True)
    mass_before_BV = sorted_BV.cumsum(dim=-1) - sorted_BV
    cut_BV = (mass_before_BV >= top_p_B1) & (top_p_B1 < 1)
    cut_BV[:, 0] = False
    return torch.zeros_like(probs_BV).scatter(-1, order_BV, sorted_BV.masked_fill(cut_BV, 0.0))
