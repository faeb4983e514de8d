"""What can't be trained on, at the real server: a clear error each, and nothing is trained."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

import art_cloud as art
from art_cloud.shared.errors import (
    ArtCloudError,
    ConfigError,
    InvalidRequestError,
    NotFoundError,
    UntrainableError,
)
from art_cloud.shared.protocol import JobInfo, Sample, SFTRequest, TrainGroup
from art_cloud.shared.wire import TrainBatch, encode_batch
from art_cloud.store.checkpoints import Checkpoints
from art_cloud.store.opening import open_store

from ..rigs.server_process import ServerProcess
from ..rigs.synthetic import VOCABULARY, as_groups, batch, choice

MESSAGES: Any = [{"role": "user", "content": "Your move?"}]


def steps_of(server: ServerProcess, model: art.TrainableModel) -> Checkpoints:
    return Checkpoints(open_store(str(server.store)), model.full_name)


@pytest.fixture
async def unharmed(
    server: ServerProcess, backend: art.Backend, model: art.TrainableModel
) -> AsyncIterator[None]:
    """After the test there is no new step, and the next one is made as if nothing had been."""
    yield
    assert steps_of(server, model).steps() == [0]
    assert (await backend.info()).jobs_queued == 0
    result = await backend.train(model, as_groups(batch(model.full_name, 1, groups=1)))
    assert result.step == 1


async def failed(http: httpx.AsyncClient, path: str, body: bytes) -> ArtCloudError:
    """The error that a raw call of a job is answered with, at once or when it has run."""
    from art_cloud.client.http import error_of, failure_of

    response = await http.post(path, content=body)
    if (failure := failure_of(response)) is not None:
        return failure
    job = JobInfo.model_validate_json(response.content)
    await http.get(f"/art/v1/jobs/{job.id}/events")
    ended = JobInfo.model_validate_json((await http.get(f"/art/v1/jobs/{job.id}")).content)
    assert ended.state == "failed"
    assert ended.error is not None
    return error_of(ended.error)


@pytest.mark.usefixtures("unharmed")
@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (lambda given: [], "no group"),
        (lambda given: [art.TrajectoryGroup(given[0].trajectories[:1])], "at least twice"),
        (
            lambda given: [
                art.TrajectoryGroup(
                    trajectory.model_copy(update={"reward": math.nan})
                    for trajectory in given[0].trajectories
                )
            ],
            "has reward nan",
        ),
        (
            lambda given: [
                art.TrajectoryGroup(
                    art.Trajectory(messages_and_choices=[*MESSAGES], reward=reward)
                    for reward in (0.0, 1.0)
                )
            ],
            "has no sample from this server",
        ),
    ],
    ids=["nothing", "a group of one", "NaN", "no sample"],
)
async def test_groups_that_nothing_can_be_learned_from(
    backend: art.Backend,
    model: art.TrainableModel,
    groups: Callable[[list[art.TrajectoryGroup]], list[art.TrajectoryGroup]],
    words: str,
) -> None:
    with pytest.raises(UntrainableError, match=words):
        await backend.train(model, groups(as_groups(batch(model.full_name, 1))))


@pytest.mark.usefixtures("unharmed")
async def test_ids_beyond_the_vocabulary(backend: art.Backend, model: art.TrainableModel) -> None:
    foreign = Sample(
        prompt_ids=[1],
        completion_ids=[VOCABULARY * 1000],
        logprobs=[-1.0],
        policy=model.get_inference_name(0),
    )
    group = art.TrajectoryGroup(
        art.Trajectory(messages_and_choices=[*MESSAGES, choice(foreign)], reward=reward)
        for reward in (0.0, 1.0)
    )
    with pytest.raises(UntrainableError, match=f"token id {VOCABULARY * 1000}"):
        await backend.train(model, [group])


def garbage(model: art.TrainableModel) -> list[tuple[bytes, str]]:
    whole = encode_batch(batch(model.full_name, 1))
    empty = TrainBatch(groups=[], samples=[])
    no_trajectory = TrainBatch(groups=[TrainGroup(rewards=[], samples=[])], samples=[])
    no_sample = TrainBatch(groups=[TrainGroup(rewards=[0.0, 1.0], samples=[[], []])], samples=[])
    return [
        (b"", "not a batch|in the middle"),
        (b"garbage", "no zstd stream"),
        (whole[:-20], "ends in the middle"),
        (whole + b"more", "goes on after the end"),
        (json.dumps({"groups": []}).encode(), "no zstd stream"),
        (encode_batch(empty), "no groups"),
        (encode_batch(no_trajectory), "Group 0 has no trajectory"),
        (encode_batch(no_sample), "without a sample"),
    ]


@pytest.mark.usefixtures("unharmed")
async def test_batches_that_are_garbage(server: ServerProcess, model: art.TrainableModel) -> None:
    async with server.http() as http:
        path = f"/art/v1/models/{model.full_name}/train"
        for body, words in garbage(model):
            with pytest.raises(InvalidRequestError, match=words):
                raise await failed(http, path, body)


@pytest.mark.usefixtures("unharmed")
async def test_examples_that_nothing_can_be_learned_from(
    server: ServerProcess, backend: art.Backend, model: art.TrainableModel
) -> None:
    with pytest.raises(UntrainableError, match="Example 1 has no message of the assistant"):
        await backend.train_sft(
            model, [[*MESSAGES, {"role": "assistant", "content": "5"}], [*MESSAGES]]
        )
    with pytest.raises(ConfigError, match="no trajectory"):
        await backend.train_sft(model, [])
    async with server.http() as http:
        path = f"/art/v1/models/{model.full_name}/sft"
        with pytest.raises(UntrainableError, match="no examples"):
            raise await failed(http, path, SFTRequest(examples=[]).model_dump_json().encode())
        with pytest.raises(InvalidRequestError, match="examples"):
            raise await failed(http, path, b"{}")


@pytest.mark.usefixtures("unharmed")
async def test_a_reference_step_that_is_not_there(
    backend: art.Backend, model: art.TrainableModel
) -> None:
    with pytest.raises(NotFoundError, match="no step 5"):
        await backend.train(
            model, as_groups(batch(model.full_name, 1)), kl_coef=0.1, kl_reference_step=5
        )


async def test_equal_rewards_count_as_a_step_that_changes_nothing(
    server: ServerProcess, backend: art.Backend, model: art.TrainableModel
) -> None:
    """With an optimizer that has moments and decays weights, too."""
    signal = as_groups(batch(model.full_name, 1))
    flat = as_groups(batch(model.full_name, 2, rewards=(0.5, 0.5, 0.5)))
    await backend.train(model, signal, weight_decay=0.1)
    result = await backend.train(model, flat, weight_decay=0.1)
    assert result.step == 2
    assert result.metrics["groups_without_signal"] == result.metrics["groups"] == 2
    assert result.metrics["grad_norm"] == 0.0
    steps = steps_of(server, model)
    assert steps.read(2).files == steps.read(1).files


async def test_a_model_is_registered_before_it_is_trained(server: ServerProcess) -> None:
    async with server.http() as http:
        with pytest.raises(NotFoundError, match=r"tests/never is not registered.*register"):
            raise await failed(http, "/art/v1/models/tests/never/sft", b'{"examples": []}')
