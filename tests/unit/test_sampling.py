"""Draws against the distributions that they claim to come from."""

import numpy as np
import pytest
import torch
from art_server.inference.transformers.sampling import Sampler, SamplingParams, cut_top_p
from hypothesis import given
from hypothesis import strategies as st

CPU = torch.device("cpu")
LOGITS_V = torch.tensor([2.0, 0.0, 1.0, -1.0, 0.5, -30.0])


def sampler(params, choices=None, drawn=None):
    rows = len(params)
    return Sampler(params, choices or [0] * rows, drawn or [0] * rows, CPU)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_frequencies_are_those_of_the_softmax(temperature):
    rows = 40_000
    params = [SamplingParams(1, temperature=temperature, seed=seed) for seed in range(rows)]
    drawn = sampler(params).draw(LOGITS_V.expand(rows, -1))
    expected_V = (LOGITS_V.double() / temperature).softmax(-1).numpy()
    seen_V = np.bincount(drawn.ids, minlength=len(LOGITS_V)) / rows
    five_sigma_V = 5 * np.sqrt(expected_V * (1 - expected_V) / rows)
    assert (abs(seen_V - expected_V) <= five_sigma_V + 1e-9).all()
    np.testing.assert_allclose(drawn.logprobs, np.log(expected_V)[drawn.ids], rtol=1e-5)


def test_one_seed_draws_afresh_at_every_step_and_for_every_choice():
    uniform_V = torch.zeros(1, 1000)
    params = [SamplingParams(1, seed=7)]
    one = sampler(params)
    steps = [one.draw(uniform_V).ids[0] for _ in range(200)]
    choices = [sampler(params, choices=[n]).draw(uniform_V).ids[0] for n in range(200)]
    assert len(set(steps)) > 150
    assert len(set(choices)) > 150
    assert [sampler(params, drawn=[n]).draw(uniform_V).ids[0] for n in range(200)] == steps


@given(seed=st.integers(), crowd=st.integers(0, 5), step=st.integers(0, 50))
def test_a_row_draws_the_same_in_any_company(seed, crowd, step):
    mine = SamplingParams(1, temperature=0.8, top_p=0.9, seed=seed)
    others = [SamplingParams(1, temperature=t, seed=9) for t in (0.0, 1.0, 0.3, 2.0, 1.1)][:crowd]
    logits_BV = torch.randn(crowd + 1, 50, generator=torch.Generator().manual_seed(step))
    logits_BV[-1] = torch.linspace(-2, 2, 50)
    alone = sampler([mine], drawn=[step]).draw(logits_BV[-1:])
    together = sampler([*others, mine], drawn=[0] * crowd + [step]).draw(logits_BV)
    assert together.ids[-1] == alone.ids[0]
    assert together.logprobs[-1] == pytest.approx(alone.logprobs[0], abs=1e-6)


def test_temperature_zero_takes_the_likeliest_and_scores_it_at_temperature_one():
    params = [SamplingParams(1, temperature=0), SamplingParams(1, temperature=5.0, seed=1)]
    drawn = sampler(params).draw(LOGITS_V.expand(2, -1))
    assert drawn.ids[0] == 0
    assert drawn.logprobs[0] == pytest.approx(float(LOGITS_V.log_softmax(-1)[0]), abs=1e-6)


@given(
    logits=st.lists(st.floats(-10, 10), min_size=1, max_size=40),
    top_p=st.floats(0.01, 1.0),
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(logits, top_p):
    probs_V = torch.tensor(logits, dtype=torch.float64).softmax(-1)
    kept_V = cut_top_p(probs_V[None], torch.tensor([[top_p]], dtype=torch.float64))[0]
    kept = probs_V[kept_V > 0].sort().values
    assert (kept_V[kept_V > 0] == probs_V[kept_V > 0]).all()
    assert kept.sum() >= top_p - 1e-9
    if top_p < 1:
        assert kept[1:].sum() < top_p + 1e-9
        assert all(kept[0] >= cut for cut in probs_V[kept_V == 0])


def test_alternatives_are_scored_at_the_sampling_temperature_before_top_p():
    params = [SamplingParams(1, temperature=0.5, top_p=0.1, top_logprobs=3), SamplingParams(1)]
    drawn = sampler(params).draw(LOGITS_V.expand(2, -1))
    expected_V = (LOGITS_V / 0.5).log_softmax(-1)
    assert [i for i, _ in drawn.top[0]] == [0, 2, 4]
    assert [x for _, x in drawn.top[0]] == pytest.approx(expected_V[[0, 2, 4]].tolist(), abs=1e-6)
    assert sampler([SamplingParams(1)]).draw(LOGITS_V[None]).top is None
