"""Samples of a masked distribution: marked, carried, and never trained on by mistake."""

from __future__ import annotations

from typing import Any

import pytest
from art_server.inference import is_masked
from art_server.steps.batches import rl_data
from openai.types.chat.chat_completion import Choice

from art_cloud.rollouts.batch import make_batch
from art_cloud.rollouts.group import TrajectoryGroup
from art_cloud.rollouts.trajectory import Trajectory
from art_cloud.shared.config import TrainConfig
from art_cloud.shared.errors import UntrainableError
from art_cloud.shared.names import ModelName
from art_cloud.shared.wire import decode_batch, encode_batch

NAME = ModelName("p", "m")
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
FORCED = {"type": "function", "function": {"name": "search"}}


@pytest.mark.parametrize(
    "parameters",
    [
        {"response_format": SCHEMA},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"tool_choice": "required"},
        {"tool_choice": FORCED},
        {"logit_bias": {"5": 1}},
        {"min_tokens": 3},
        {"presence_penalty": 0.1},
    ],
)
def test_what_masks(parameters: dict[str, Any]) -> None:
    assert is_masked({"messages": []} | parameters)


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"response_format": {"type": "text"}, "structured_outputs": None, "logit_bias": {}},
        {"tools": [FORCED], "tool_choice": "auto"},
        {"tool_choice": "none", "presence_penalty": 0.0, "repetition_penalty": 1.0},
        {"temperature": 0.3, "top_p": 0.9, "top_k": 5, "stop": ["x"], "seed": 1},
    ],
)
def test_what_does_not(parameters: dict[str, Any]) -> None:
    assert not is_masked({"messages": []} | parameters)


def choice(masked: bool, token: int = 5) -> Choice:
    sample = {
        "prompt_ids": [1, 2],
        "completion_ids": [token],
        "logprobs": [-0.5],
        "policy": "p/m@0",
        "masked": masked,
    }
    message = {"role": "assistant", "content": "x"}
    return Choice.model_validate(
        {"index": 0, "finish_reason": "stop", "message": message, "sample": sample}
    )


def group(*masks: list[bool]) -> TrajectoryGroup:
    return TrajectoryGroup(
        Trajectory(messages_and_choices=[choice(mask) for mask in several], reward=float(place))
        for place, several in enumerate(masks)
    )


def test_they_are_refused_with_the_reason_and_what_to_do() -> None:
    mixed = group([False, True], [False])
    with pytest.raises(UntrainableError, match=r"trajectory 0: 1 of its 2 .*masked_samples=\"skip"):
        make_batch(NAME, [mixed], TrainConfig())


def test_they_can_be_skipped_and_are_counted() -> None:
    mixed = group([False, True], [True, False, True])
    batch = make_batch(NAME, [mixed], TrainConfig(masked_samples="skip"))
    assert batch.metrics["samples_masked"] == 3
    assert [len(samples) for samples in batch.groups[0].samples] == [1, 1]
    assert not any(sample.masked for sample in batch.samples)
    with pytest.raises(UntrainableError, match=r"trajectory 1: all of its 1 samples"):
        make_batch(NAME, [group([False], [True])], TrainConfig(masked_samples="skip"))


def test_the_mark_crosses_the_wire_and_the_server_refuses_it_too() -> None:
    batch = make_batch(NAME, [group([False], [False])], TrainConfig())
    marked = batch.samples[1].model_copy(update={"masked": True})
    sent = batch.model_copy(update={"samples": [batch.samples[0], marked]})
    received = decode_batch(encode_batch(sent), 1 << 20)
    assert [sample.masked for sample in received.samples] == [False, True]
    with pytest.raises(UntrainableError, match=r"Sample 1 .*masked"):
        rl_data(received, vocabulary=100)
