"""Trajectories, groups, and what a batch is made from."""

from __future__ import annotations

import asyncio
import copy
import math
import subprocess
import sys
from typing import Any

import pytest
from openai.types.chat import ChatCompletion
from openai.types.chat.chat_completion import Choice

import art_cloud as art
from art_cloud.rollouts.batch import make_batch, mean_metrics, reward_metrics
from art_cloud.shared.names import ModelName

NAME = ModelName("p", "m")


def choice(text: str | None = "hi", policy: str = "p/m@3", **extra: Any) -> Choice:
    sample = {
        "prompt_ids": [1, 2],
        "completion_ids": [3],
        "logprobs": [-0.1],
        "policy": policy,
    }
    message = {"role": "assistant", "content": text, **extra}
    return Choice.model_validate(
        {"index": 0, "finish_reason": "stop", "message": message, "sample": sample}
    )


def trajectory(reward: float = 0.0, **fields: Any) -> art.Trajectory:
    messages = [{"role": "user", "content": "go"}, choice()]
    return art.Trajectory(messages_and_choices=messages, reward=reward, **fields)


def group(*rewards: float, **fields: Any) -> art.TrajectoryGroup:
    return art.TrajectoryGroup([trajectory(reward) for reward in rewards], **fields)


def test_importing_art_cloud_stays_light() -> None:
    code = (
        "import sys, art_cloud, art_cloud.rollouts.gather, art_cloud.backend;"
        "print([m for m in ('torch', 'openai', 'numpy', 'transformers') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    for name in art.__all__:
        assert getattr(art, name) is not None


def test_messages_are_plain_and_keep_tool_calls() -> None:
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "search", "arguments": '{"query": "x"}'},
    }
    told = art.Trajectory(
        messages_and_choices=[
            {"role": "user", "content": None},
            choice(None, tool_calls=[call]),
            {"role": "tool", "tool_call_id": "1", "content": "found"},
        ]
    )
    assert told.messages() == [
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "found"},
    ]


def test_samples_come_from_all_histories_in_order() -> None:
    sub = art.History(messages_and_choices=[choice(policy="p/m@4")])
    told = trajectory(additional_histories=[sub])
    assert [sample.policy for sample in told.samples()] == ["p/m@3", "p/m@4"]


def test_a_whole_response_among_the_messages_is_explained() -> None:
    response = ChatCompletion(
        id="1", choices=[choice()], created=0, model="m", object="chat.completion"
    )
    told = art.Trajectory()
    told.messages_and_choices.append(response)  # type: ignore[arg-type]
    with pytest.raises(art.UntrainableError, match=r"a ChatCompletion.*response.choices\[0\]"):
        told.samples()


def test_groups_survive_json_with_their_samples() -> None:
    made = group(0.5, 1.0, metadata={"task": 7}, exceptions=[ValueError("no")])
    back = art.TrajectoryGroup.model_validate_json(made.model_dump_json())
    assert back.model_dump_json() == made.model_dump_json()
    assert [t.samples() for t in back] == [t.samples() for t in made]
    assert back.exceptions[0].type == "ValueError"


def test_groups_can_be_copied() -> None:
    made = group(0.5, 1.0)
    assert copy.deepcopy(made).model_dump() == made.model_dump()
    assert copy.copy(made).trajectories[0] is made.trajectories[0]


def test_exceptions_among_the_trajectories_are_kept() -> None:
    made = art.TrajectoryGroup([trajectory(1.0), RuntimeError("boom")])
    assert len(made) == 1
    assert (made.exceptions[0].type, made.exceptions[0].message) == ("RuntimeError", "boom")


async def test_durations_are_measured() -> None:
    told = trajectory()
    async with told.track_duration("tool"):
        await asyncio.sleep(0)
    assert told.metrics["tool_duration"] > 0
    assert told.finish() is told
    assert told.metrics["duration"] >= told.metrics["tool_duration"]


async def test_a_group_of_awaitables_is_no_use_before_it_ran() -> None:
    async def rollout() -> art.Trajectory:
        return trajectory(1.0)

    waiting = art.TrajectoryGroup(rollout() for _ in range(3))
    with pytest.raises(art.ConfigError, match="3 rollouts of this TrajectoryGroup have not run"):
        len(waiting)
    assert [t.reward for t in await waiting] == [1.0, 1.0, 1.0]


def test_a_batch_has_rewards_samples_and_means() -> None:
    first = art.TrajectoryGroup(
        [trajectory(1, metrics={"turns": 2}), trajectory(0, metrics={"turns": 4})]
    )
    batch = make_batch(NAME, [first, group(3, 4)], art.TrainConfig())
    assert [g.rewards for g in batch.groups] == [[1, 0], [3, 4]]
    assert [g.samples for g in batch.groups] == [[[0], [1]], [[2], [3]]]
    assert batch.metrics == {
        "trajectory/turns": 3,
        "trajectory/exception_rate": 0,
        "groups_too_small": 0,
        "samples_masked": 0,
    }


def test_no_groups() -> None:
    with pytest.raises(art.UntrainableError, match="no group"):
        make_batch(NAME, [], art.TrainConfig())


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(art.UntrainableError, match=r"Group 1 \(task=9\) has 1 trajectories"):
        make_batch(NAME, [group(1, 2), group(1, metadata={"task": 9})], art.TrainConfig())


def test_a_group_whose_rollouts_failed_is_skipped_and_counted() -> None:
    lost = group(1, exceptions=[TimeoutError("slow")])
    with pytest.warns(UserWarning, match="Group 1 is skipped: .*TimeoutError: slow"):
        batch = make_batch(NAME, [group(1, 2), lost], art.TrainConfig())
    assert len(batch.groups) == 1
    assert batch.metrics["groups_too_small"] == 1
    assert batch.metrics["trajectory/exception_rate"] == 0.25


@pytest.mark.filterwarnings("ignore:Group 0 is skipped")
def test_nothing_left_is_refused() -> None:
    lost = group(1, exceptions=[TimeoutError("slow")])
    with pytest.raises(art.UntrainableError, match="None of the 1 groups"):
        make_batch(NAME, [lost], art.TrainConfig())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_no_number_names_its_trajectory(bad: float) -> None:
    odd = art.TrajectoryGroup([trajectory(1), trajectory(bad, metadata={"seed": 5})])
    with pytest.raises(art.UntrainableError, match=r"Group 0, trajectory 1 \(seed=5\) has reward"):
        make_batch(NAME, [odd], art.TrainConfig())
    with pytest.raises(art.UntrainableError, match="trajectory 1"):
        reward_metrics([odd])


def test_a_trajectory_without_a_sample_is_explained() -> None:
    bare = art.Trajectory(messages_and_choices=[{"role": "assistant", "content": "x"}])
    with pytest.raises(art.UntrainableError, match=r"trajectory 1 has no sample.*choices\[0\]"):
        make_batch(NAME, [art.TrajectoryGroup([trajectory(), bare])], art.TrainConfig())


@pytest.mark.parametrize("policy", ["p/other@3", "Qwen/Qwen2.5-3B-Instruct", "tiny"])
def test_samples_of_another_model_are_refused(policy: str) -> None:
    other = art.Trajectory(messages_and_choices=[choice(policy=policy)])
    with pytest.raises(art.UntrainableError, match=f"trajectory 1 was sampled from {policy}"):
        make_batch(NAME, [art.TrajectoryGroup([trajectory(), other])], art.TrainConfig())


def test_metrics_that_are_no_numbers_are_left_out_aloud() -> None:
    odd = art.TrajectoryGroup(
        [trajectory(metrics={"score": math.nan}), trajectory(metrics={"score": 3})]
    )
    with pytest.warns(UserWarning, match="1 of 2 values of metric 'score'"):
        assert mean_metrics([odd])["score"] == 3


def test_rewards_are_summed_up() -> None:
    assert reward_metrics([group(0, 1), group(1, 1)]) == {"reward": 0.75, "reward_std": 0.25}
