"""The real server under the real `openai` client and the real client library."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

import art_cloud as art

from ..rigs.calls import MESSAGES, greedy
from ..rigs.server_process import TOKEN, ServerProcess
from ..rigs.synthetic import as_groups, batch
from ..rigs.waiting import wait_until

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
        },
    }
]


async def at_rest(backend: art.Backend) -> None:
    async with asyncio.timeout(30):
        while True:
            info = await backend.info()
            if info.requests_running == info.requests_waiting == 0 and info.training is None:
                return
            await asyncio.sleep(0.01)


async def test_the_models_that_can_be_asked(
    client: openai.AsyncOpenAI, model: art.TrainableModel, tiny_model: Path
) -> None:
    names = [entry.id async for entry in client.models.list()]
    assert {str(tiny_model), model.get_inference_name(), model.get_inference_name(0)} <= set(names)


@pytest.mark.parametrize("step", [None, 0])
async def test_chat_names_the_policy_that_answered(
    client: openai.AsyncOpenAI, model: art.TrainableModel, step: int | None
) -> None:
    policy = model.get_inference_name(0)
    raw = await client.chat.completions.with_raw_response.create(
        model=model.get_inference_name(step),
        messages=MESSAGES,
        n=3,
        max_completion_tokens=5,
        logprobs=True,
        top_logprobs=2,
        seed=3,
    )
    answer = raw.parse()
    assert raw.headers["art-policy"] == answer.model == policy
    assert raw.headers["art-version"] == art.__version__
    assert len(answer.choices) == 3
    assert answer.usage is not None
    for choice in answer.choices:
        sample = art.Trajectory(messages_and_choices=[choice]).samples()[0]
        assert sample.policy == policy
        assert len(sample.completion_ids) == len(sample.logprobs) <= 5
        assert answer.usage.prompt_tokens == len(sample.prompt_ids)
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [token.logprob for token in choice.logprobs.content] == pytest.approx(
            sample.logprobs
        )
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
    again = await client.chat.completions.create(
        model=policy, messages=MESSAGES, n=3, max_tokens=5, seed=3
    )
    assert [c.message.content for c in again.choices] == [c.message.content for c in answer.choices]


async def test_completions_stop_where_they_are_told(
    client: openai.AsyncOpenAI, tiny_model: Path
) -> None:
    whole = await client.completions.create(
        model=str(tiny_model), prompt="one two", max_tokens=30, temperature=0
    )
    text = whole.choices[0].text
    assert len(text) > 3
    stop = text[len(text) // 2 :][:2]
    cut = await client.completions.create(
        model=str(tiny_model), prompt="one two", max_tokens=30, temperature=0, stop=[stop]
    )
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.model == str(tiny_model)


async def test_a_stream_says_what_the_whole_answer_says(
    client: openai.AsyncOpenAI, model: art.TrainableModel
) -> None:
    request: dict[str, Any] = {
        "model": model.get_inference_name(),
        "messages": MESSAGES,
        "max_tokens": 12,
        "seed": 5,
        "tools": TOOLS,
    }
    whole = await client.chat.completions.create(**request)
    text, samples, usage = "", [], None
    raw = await client.chat.completions.with_raw_response.create(
        **request, stream=True, stream_options={"include_usage": True}
    )
    assert raw.headers["art-policy"] == model.get_inference_name(0)
    async for chunk in raw.parse():
        assert chunk.model == model.get_inference_name(0)
        for choice in chunk.choices:
            text += choice.delta.content or ""
            if choice.finish_reason is not None:
                samples.append((choice.model_extra or {})["sample"])
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content
    assert samples == [(whole.choices[0].model_extra or {})["sample"]]
    assert usage == whole.usage


async def test_a_name_with_a_step_keeps_its_weights(
    client: openai.AsyncOpenAI, backend: art.Backend, model: art.TrainableModel
) -> None:
    name, first = model.get_inference_name(), model.get_inference_name(0)
    before = await greedy(client, name)
    result = await backend.train(model, as_groups(batch(model.full_name, 1)), learning_rate=0.01)
    assert (result.step, result.policy) == (1, model.get_inference_name(1))
    assert await model.get_step() == 1
    after = await greedy(client, name)
    assert after != before
    assert await greedy(client, model.get_inference_name(1)) == after
    assert await greedy(client, first) == before


async def test_old_steps_are_loaded_again_when_asked_for(
    client: openai.AsyncOpenAI, backend: art.Backend, model: art.TrainableModel
) -> None:
    """More steps than stay loaded, asked for in any order by many at once."""
    first = await greedy(client, model.get_inference_name(0))
    for seed in range(10):
        await backend.train(model, as_groups(batch(model.full_name, seed, groups=1)))
    loaded = (await backend.info()).policies
    assert model.get_inference_name(0) not in loaded
    assert model.get_inference_name(10) in loaded
    each = {step: await greedy(client, model.get_inference_name(step)) for step in range(11)}
    assert each[0] == first
    steps = [n * 7 % 11 for n in range(22)]
    answers = await asyncio.gather(
        *(greedy(client, model.get_inference_name(step)) for step in steps)
    )
    assert answers == [pytest.approx(each[step], abs=1e-4) for step in steps]

    checkpoints = backend.checkpoints(model)
    await checkpoints.delete(3)
    with pytest.raises(openai.NotFoundError, match=r"no step 3\. It has steps 0-2, 4-10"):
        await greedy(client, model.get_inference_name(3))
    assert model.get_inference_name(3) not in [entry.id async for entry in client.models.list()]


async def test_many_requests_are_answered_while_it_trains(
    client: openai.AsyncOpenAI, backend: art.Backend, model: art.TrainableModel
) -> None:
    groups = as_groups(batch(model.full_name, 2, groups=8, length=300))
    training = asyncio.create_task(backend.train(model, groups))
    answered_meanwhile = 0
    while not training.done():
        await greedy(client, model.get_inference_name())
        answered_meanwhile += (await backend.info()).training is not None
    assert (await training).step == 1
    assert answered_meanwhile >= 3


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_whose_client_went_away_end(
    client: openai.AsyncOpenAI, backend: art.Backend, model: art.TrainableModel, stream: bool
) -> None:
    async def ask() -> None:
        answer: Any = await client.chat.completions.create(
            model=model.get_inference_name(),
            messages=MESSAGES,
            max_tokens=1900,
            stream=stream,
            extra_body={"ignore_eos": True},
        )
        async for _ in answer:
            pass

    tasks = [asyncio.create_task(ask()) for _ in range(6)]
    async with asyncio.timeout(30):
        while (await backend.info()).requests_running < 6:
            await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await at_rest(backend)
    assert not any(task.done() and not task.cancelled() for task in tasks)
    # nothing holds the policy any more: it can be unloaded once it is not the newest
    await backend.train(model, as_groups(batch(model.full_name, 1, groups=1)))
    await backend.checkpoints(model).delete(0)
    assert model.get_inference_name(0) not in (await backend.info()).policies


async def test_a_server_that_nobody_needs_ends(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path, "--idle", "0.5").start()
    assert (await server.info()).base_model is None
    assert await asyncio.to_thread(server.ended) == 0
    assert "server ends (--idle)" in server.output
    assert not (server.state / "endpoint.json").exists()


@pytest.mark.parametrize("path", ["art/v1/models/p/m/train", "v1/chat/completions"])
async def test_a_client_that_sends_half_a_request_keeps_and_harms_nothing(
    tmp_path: Path, path: str
) -> None:
    with ServerProcess(tmp_path) as server:

        async def half() -> asyncio.StreamWriter:
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(
                f"POST /{path} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n"
                f"Authorization: Bearer {TOKEN}\r\n\r\nhalf of it".encode()
            )
            await writer.drain()
            return writer

        (await half()).close()
        await asyncio.to_thread(wait_until, lambda: "a client went away" in server.output)
        assert "Traceback" not in server.output
        still = await half()
        await server.info()
        assert await asyncio.to_thread(server.terminate) == 0
        still.close()


def test_the_command_line_is_quick_to_explain_itself() -> None:
    code = (
        "import runpy, sys; sys.argv = ['art-server', '--help']\n"
        "try: runpy.run_module('art_server', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0\n"
        "print(sorted({'torch', 'transformers', 'peft', 'starlette'} & sys.modules.keys()))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--store" in run.stdout
    assert run.stdout.splitlines()[-1] == "[]"
