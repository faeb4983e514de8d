"""The real server under the real `openai` client and the real client library."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import openai
import pytest

import art_cloud as art
from art_cloud.checkpoints import Checkpoints, Manifest
from art_cloud.errors import ConflictError, NotFoundError, RivalError
from art_cloud.protocol import CALL_ID, JobInfo
from art_cloud.store import open_store
from art_cloud.wire import decode_batch, encode_batch

from ..server_process import TOKEN, ServerProcess, wait_until
from ..synthetic import as_groups, batch

MESSAGES: Any = [{"role": "user", "content": "Your move?"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
        },
    }
]


def manifest(server: ServerProcess, model: art.TrainableModel, step: int) -> Manifest:
    return Checkpoints(open_store(str(server.store)), model.full_name).read(step)


async def at_rest(backend: art.Backend) -> None:
    async with asyncio.timeout(30):
        while True:
            info = await backend.info()
            if info.requests_running == info.requests_waiting == 0 and info.training is None:
                return
            await asyncio.sleep(0.01)


async def greedy(client: openai.AsyncOpenAI, name: str) -> list[float]:
    """Logprobs of what `name` says to MESSAGES: they tell one set of weights from another."""
    answer = await client.chat.completions.create(
        model=name, messages=MESSAGES, max_tokens=4, temperature=0, seed=1
    )
    assert answer.choices[0].model_extra is not None
    logprobs: list[float] = answer.choices[0].model_extra["sample"]["logprobs"]
    return logprobs


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


async def test_trains_on_exactly_the_ids_that_were_sampled(
    backend: art.Backend, model: art.TrainableModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several turns with tool calls and their answers, written down as the agent likes."""
    returned: list[dict[str, Any]] = []
    client = model.openai_client()

    async def rollout(reward: float) -> art.Trajectory:
        trajectory = art.Trajectory(messages_and_choices=[*MESSAGES], tools=TOOLS, reward=reward)
        for turn in range(3):
            answer = await client.chat.completions.create(
                model=model.get_inference_name(),
                messages=trajectory.messages(),
                tools=TOOLS,
                max_tokens=10,
            )
            choice = answer.choices[0]
            returned.append((choice.model_extra or {})["sample"])
            # what the agent makes of the message is its own affair
            choice.message.content = f"(rewritten) {choice.message.content}"
            trajectory.messages_and_choices.append(choice)
            trajectory.messages_and_choices.append(
                {"role": "tool", "tool_call_id": f"call-{turn}", "content": '{"found": "fox"}'}
            )
        return trajectory

    groups = await art.gather_trajectory_groups(
        [art.TrajectoryGroup(rollout(reward) for reward in (0.0, 1.0, 0.3))], pbar_desc=None
    )
    bodies: list[bytes] = []
    request = httpx.AsyncClient.request

    async def spied(self: httpx.AsyncClient, *arguments: Any, **options: Any) -> httpx.Response:
        if str(arguments[1]).endswith("/train"):
            bodies.append(options["content"])
        return await request(self, *arguments, **options)

    monkeypatch.setattr(httpx.AsyncClient, "request", spied)
    result = await backend.train(model, groups)
    [body] = bodies
    sent = [sample.model_dump() for sample in decode_batch(body, 1 << 20).samples]
    key = json.dumps
    assert sorted(sent, key=key) == sorted(
        [sample | {"masked": False} for sample in returned], key=key
    )
    assert result.metrics["samples"] == 9
    assert result.metrics["tokens"] == sum(len(sample["completion_ids"]) for sample in returned)
    assert result.metrics["ratio_max"] == pytest.approx(1.0, abs=1e-3)  # on policy
    assert result.metrics["kl_sampler"] == pytest.approx(0.0, abs=1e-5)


async def test_a_repeated_call_makes_no_second_step(
    server: ServerProcess, model: art.TrainableModel
) -> None:
    body = encode_batch(batch(model.full_name, 3))
    other = encode_batch(batch(model.full_name, 4))
    path, id_ = f"/art/v1/models/{model.full_name}/train", str(uuid4())
    async with server.http() as http:
        first = await http.post(path, content=body, headers={CALL_ID: id_})
        assert first.status_code == 202
        job = JobInfo.model_validate_json(first.content)
        events = await http.get(f"/art/v1/jobs/{job.id}/events")
        types = [line[7:] for line in events.text.splitlines() if line.startswith("event: ")]
        assert types[:2] == ["queued", "started"]
        assert types[-1] == "done"
        again = JobInfo.model_validate_json(
            (await http.post(path, content=body, headers={CALL_ID: id_})).content
        )
        assert again.state == "done"
        assert again.result is not None
        assert again.result.step == 1
        conflict = await http.post(path, content=other, headers={CALL_ID: id_})
        assert (conflict.status_code, conflict.json()["error"]["code"]) == (409, "conflict")

        last = await http.get(
            f"/art/v1/jobs/{job.id}/events", headers={"Last-Event-ID": str(len(types) - 1)}
        )
        [line] = [line for line in last.text.splitlines() if line.startswith("data: ")]
        assert json.loads(line[6:])["number"] == len(types)
        assert json.loads(line[6:])["data"]["step"] == 1
    assert await model.get_step() == 1


async def test_two_models_are_registered_at_once(backend: art.Backend, tiny_model: Path) -> None:
    models = [
        art.TrainableModel(name=uuid4().hex, project="tests", base_model=str(tiny_model))
        for _ in range(2)
    ]
    await asyncio.gather(*(model.register(backend) for model in [*models, *models]))
    assert [await model.get_step() for model in models] == [0, 0]
    with pytest.raises(ConflictError, match="is in the store with"):
        await models[0].model_copy(update={"lora": art.LoRAConfig(rank=3)}).register(backend)


async def test_forks_go_their_own_way(
    client: openai.AsyncOpenAI, backend: art.Backend, model: art.TrainableModel
) -> None:
    await backend.train(model, as_groups(batch(model.full_name, 1)), learning_rate=0.01)
    fork = model.model_copy(update={"name": uuid4().hex})
    begun = await backend.checkpoints(model).fork(fork)
    assert (begun.step, begun.kind) == (1, "fork")
    await fork.register(backend)
    assert await greedy(client, fork.get_inference_name()) == pytest.approx(
        await greedy(client, model.get_inference_name()), abs=1e-5
    )
    data = batch(model.full_name, 2)
    ours = await backend.train(model, as_groups(data))
    theirs = await backend.train(fork, as_groups(batch(fork.full_name, 2)))
    assert (ours.step, theirs.step) == (2, 2)
    for name in ("loss", "grad_norm", "kl_sampler"):
        assert ours.metrics[name] == theirs.metrics[name]  # the optimizer's state came along
    with pytest.raises(ConflictError, match="exists already"):
        await backend.checkpoints(model).fork(fork)


async def test_what_is_logged_is_found_again(
    server: ServerProcess, backend: art.Backend, model: art.TrainableModel
) -> None:
    import pyarrow.parquet as pq

    trajectory = art.Trajectory(messages_and_choices=[*MESSAGES], reward=0.75, logs=["hello"])
    for _ in range(2):  # an answer that is lost has a call sent again
        await model.log([trajectory], split="val", metrics={"length": 3.0})
    assert (await backend.checkpoints(model).best("val/reward")).step == 0
    folder = server.store / str(model.full_name) / "trajectories" / "val"
    [file] = folder.iterdir()
    [row] = pq.read_table(file).to_pylist()
    assert (row["reward"], row["step"], row["logs"]) == (0.75, 0, ["hello"])
    assert json.loads(row["messages"]) == MESSAGES
    with pytest.raises(NotFoundError, match="no step 9"):
        await model.log(metrics={"reward": 1.0}, step=9)


async def test_the_history_outlives_the_steps(
    backend: art.Backend, model: art.TrainableModel
) -> None:
    steps = backend.checkpoints(model)
    for seed in range(3):
        await backend.train(model, as_groups(batch(model.full_name, seed)))
    await model.log(metrics={"reward": 0.5}, step=1)
    fork = await steps.fork(f"tests/{uuid4().hex}", 2)
    keep = art.Retention(keep_last=1)
    assert [info.step for info in await steps.prune(keep, dry_run=True)] == [1]
    assert len(await steps.list()) == 4
    assert [info.step for info in await steps.prune(keep)] == [1]
    assert [info.step for info in await steps.list()] == [0, 2, 3]
    rows = await model.history()
    assert [(row["step"], row["kind"]) for row in rows] == [
        (0, "init"), (1, "train"), (2, "train"), (3, "train")
    ]  # fmt: skip
    assert rows[1]["val/reward"] == 0.5
    assert rows[1]["grad_norm"] > 0
    assert fork.step == 2
    with pytest.raises(NotFoundError, match="No step has the metric 'val/score'"):
        await steps.prune(art.Retention(keep_best="val/score"))


async def test_an_adapter_in_the_store_is_a_plain_peft_folder(
    server: ServerProcess,
    client: openai.AsyncOpenAI,
    backend: art.Backend,
    model: art.TrainableModel,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    await backend.train(model, as_groups(batch(model.full_name, 1)), learning_rate=0.01)
    answer = await client.chat.completions.create(
        model=model.get_inference_name(1), messages=MESSAGES, max_tokens=8
    )
    [sample] = art.Trajectory(messages_and_choices=[answer.choices[0]]).samples()
    steps = Checkpoints(open_store(str(server.store)), model.full_name)
    adapter = steps.fetch(steps.read(1), tmp_path / "step") / "adapter"
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    ids_T = torch.tensor(sample.prompt_ids + sample.completion_ids)
    with torch.no_grad():
        logits_TV = PeftModel.from_pretrained(base, adapter)(ids_T[None]).logits[0]
    logprobs_T = logits_TV[:-1].log_softmax(-1).gather(1, ids_T[1:, None])[:, 0]
    expected = logprobs_T[len(sample.prompt_ids) - 1 :].tolist()
    assert sample.logprobs == pytest.approx(expected, abs=1e-4)


async def test_two_servers_that_train_one_model_find_out(
    server: ServerProcess,
    client: openai.AsyncOpenAI,
    backend: art.Backend,
    model: art.TrainableModel,
    tmp_path: Path,
) -> None:
    groups = as_groups(batch(model.full_name, 1))
    with ServerProcess(tmp_path, store=server.store) as rival:
        async with rival.backend() as elsewhere:
            same = art.TrainableModel(
                name=model.name, project=model.project, base_model=model.base_model, lora=model.lora
            )
            await same.register(elsewhere)
            assert (await elsewhere.train(same, groups)).step == 1
            with pytest.raises(openai.NotFoundError, match="made by another server"):
                await greedy(client, model.get_inference_name(1))
            with pytest.raises(RivalError, match=r"Step 1 of .* made by another call"):
                await backend.train(model, groups)
            assert (await elsewhere.train(same, groups)).step == 2
        assert rival.terminate() == 0
    await model.register(backend)  # the rival is gone: on from where it was
    assert (await backend.train(model, groups)).step == 3
    assert manifest(server, model, 3).parent is not None


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
