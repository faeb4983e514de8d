"""Packing changes what is computed, never what comes out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import peft
import pytest
import torch
from art_server.tiny_model import make_tiny_model
from art_server.training import AdamParams, BaseModel, Datum, Trainer, attention, load_base
from art_server.training.trie import pack
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from art_cloud.shared.config import LoRAConfig, TrainConfig
from art_cloud.shared.errors import ConfigError

from .training_data import VOCABULARY, random_batch

NAME = "test/model"


@pytest.fixture(scope="module", autouse=True)
def float64_norms() -> Iterator[None]:
    """The model's norm layers round to float32 whatever the model's type; here they do not."""

    def forward(norm: Qwen3RMSNorm, hidden: torch.Tensor) -> torch.Tensor:
        variance = hidden.pow(2).mean(-1, keepdim=True)
        return norm.weight * hidden * torch.rsqrt(variance + norm.variance_epsilon)

    with mock.patch.object(Qwen3RMSNorm, "forward", forward):
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    folder = make_tiny_model(tmp_path_factory.mktemp("base"), hidden_size=64, layers=2)
    return load_base(folder, device="cpu", dtype=torch.float64)


@pytest.fixture(scope="module")
def trainer(base: BaseModel) -> Trainer:
    """An adapter some steps from its start, so that no weight is 0."""
    trainer = Trainer(base)
    trainer.create(NAME, LoRAConfig(rank=4, seed=1))
    for seed in range(2):
        trainer.forward_backward(NAME, random_batch(seed), "cross_entropy")
        trainer.optim_step(NAME, AdamParams(1e-2))
    return trainer


@pytest.fixture(scope="module")
def plain(
    trainer: Trainer, base: BaseModel, tmp_path_factory: pytest.TempPathFactory
) -> peft.PeftModel:
    """The same adapter as PEFT loads it, on a model that knows nothing of this project."""
    folder = tmp_path_factory.mktemp("state")
    trainer.save_state(NAME, folder)
    model = AutoModelForCausalLM.from_pretrained(base.name, dtype=torch.float64)
    return peft.PeftModel.from_pretrained(model, folder / "adapter", is_trainable=True)


@contextmanager
def settings_of(trainer: Trainer, budget: int, square: int) -> Iterator[None]:
    with (
        mock.patch.object(trainer, "token_budget", budget),
        mock.patch.object(attention, "SQUARE", square),
    ):
        yield


def plain_logprobs(model: torch.nn.Module, datum: Datum) -> torch.Tensor:
    """Of the whole sample in a row of its own, with the full logits."""
    logits = model(torch.tensor([datum.prompt_ids + datum.completion_ids])).logits[0]
    chosen = torch.log_softmax(logits[len(datum.prompt_ids) - 1 : -1] / datum.temperature, -1)
    return chosen.gather(-1, torch.tensor(datum.completion_ids)[:, None])[:, 0]


def plain_loss(model: torch.nn.Module, data: list[Datum], loss: str) -> torch.Tensor:
    """GRPO, arXiv:2402.03300 eq. 3 (mean over trajectories of the mean over their tokens), or the
    mean negative logprob; one sample after the other."""
    total = torch.zeros((), dtype=torch.float64)
    lengths = {
        s: sum(len(d.completion_ids) for d in data if d.sequence == s)
        for s in {d.sequence for d in data}
    }
    for datum in data:
        logprobs = plain_logprobs(model, datum)
        if loss == "cross_entropy":
            total = total - logprobs.sum() / sum(lengths.values())
            continue
        ratio = torch.exp(logprobs - torch.tensor(datum.logprobs, dtype=torch.float64))
        objective = torch.minimum(ratio * datum.advantage, ratio.clip(0.8, 1.2) * datum.advantage)
        total = total - objective.sum() / lengths[datum.sequence] / len(lengths)
    return total


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    parameters = trainer._learner(NAME).parameters
    found = {n: p.grad.clone() for n, p in parameters.items() if p.grad is not None}
    for parameter in parameters.values():
        parameter.grad = None
    return found


@given(
    seed=st.integers(0, 2**32),
    budget=st.sampled_from([1, 30, 90, 400, 4096]),
    square=st.sampled_from([1, 12, 192]),
    loss=st.sampled_from(["grpo", "cross_entropy"]),
)
@settings(max_examples=40, deadline=None)
def test_packed_loss_and_gradients_are_those_of_one_row_at_a_time(
    trainer: Trainer, plain: peft.PeftModel, seed: int, budget: int, square: int, loss: str
) -> None:
    data = random_batch(seed)
    plain.zero_grad()
    expected = plain_loss(plain, data, loss)
    expected.backward()
    with settings_of(trainer, budget, square):
        chosen = TrainConfig(loss="grpo") if loss == "grpo" else "cross_entropy"
        metrics = trainer.forward_backward(NAME, data, chosen)
    got = gradients(trainer)
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-10, abs=1e-12)
    for name, parameter in plain.named_parameters():
        if parameter.requires_grad and got:
            torch.testing.assert_close(
                got[name.replace(".default", "")], parameter.grad, rtol=1e-9, atol=1e-13
            )
    if not got:  # no sample had an advantage
        assert all(datum.advantage == 0 for datum in data)
        assert loss == "grpo"


@given(seed=st.integers(0, 2**32), budget=st.sampled_from([1, 40, 4096]))
@settings(max_examples=15, deadline=None)
def test_scores_are_those_that_peft_gives(
    trainer: Trainer, plain: peft.PeftModel, seed: int, budget: int
) -> None:
    data = random_batch(seed)
    with settings_of(trainer, budget, 12), torch.no_grad():
        for datum, found in zip(data, trainer.logprobs(NAME, data), strict=True):
            assert found == pytest.approx(plain_logprobs(plain, datum).tolist(), abs=1e-11)
        with plain.disable_adapter():
            expected = plain_logprobs(plain, data[0]).tolist()
        assert trainer.logprobs(None, data[:1])[0] == pytest.approx(expected, abs=1e-11)


@given(seed=st.integers(0, 2**32), budget=st.integers(1, 500), share=st.booleans())
@settings(max_examples=100, deadline=None)
def test_rows_hold_every_sample_and_no_shared_token_twice(
    seed: int, budget: int, share: bool
) -> None:
    data = random_batch(seed)
    rows = pack(data, range(len(data)), budget, share=share)
    assert sorted(n for row in rows for n in row.members) == list(range(len(data)))
    for row in rows:
        first = data[row.members[0]]
        alone = len(first.prompt_ids) + len(first.completion_ids) - 1
        assert len(row.tokens_T) <= max(budget, 2 * alone)
        assert share or len(row.members) == 1
        position = torch.arange(len(row.tokens_T))
        visible = (position <= position[:, None]) & (position[:, None] < row.ends_T)
        sampled = row.sampled_M.tolist()
        for number in row.members:
            datum = data[number]
            mine, sampled = (
                sampled[: len(datum.completion_ids)],
                sampled[len(datum.completion_ids) :],
            )
            assert row.targets_N[mine].tolist() == datum.completion_ids
            assert set(row.temperatures_N[mine].tolist()) == {datum.temperature}
            path = visible[row.predecessors_N[mine[-1]]].nonzero()[:, 0]
            whole = datum.prompt_ids + datum.completion_ids
            assert row.tokens_T[path].tolist() == whole[:-1]
            assert row.positions_T[path].tolist() == list(range(len(whole) - 1))
        assert not sampled
    if share and budget == 500 and len(rows) == 1:
        prefixes = {
            (d.temperature, *(d.prompt_ids + d.completion_ids)[:stop])
            for d in data
            for stop in range(1, len(d.prompt_ids) + len(d.completion_ids))
        }
        assert len(rows[0].tokens_T) == len(prefixes)


def test_the_block_mask_for_cuda_sees_what_the_tiles_see(trainer: Trainer) -> None:
    """FlexAttention as a CPU has it: uncompiled, and scores only."""

    def masked(_positions: torch.Tensor, ends_T: torch.Tensor, *_: object) -> attention.Layout:
        return attention.Layout([], attention.block_mask(ends_T))

    data = random_batch(7)
    expected = trainer.logprobs(NAME, data)
    with mock.patch.object(attention.Layout, "of", masked):
        for found, tiled in zip(trainer.logprobs(NAME, data), expected, strict=True):
            assert found == pytest.approx(tiled, abs=1e-5)


def test_samples_longer_than_the_budget_still_share(trainer: Trainer) -> None:
    prompt = list(range(300))
    rows = pack([Datum(prompt, [n, n]) for n in range(8)], range(8), token_budget=100)
    assert [len(row.tokens_T) for row in rows] == [308]


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}


def random_base(base: BaseModel, config: PretrainedConfig) -> BaseModel:
    torch.manual_seed(0)
    # torch's grouped products, which experts are made of, know no float64 on a CPU.
    dtype = torch.float32 if hasattr(config, "num_experts") else torch.float64
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.requires_grad_(False).eval()
    return BaseModel("random", model, base.tokenizer, base.device, dtype, 512)


@pytest.mark.parametrize(
    ("config", "shares"),
    [
        (LlamaConfig(**SIZES), True),
        (Qwen2Config(**SIZES), True),
        (Qwen3MoeConfig(**SIZES, moe_intermediate_size=16, num_experts=8), True),
        (MistralConfig(**SIZES, sliding_window=8), False),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_other_models_score_as_they_do_alone(
    base: BaseModel, config: PretrainedConfig, shares: bool
) -> None:
    other = random_base(base, config)
    data = random_batch(3)
    trainer = Trainer(other)
    assert trainer._share is shares
    close = 1e-10 if other.dtype == torch.float64 else 1e-5
    trainer.create(NAME, LoRAConfig(rank=2))
    for datum, found in zip(data, trainer.logprobs(NAME, data), strict=True):
        assert found == pytest.approx(plain_logprobs(other.model, datum).tolist(), abs=close)
    trainer.forward_backward(NAME, data, "cross_entropy")
    assert trainer.optim_step(NAME, AdamParams(1e-3))["grad_norm"] > 0


def test_a_model_that_caps_its_logits_is_refused(base: BaseModel) -> None:
    config = Gemma2Config(**SIZES, final_logit_softcapping=0.1)
    with pytest.raises(ConfigError, match="scales or caps"):
        Trainer(random_base(base, config))


def test_the_full_logits_are_never_held(base: BaseModel) -> None:
    from art_server.training import logprobs

    trainer = Trainer(base)
    trainer.create(NAME, LoRAConfig(rank=2))
    sizes: list[int] = []
    trainer._head.register_forward_hook(
        lambda _module, _input, output: sizes.append(output.numel())
    )
    data = [Datum([1, 2, 3], list(range(200)))]
    whole = trainer.forward_backward(NAME, data, "cross_entropy")
    sizes.clear()
    with mock.patch.multiple(logprobs, LOGITS={"cpu": 0}, LEAST_ROWS=16):
        chunked = trainer.forward_backward(NAME, data, "cross_entropy")
    assert chunked["loss"] == pytest.approx(whole["loss"], rel=1e-12)
    assert chunked["entropy"] == pytest.approx(whole["entropy"], rel=1e-12)
    assert sum(sizes) == 200 * VOCABULARY
    assert max(sizes) == 16 * VOCABULARY
