"""Losses against a plain float64 NumPy reference, written from the papers' formulas."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from art_server.training import Datum, group_advantages, has_signal
from art_server.training.logprobs import token_logprobs
from art_server.training.losses import Sums, token_losses, token_weights
from hypothesis import given, settings
from hypothesis import strategies as st

from art_cloud.shared.config import TrainConfig

from .training_data import random_batch

Floats = npt.NDArray[np.float64]
VOCABULARY = 11


def small_ids(data: list[Datum]) -> list[Datum]:
    return [
        replace(
            d,
            completion_ids=[i % VOCABULARY for i in d.completion_ids],
            logprobs=[p / 2.6 for p in d.logprobs],
        )
        for d in data
    ]


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def sampled(logits: Floats, datum: Datum) -> Floats:
    log_p = log_softmax(logits / datum.temperature)
    return log_p[np.arange(len(datum.completion_ids)), datum.completion_ids]


def by_sequence(data: list[Datum], tokens: list[Floats]) -> list[Floats]:
    return [
        np.concatenate([t for d, t in zip(data, tokens, strict=True) if d.sequence == s])
        for s in sorted({d.sequence for d in data})
    ]


def grpo(new: Floats, old: Floats, advantage: float, low: float, high: float) -> Floats:
    """DeepSeekMath, arXiv:2402.03300, eq. 3, inside the sums."""
    ratio = np.exp(new - old)
    return np.minimum(ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)


def gspo(new: Floats, old: Floats, advantage: float) -> Floats:
    """arXiv:2507.18071, eq. 5 and 7: one ratio for the completion, (pi / pi_old) ^ (1 / length)."""
    ratio = math.exp(new.sum() - old.sum()) ** (1 / len(new))
    clipped = min(max(ratio, 1 - 3e-4), 1 + 4e-4)
    return np.full(len(new), min(ratio * advantage, clipped * advantage))


def cispo(new: Floats, old: Floats, advantage: float) -> Floats:
    """MiniMax-M1, arXiv:2506.13585, eq. 4: clipped ratio * advantage * logprob."""
    return np.clip(np.exp(new - old), 0, 5) * advantage * new


def k3(new: Floats, reference: Floats) -> Floats:
    """DeepSeekMath, arXiv:2402.03300, eq. 4."""
    return np.exp(reference - new) - (reference - new) - 1


def expected_loss(
    config: TrainConfig | str, data: list[Datum], logits: list[Floats], references: list[Floats]
) -> float:
    new = [sampled(lg, d) for lg, d in zip(logits, data, strict=True)]
    if isinstance(config, str):
        return float(-np.concatenate(new).mean())
    old = [np.array(d.logprobs) for d in data]
    name = config.loss
    terms: list[Floats] = []
    for n, o, d, reference in zip(new, old, data, references, strict=True):
        if name == "gspo":
            term = gspo(n, o, d.advantage)
        elif name == "cispo":
            term = cispo(n, o, d.advantage)
        elif name == "importance_sampling":
            term = np.exp(n - o) * d.advantage
        elif name == "dapo":
            term = grpo(n, o, d.advantage, 0.2, 0.28)
        else:
            term = grpo(n, o, d.advantage, 0.2, 0.2)
        terms.append(term - config.kl_coef * k3(n, reference))
    if name in ("grpo", "gspo"):
        return float(-np.mean([t.mean() for t in by_sequence(data, terms)]))
    if name == "dr_grpo":
        total = sum(t.sum() for t in terms)
        return float(-total / len(by_sequence(data, terms)) / (config.fixed_length or math.nan))
    if name == "dapo":  # only groups that tell their members apart
        with_signal = {d.group for d in data if d.advantage != 0}
        terms = [t for t, d in zip(terms, data, strict=True) if d.group in with_signal]
    return float(-np.concatenate(terms).mean()) if terms else 0.0


CONFIGS: list[Any] = [
    "cross_entropy",
    TrainConfig(),
    TrainConfig(kl_coef=0.3),
    TrainConfig(loss="dr_grpo", fixed_length=40),
    TrainConfig(loss="dapo"),
    TrainConfig(loss="gspo"),
    TrainConfig(loss="cispo"),
    TrainConfig(loss="ppo"),
    TrainConfig(loss="importance_sampling"),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c if isinstance(c, str) else c.loss)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_losses_and_gradients_are_those_of_the_papers(config: TrainConfig | str, seed: int) -> None:
    data = small_ids(random_batch(seed))
    rng = np.random.default_rng(seed)
    shapes = [(len(d.completion_ids), VOCABULARY) for d in data]
    logits = [rng.normal(size=shape) for shape in shapes]
    references = [sampled(rng.normal(size=shape), d) for shape, d in zip(shapes, data, strict=True)]

    # The logits come out of an identity head, so the hidden states' gradient is the logits'.
    hidden_ND = torch.tensor(np.concatenate(logits), requires_grad=True)
    head = torch.nn.Linear(VOCABULARY, VOCABULARY, bias=False, dtype=torch.float64)
    head.weight.data.copy_(torch.eye(VOCABULARY))
    head.requires_grad_(False)
    logprobs_M, entropies_M = token_logprobs(
        hidden_ND,
        head,
        torch.arange(len(hidden_ND)),
        torch.tensor([i for d in data for i in d.completion_ids]),
        torch.tensor([d.temperature for d in data for _ in d.completion_ids], dtype=torch.float64),
    )
    weights = token_weights(data, config)  # type: ignore[arg-type]
    weights_M = torch.tensor(
        [w for w, d in zip(weights, data, strict=True) for _ in d.completion_ids],
        dtype=torch.float64,
    )
    sums = Sums()
    loss = token_losses(
        logprobs_M,
        entropies_M,
        weights_M,
        data,
        config,  # type: ignore[arg-type]
        sums,
        torch.tensor(np.concatenate(references)),
    )
    assert loss.item() == pytest.approx(
        expected_loss(config, data, logits, references), rel=1e-10, abs=1e-12
    )

    loss.backward()
    assert hidden_ND.grad is not None
    gradient = hidden_ND.grad.numpy()
    offset = 0
    for number, shape in enumerate(shapes):  # central differences at one token of each sample
        token = rng.integers(shape[0])
        for entry in range(3):
            step = 1e-6
            sides = []
            for sign in (1, -1):
                moved = [lg.copy() for lg in logits]
                moved[number][token, entry] += sign * step
                sides.append(_differentiable(config, data, logits, moved, references))
            numeric = (sides[0] - sides[1]) / (2 * step)
            assert gradient[offset + token, entry] == pytest.approx(numeric, rel=1e-5, abs=1e-8)
        offset += shape[0]

    p = np.exp(log_softmax(logits[0] / data[0].temperature))
    entropy = -(p * np.log(p)).sum(-1)
    assert entropies_M[: len(entropy)].tolist() == pytest.approx(entropy.tolist(), rel=1e-10)


def _differentiable(
    config: TrainConfig | str,
    data: list[Datum],
    logits: list[Floats],
    moved: list[Floats],
    references: list[Floats],
) -> float:
    """The loss at `moved`; for CISPO its weights stay at `logits`: they carry no gradient."""
    if isinstance(config, str) or config.loss != "cispo":
        return expected_loss(config, data, moved, references)
    terms = [
        np.clip(np.exp(sampled(at, d) - np.array(d.logprobs)), 0, 5) * d.advantage * sampled(to, d)
        for at, to, d in zip(logits, moved, data, strict=True)
    ]
    return float(-np.concatenate(terms).mean())


@pytest.mark.parametrize("name", ["grpo", "gspo", "dapo", "ppo", "cispo"])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("log_ratio", [-80.0, -1.0, 1.0, 5.0, 80.0])
def test_a_ratio_far_outside_of_the_clip_is_worth_its_bound(
    name: Any, advantage: float, log_ratio: float
) -> None:
    """And where the bound is what counts, the gradient is 0, or with cispo the bound itself."""
    config = TrainConfig(loss=name)
    options = config.options
    datum = replace(random_batch(1)[0], advantage=advantage)
    datum = replace(datum, completion_ids=datum.completion_ids[:1], logprobs=[-1.0 - log_ratio])
    logprobs_M = torch.full((1,), -1.0, requires_grad=True)
    sums = Sums()
    one_M = torch.ones(1)
    loss = token_losses(logprobs_M, one_M, one_M, [datum], config, sums)
    loss.backward()

    ratio = math.exp(log_ratio)
    bound = min(max(ratio, 1 - options.epsilon_low), 1 + options.epsilon_high)
    is_bound = bound * advantage < ratio * advantage
    worth = min(ratio * advantage, bound * advantage)
    gradient = 0.0 if is_bound else worth
    if name == "cispo":
        worth, gradient, is_bound = -bound * advantage, bound * advantage, bound != ratio
    assert logprobs_M.grad is not None
    assert loss.item() == pytest.approx(-worth, rel=1e-4)
    assert logprobs_M.grad.item() == pytest.approx(-gradient, rel=1e-4)
    assert sums.clipped == is_bound
    assert sums.ratio_max == pytest.approx(ratio, rel=1e-4)


def test_metrics_of_a_batch_done_by_hand() -> None:
    """Two tokens with ratios 2 and 1/2 at advantage 1: the first is clipped, the second is not."""
    logprobs_M = torch.log(torch.tensor([0.5, 0.25], dtype=torch.float64))
    data = [Datum([0], [1, 2], [math.log(0.25), math.log(0.5)], advantage=1.0)]
    sums, config = Sums(), TrainConfig(loss="ppo")
    loss = token_losses(
        logprobs_M, torch.tensor([0.1, 0.3]), torch.tensor([0.5, 0.5]), data, config, sums
    )
    metrics = sums.metrics(config)
    assert loss.item() == pytest.approx(-(1.2 + 0.5) / 2)
    assert metrics["clip_fraction"] == 0.5
    assert metrics["ratio_mean"] == pytest.approx(1.25)
    assert metrics["ratio_max"] == pytest.approx(2)
    assert metrics["entropy"] == pytest.approx(0.2)
    k3_mean = ((2 - 1 - math.log(2)) + (0.5 - 1 + math.log(2))) / 2
    assert metrics["kl_sampler"] == pytest.approx(k3_mean)
    assert metrics["tokens"] == 2


@given(st.lists(st.lists(st.floats(-10, 10), min_size=2, max_size=8), min_size=1, max_size=4))
def test_advantages_are_those_of_numpy(groups: list[list[float]]) -> None:
    everything = np.concatenate([np.array(group) for group in groups])
    for scale in ("group", "batch", "none"):
        found = group_advantages(groups, scale)  # type: ignore[arg-type]
        for group, advantages in zip(groups, found, strict=True):
            if not has_signal(group):
                assert advantages == [0.0] * len(group)
                continue
            rewards = np.array(group)
            std = {"group": rewards.std(ddof=1), "batch": everything.std(ddof=1)}.get(scale)
            divisor = 1.0 if std is None else std + 1e-4
            expected = (rewards - rewards.mean()) / divisor
            assert advantages == pytest.approx(expected.tolist(), rel=1e-9, abs=1e-9)


def test_equal_rewards_that_floats_cannot_average_give_no_signal() -> None:
    assert group_advantages([[0.1] * 3, [0.7] * 7]) == [[0.0] * 3, [0.0] * 7]
