"""From what a call carries to what the trainer takes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from art_server.inference import render
from art_server.steps.batches import rl_data, sft_batches, sft_data, sft_learning_rate
from art_server.training import BaseModel, load_base

from art_cloud.shared.config import SFTConfig, TrainConfig
from art_cloud.shared.errors import ContextLengthError, RequestTooLargeError, UntrainableError
from art_cloud.shared.names import ModelName
from art_cloud.shared.protocol import Sample, SFTExample, TrainGroup
from art_cloud.shared.wire import TrainBatch

from ..rigs.synthetic import batch

NAME = ModelName("p", "m")
MOST = 1 << 20
CALL: Any = {
    "id": "call-1",
    "type": "function",
    "function": {"name": "search", "arguments": '{"query": "fox"}'},
}
TOOLS: Any = [{"type": "function", "function": {"name": "search", "parameters": {}}}]


@pytest.fixture(scope="module")
def base(tiny_model: Path) -> BaseModel:
    return load_base(tiny_model, "cpu")


def one(prompt: list[int], completion: list[int], temperature: float = 1.0) -> Sample:
    return Sample(
        prompt_ids=prompt,
        completion_ids=completion,
        logprobs=[-1.0] * len(completion),
        policy="p/m@0",
        temperature=temperature,
    )


def test_each_sample_has_the_advantage_of_its_trajectory() -> None:
    given = TrainBatch(
        groups=[
            TrainGroup(rewards=[1.0, 0.0], samples=[[2, 0], [1]]),
            TrainGroup(rewards=[0.5, 0.5], samples=[[3], [4]]),
        ],
        samples=[one([n], [n, n], temperature=0.0 if n == 3 else 0.7) for n in range(5)],
        config=TrainConfig(scale_rewards="none"),
    )
    data, metrics = rl_data(given, vocabulary=5)
    assert [d.prompt_ids for d in data] == [[2], [0], [1], [3], [4]]
    assert [d.advantage for d in data] == [0.5, 0.5, -0.5, 0.0, 0.0]
    assert [d.sequence for d in data] == [0, 0, 1, 2, 3]
    assert [d.group for d in data] == [0, 0, 0, 1, 1]
    assert [d.temperature for d in data] == [0.7, 0.7, 0.7, 1.0, 0.7]  # greedy is scored at 1
    assert metrics == {
        "reward": 0.5,
        "reward_std": 0.25,
        "groups": 2.0,
        "groups_without_signal": 1.0,
        "trajectories": 4.0,
        "samples": 5.0,
    }


def test_an_id_of_another_model_is_named() -> None:
    given = batch(NAME, 1)
    top = max(i for sample in given.samples for i in sample.prompt_ids + sample.completion_ids)
    rl_data(given, vocabulary=top + 1)
    with pytest.raises(UntrainableError, match=f"the token id {top}, and the base model has {top}"):
        rl_data(given, vocabulary=top)


def test_sft_learns_what_the_engine_would_have_sampled(base: BaseModel) -> None:
    """One datum for each message of the assistant; its prompt is what the engine would be asked
    with, and its completion ends with the token that ends a turn."""
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Find the fox."},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call-1", "content": "It jumps."},
        {"role": "assistant", "content": "It jumps over the dog."},
    ]
    data = sft_data([SFTExample(messages=messages, tools=TOOLS)], base, MOST)
    tokenizer = base.tokenizer
    assert [datum.sequence for datum in data] == [0, 1]
    for datum, turn in zip(data, (2, 4), strict=True):
        asked = render(tokenizer, messages[:turn], TOOLS)
        assert tokenizer.decode(list(datum.prompt_ids)) == asked
        assert list(datum.prompt_ids) == tokenizer.encode(asked, add_special_tokens=False)
        assert datum.completion_ids[-1] == tokenizer.eos_token_id
        assert datum.completion_ids.count(tokenizer.eos_token_id) == 1
    assert "search" in tokenizer.decode(list(data[0].completion_ids))
    assert tokenizer.decode(list(data[1].completion_ids[:-1])) == "It jumps over the dog."


def test_examples_are_refused_by_their_length_before_they_are_read(base: BaseModel) -> None:
    """Not tokenised first: of the tiny model, no token has more than some 13 bytes."""
    question: Any = [{"role": "user", "content": "?"}]
    answer = {"role": "assistant", "content": "!"}
    short = SFTExample(messages=[*question, answer])
    endless = SFTExample(messages=[*question, {**answer, "content": "word " * 1_000_000}])
    with pytest.raises(ContextLengthError, match=r"Example 1, message 1, has 5,000,\d+ bytes"):
        sft_data([short, endless], base, MOST)
    many = SFTExample(messages=question + [answer] * 200)
    assert len(sft_data([many], base, MOST)) == 200
    with pytest.raises(RequestTooLargeError, match="over 100,000 bytes of token ids"):
        sft_data([many], base, 100_000)


def test_an_example_without_an_answer_is_named(base: BaseModel) -> None:
    question: Any = [{"role": "user", "content": "?"}]
    answered = SFTExample(messages=[*question, {"role": "assistant", "content": "!"}])
    with pytest.raises(UntrainableError, match="Example 1 has no message of the assistant"):
        sft_data([answered, SFTExample(messages=question)], base, MOST)
    with pytest.raises(UntrainableError, match="Example 0: "):
        sft_data([SFTExample(messages=[{"role": "assistant", "content": 7}])], base, MOST)


def test_each_epoch_sees_everything_once_in_an_order_of_its_own(base: BaseModel) -> None:
    examples = [
        SFTExample(
            messages=[{"role": "user", "content": str(n)}, {"role": "assistant", "content": "x"}]
        )
        for n in range(10)
    ]
    data = sft_data(examples, base, MOST)
    config = SFTConfig(batch_size=4, epochs=2, seed=3)
    batches = sft_batches(data, config)
    assert [len(batch) for batch in batches] == [4, 4, 2] * 2
    epochs = [[d.sequence for b in batches[start : start + 3] for d in b] for start in (0, 3)]
    assert [sorted(order) for order in epochs] == [list(range(10))] * 2
    assert epochs[0] != epochs[1]
    assert sft_batches(data, config) == batches
    assert sft_batches(data, config.model_copy(update={"seed": 4})) != batches


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, *((8 - n) / 8 for n in range(8))]),
        ("cosine", [0.5, 1.0, *((1 + math.cos(math.pi * n / 8)) / 2 for n in range(8))]),
    ],
)
def test_the_learning_rate_warms_up_and_follows_its_schedule(
    schedule: Any, expected: list[float]
) -> None:
    config = SFTConfig(learning_rate=2.0, schedule=schedule, warmup_ratio=0.2)
    rates = [sft_learning_rate(config, number, 10) for number in range(10)]
    assert rates == pytest.approx([2 * factor for factor in expected])
