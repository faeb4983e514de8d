"""Training at the real server, by the real client library: steps, forks and their history."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import openai
import pytest

import art_cloud as art
from art_cloud.shared.errors import ConflictError, NotFoundError, RivalError
from art_cloud.shared.protocol import CALL_ID, JobInfo
from art_cloud.shared.wire import decode_batch, encode_batch
from art_cloud.store.checkpoints import Checkpoints, Manifest
from art_cloud.store.opening import open_store

from ..rigs.calls import MESSAGES, greedy
from ..rigs.server_process import ServerProcess
from ..rigs.synthetic import as_groups, batch

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
    sent = [sample.model_dump() for sample in decode_batch(body, 1 << 20).unpack().samples]
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
