"""A server that only reads: it serves what another one trains, and changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from art_server.steps.journal import Journal
from openai.types.chat import ChatCompletion

import art_cloud as art
from art_cloud.shared.errors import ConflictError
from art_cloud.shared.names import ModelName

from ..rigs.server_process import TOKEN, ServerProcess

MESSAGES: art.Messages = [{"role": "user", "content": "hello"}]


async def ask(server: ServerProcess, name: str) -> ChatCompletion:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=TOKEN) as client:
        return await client.chat.completions.create(
            model=name, messages=MESSAGES, max_tokens=4, temperature=0, logprobs=True
        )


async def train(backend: art.Backend, model: art.TrainableModel[Any]) -> int:
    async def rollout(reward: float) -> art.Trajectory:
        answer = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=MESSAGES, max_tokens=4
        )
        return art.Trajectory(messages_and_choices=[*MESSAGES, answer.choices[0]], reward=reward)

    groups = await art.gather_trajectory_groups(
        [art.TrajectoryGroup(rollout(float(number)) for number in range(2))]
    )
    return (await backend.train(model, groups, learning_rate=1e-3)).step


async def test_it_serves_the_newest_step_of_the_store(
    server: ServerProcess, backend: art.Backend, model: art.TrainableModel[Any], tmp_path: Path
) -> None:
    name = model.get_inference_name()
    with ServerProcess(tmp_path / "reads", "--read-only", store=server.store) as reads:
        for step in (1, 2):
            assert await train(backend, model) == step
            stored = set(server.store.rglob("*"))
            answers = [await ask(one, name) for one in (reads, server)]
            assert [answer.model for answer in answers] == [f"{name}@{step}"] * 2
            texts, logprobs = zip(
                *((answer.choices[0].message.content, _logprobs(answer)) for answer in answers),
                strict=True,
            )
            assert texts[0] == texts[1]
            assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)
        assert (await ask(reads, f"{name}@1")).model == f"{name}@1"

        with pytest.raises(openai.NotFoundError, match=r"The store has no step of tests/nobody"):
            await ask(reads, "tests/nobody")
        async with reads.backend() as there:
            with pytest.raises(ConflictError, match="--read-only"):
                await model.model_copy().register(there)
            assert await there.model_info(model) == await backend.model_info(model)
        assert set(server.store.rglob("*")) == stored
        assert not list(reads.state.rglob("optimizer*"))


def _logprobs(answer: ChatCompletion) -> list[float]:
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    return [token.logprob for token in found.content]


def test_not_in_the_folder_of_a_server_that_trained(tmp_path: Path) -> None:
    reads = ServerProcess(tmp_path, "--read-only")
    reads.state.mkdir()
    journal = Journal(reads.state / "journal.sqlite")
    journal.submit("0" * 32, "train", ModelName("p", "m"), b"a body")
    journal.close()
    assert reads.launch().ended() == 1
    assert "needs another --state" in reads.output
