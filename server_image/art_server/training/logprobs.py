"""Logprobs of sampled tokens, some rows at a time: the full logits are never held."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

LOGITS = {"cpu": 1 << 20, "cuda": 1 << 27}
"""How many logits are held at once, by device: as many as stay in a CPU's cache, or fill a GPU."""
LEAST_ROWS = 64
"""At least so many rows are held at once, however large the vocabulary: with fewer, reading the
head would take most of the time."""


class _Logprobs(torch.autograd.Function):
    """The logprobs of targets. The gradient to the hidden state, (W[target] - softmax @ W) /
    temperature, is computed while the logits are there: backward has only to scale it (no second
    pass)."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, head: nn.Linear, targets_N: Tensor, temperatures_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
        count = len(hidden_ND)
        logprobs_N, entropies_N = (hidden_ND.new_empty(count, dtype=dtype) for _ in range(2))
        grads_ND = torch.empty_like(hidden_ND) if ctx.needs_input_grad[0] else None
        size = max(LEAST_ROWS, LOGITS[hidden_ND.device.type] // head.out_features)
        for start in range(0, count, size):
            rows = slice(start, start + size)
            targets_C, temperatures_C1 = targets_N[rows, None], temperatures_N[rows, None]
            logits_CV = head(hidden_ND[rows]).to(dtype).div_(temperatures_C1.to(dtype))
            log_p_CV = torch.log_softmax(logits_CV, -1)
            p_CV = torch.exp(log_p_CV, out=logits_CV)
            logprobs_N[rows] = log_p_CV.gather(-1, targets_C)[:, 0]
            entropies_N[rows] = -torch.linalg.vecdot(p_CV, log_p_CV)
            if grads_ND is not None:
                weight_VD = head.weight
                expected_CD = p_CV.to(weight_VD.dtype) @ weight_VD
                grads_ND[rows] = (weight_VD[targets_C[:, 0]] - expected_CD) / temperatures_C1
        ctx.save_for_backward(grads_ND)
        ctx.mark_non_differentiable(entropies_N)
        return logprobs_N, entropies_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (grads_ND,) = ctx.saved_tensors
        return grads_ND * grad_N[:, None].to(grads_ND.dtype), None, None, None


def token_logprobs(
    hidden_TD: Tensor,
    head: nn.Linear,
    predecessors_N: Tensor,
    targets_N: Tensor,
    temperatures_N: Tensor,
) -> tuple[Tensor, Tensor]:
    """The logprob of each target after its predecessor, and the entropy there, in nats (N and N).

    Both are of softmax(logits / temperature), in float32 or better. `head` is frozen; no gradient
    flows through the entropy.
    """
    hidden_ND = hidden_TD[predecessors_N]
    return _Logprobs.apply(hidden_ND, head, targets_N, temperatures_N)
