"""Losses over the completion tokens of a batch, by name; `art_cloud.config.PRESETS` cites each.

A batch's loss is a weighted sum over its tokens. The weights depend on the whole batch only, so
that the sum is the same however the batch is cut into rows. Suffix M: completion tokens of the
samples of a row, one sample after the other; B: those samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from art_cloud.shared.config import Normalization, TrainConfig

from .data import Datum

Loss = TrainConfig | Literal["cross_entropy"]


@dataclass
class Sums:
    """The sums of what a step reports, over the completion tokens of the rows so far."""

    tokens: int = 0
    loss: float = 0.0
    entropy: float = 0.0
    kl_sampler: float = 0.0
    kl_reference: float = 0.0
    clipped: float = 0.0
    ratio: float = 0.0
    ratio_max: float = 0.0

    def metrics(self, loss: Loss) -> dict[str, float]:
        """Means over tokens; a mean over no token is left out."""
        found = {"loss": self.loss, "tokens": float(self.tokens)}
        if not self.tokens:
            return found
        found["entropy"] = self.entropy / self.tokens
        if isinstance(loss, TrainConfig):
            found["kl_sampler"] = self.kl_sampler / self.tokens
            found["clip_fraction"] = self.clipped / self.tokens
            found["ratio_mean"] = self.ratio / self.tokens
            found["ratio_max"] = self.ratio_max
            if loss.kl_coef:
                found["kl_reference"] = self.kl_reference / self.tokens
        return found


def token_weights(data: Sequence[Datum], loss: Loss) -> list[float]:
    """For each sample the weight of each of its tokens in the batch's loss; 0: it has no part.

    Samples of a group without signal keep their place in the denominator, except for `dapo`
    (arXiv:2503.14476, section 3.2, dynamic sampling).
    """
    kept = [True] * len(data)
    normalization: Normalization = "token"
    fixed_length = 0
    if isinstance(loss, TrainConfig):
        normalization, fixed_length = loss.options.normalization, loss.fixed_length or 0
        if loss.loss == "dapo":
            with_signal = {datum.group for datum in data if datum.advantage}
            kept = [datum.group in with_signal for datum in data]
    tokens: Counter[int] = Counter()
    for datum, keep in zip(data, kept, strict=True):
        if keep:
            tokens[datum.sequence] += len(datum.completion_ids)
    total = tokens.total()

    def weight(datum: Datum) -> float:
        if normalization == "token":
            return 1 / total
        if normalization == "sequence":
            return 1 / (len(tokens) * tokens[datum.sequence])
        return 1 / (len(tokens) * fixed_length)

    return [weight(datum) if keep else 0.0 for datum, keep in zip(data, kept, strict=True)]


def has_gradient(datum: Datum, weight: float, loss: Loss) -> bool:
    """False if the sample's part in the gradient is exactly 0, so that it need not be computed."""
    if loss == "cross_entropy":
        return True
    return weight > 0 and (datum.advantage != 0 or loss.kl_coef > 0)


def k3(logprobs_M: Tensor, other_M: Tensor) -> Tensor:
    """Estimate of KL(sampled from || other), by token: r - 1 - log r, for r = other / sampled from.

    Schulman 2020, "Approximating KL divergence"; DeepSeekMath, arXiv:2402.03300, eq. 4.
    """
    log_ratio_M = other_M - logprobs_M
    return torch.expm1(log_ratio_M) - log_ratio_M


def token_losses(
    logprobs_M: Tensor,
    entropies_M: Tensor,
    weights_M: Tensor,
    data_B: Sequence[Datum],
    loss: Loss,
    sums: Sums,
    reference_M: Tensor | None = None,
) -> Tensor:
    """The row's part of the batch's loss, a scalar; adds to `sums`. Logprobs are in nats."""
    if loss == "cross_entropy":
        total = -(weights_M * logprobs_M).sum()
    else:
        total = (weights_M * _policy(logprobs_M, data_B, loss, sums)).sum()
        if reference_M is not None:
            kl_M = k3(logprobs_M, reference_M)
            total = total + loss.kl_coef * (weights_M * kl_M).sum()
            sums.kl_reference += kl_M.detach().sum().item()
    sums.tokens += len(logprobs_M)
    sums.loss += total.item()
    sums.entropy += entropies_M.sum().item()
    return total


def _policy(logprobs_M: Tensor, data_B: Sequence[Datum], config: TrainConfig, sums: Sums) -> Tensor:
    options = config.options
    lengths_B = torch.tensor([len(d.completion_ids) for d in data_B]).to(logprobs_M.device)
    sampler_M = logprobs_M.new_tensor([p for d in data_B for p in d.logprobs])
    advantages_M = logprobs_M.new_tensor([d.advantage for d in data_B]).repeat_interleave(lengths_B)

    log_ratio_M = logprobs_M - sampler_M
    sums.kl_sampler += k3(sampler_M, logprobs_M.detach()).sum().item()
    if options.ratio_level == "sequence":
        means_B = torch.stack([part.mean() for part in log_ratio_M.split(lengths_B.tolist())])
        log_ratio_M = means_B.repeat_interleave(lengths_B)
    ratio_M = log_ratio_M.exp()
    low, high = 1 - options.epsilon_low, 1 + options.epsilon_high
    clipped_M = ratio_M.clamp(low, high)
    with torch.no_grad():
        outside_M = ratio_M != clipped_M
        if config.loss != "cispo":  # min() takes the clipped side only where it is the smaller
            outside_M &= clipped_M * advantages_M < ratio_M * advantages_M
        sums.clipped += outside_M.sum().item()
        sums.ratio += ratio_M.sum().item()
        sums.ratio_max = max(sums.ratio_max, ratio_M.max().item())
    if config.loss == "cispo":
        return -clipped_M.detach() * advantages_M * logprobs_M
    return -torch.minimum(ratio_M * advantages_M, clipped_M * advantages_M)
