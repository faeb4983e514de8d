"""Guided decoding on real vLLM: what it samples is marked, recorded and not trained on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import art_cloud as art

from ..contract.engines import vllm_python
from ..rigs.server_process import ServerProcess

pytestmark = pytest.mark.xdist_group("vllm")

MESSAGES: Any = [{"role": "user", "content": "Your move?"}]
SCHEMA: Any = {
    "type": "json_schema",
    "json_schema": {"name": "move", "schema": {"enum": ["left", "right"]}},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[ServerProcess]:
    arguments = ["--engine", "vllm", "--vllm-python", vllm_python(), "--model", tiny_model]
    with ServerProcess(tmp_path_factory.mktemp("masked"), *arguments) as server:
        yield server
        assert server.terminate() == 0


@pytest.mark.slow
async def test_guided_samples_are_marked_and_the_others_are_learned_from(
    server: ServerProcess, tiny_model: Path
) -> None:
    async def rollout(number: int) -> art.Trajectory:
        async with (
            model.record() as trajectory,
            openai.AsyncOpenAI(base_url=trajectory.base_url, api_key=trajectory.api_key) as client,
        ):
            ask = client.chat.completions.create
            free = await ask(model="any", messages=MESSAGES, max_tokens=4)
            guided = await ask(model="any", messages=MESSAGES, max_tokens=8, response_format=SCHEMA)
            assert guided.choices[0].message.content in ('"left"', '"right"')
            stream = await ask(
                model="any",
                messages=MESSAGES,
                max_tokens=8,
                stream=True,
                extra_body={"structured_outputs": {"choice": ["left", "right"]}},
            )
            said = [chunk.choices[0].delta.content or "" async for chunk in stream]
            assert "".join(said) in ("left", "right")
        trajectory.reward = float(number)
        first, second, third = trajectory.samples()
        assert [first.masked, second.masked, third.masked] == [False, True, True]
        assert free.choices[0].model_extra["sample"]["masked"] is False
        assert 0.0 in second.logprobs  # the grammar left one token to choose
        assert 0.0 not in first.logprobs
        return trajectory

    async with server.backend() as backend:
        model = art.TrainableModel(name="agent", project="masked", base_model=str(tiny_model))
        await model.register(backend)
        groups = [await art.TrajectoryGroup(rollout(number) for number in range(3))]
        with pytest.raises(art.UntrainableError, match="2 of its 3 samples were drawn"):
            await model.train(groups)
        assert await model.get_step() == 0
        result = await model.train(groups, masked_samples="skip")
        assert result.metrics["samples"] == 3
        assert result.metrics["samples_masked"] == 6
        assert result.metrics["kl_sampler"] < 1e-6
        assert 0 <= result.metrics["canary"] < 1e-3
