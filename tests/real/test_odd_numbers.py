"""Numbers that JSON does not have, and manifests that nobody can read: one model's, at most."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

import art_cloud as art
from art_cloud.client.http import failure_of
from art_cloud.shared.errors import ConfigError, ConflictError, NotFoundError, UnreadableError
from art_cloud.shared.names import ModelName
from art_cloud.shared.protocol import CALL_ID, JobInfo
from art_cloud.shared.wire import TrainBatch, encode_batch
from art_cloud.store.checkpoints import Checkpoints
from art_cloud.store.files import FileStore

from ..rigs.server_process import ServerProcess
from ..rigs.synthetic import as_groups, batch

NAN, INFINITE = float("nan"), float("inf")
CALL = "0123456789abcdef0123456789abcdef"


def far_off(name: ModelName, logprob: float, loss: Any) -> TrainBatch:
    """A batch with a token that its sampler thought all but impossible."""
    whole = batch(name, 1, groups=1)
    first = whole.samples[0]
    odd = first.model_copy(update={"logprobs": [logprob, *first.logprobs[1:]]})
    samples = [odd, *whole.samples[1:]]
    return whole.model_copy(update={"samples": samples, "config": art.TrainConfig(loss=loss)})


def registered(base: Path, name: str) -> art.TrainableModel:
    return art.TrainableModel(
        name=name, project="odd", base_model=str(base), lora=art.LoRAConfig(rank=4)
    )


def loads_json(text: str | bytes) -> Any:
    """What a strict reader makes of it."""

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON: {text!r}")

    return json.loads(text, parse_constant=refuse)


async def step_of(server: ServerProcess, model: art.TrainableModel) -> int:
    """The newest that the server has, without registering the model."""
    async with server.http() as http:
        answer = await http.get(f"/art/v1/models/{model.full_name}")
        if (failure := failure_of(answer)) is not None:
            raise failure
        return int(answer.json()["step"])


async def get(http: httpx.AsyncClient, path: str) -> Any:
    answer = await http.get(f"/art/v1/{path}")
    assert answer.is_success, answer.text
    return loads_json(answer.text)


def command(store: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).with_name("art-cloud"), "checkpoints", *arguments, "--store", store],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("loss", "logprob"),
    [("cispo", -200.0), ("cispo", -9999.0), ("gspo", -200.0)],
)
async def test_a_metric_without_a_value_is_left_out_and_named(
    tmp_path: Path, tiny_model: Path, loss: str, logprob: float
) -> None:
    """Its gradient is finite, so the step counts: whatever is asked of it has an answer."""
    server = ServerProcess(tmp_path, "--model", tiny_model)
    model = registered(tiny_model, "agent")
    name = model.full_name
    with server:
        async with server.backend() as backend, server.http() as http:
            await model.register(backend)
            body = encode_batch(far_off(name, logprob, loss))
            sent = await http.post(
                f"/art/v1/models/{name}/train", content=body, headers={CALL_ID: CALL}
            )
            assert sent.is_success, sent.text
            events = (await http.get(f"/art/v1/jobs/{CALL}/events")).text
            lines = [line for line in events.splitlines() if line.startswith("data: ")]
            told = [loads_json(line.removeprefix("data: ")) for line in lines]
            assert told[-1]["type"] == "done"
            warnings = [event["data"]["warning"] for event in told if "warning" in event["data"]]
            assert any("kl_sampler" in warning for warning in warnings), warnings
            job = JobInfo.model_validate(await get(http, f"jobs/{CALL}"))
            assert job.result is not None
            assert job.result.step == 1
            assert "loss" in job.result.metrics
            assert "kl_sampler" not in job.result.metrics
            assert job.result.metrics == told[-1]["data"]["metrics"]
            [_, row] = await get(http, f"models/{name}/history")
            assert row["loss"] == job.result.metrics["loss"]
            [_, info] = await get(http, f"models/{name}/checkpoints")
            assert info["metrics"] == job.result.metrics
            await model.register(backend)
            assert (await backend.train(model, as_groups(batch(name, 2, groups=1)))).step == 2
        assert server.terminate() == 0
    with server:
        assert await step_of(server, model) == 2
    assert command(server.store, "gc", "--yes").returncode == 0
    for path in server.store.rglob("*.json"):
        loads_json(path.read_text())


def rewrite(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


async def test_what_was_written_with_odd_numbers_is_read_without_them(
    tmp_path: Path, tiny_model: Path
) -> None:
    server = ServerProcess(tmp_path, "--model", tiny_model)
    model = registered(tiny_model, "agent")
    steps = Checkpoints(FileStore(server.store, create=True), model.full_name)
    with server:
        async with server.backend() as backend:
            await model.register(backend)
            result = await backend.train(model, as_groups(batch(model.full_name, 1, groups=1)))
            await model.log(metrics={"score": 0.5, "odd": 1.0}, step=1)
        assert server.terminate() == 0
    folder = server.store / str(model.full_name)
    odd = '"metrics": {"a": null, "b": NaN, "c": Infinity, "d": -Infinity, "e": 1e999,'
    rewrite(folder / "steps/000001.json", '"metrics": {', odd)
    rewrite(folder / "steps/000001.json", '"probe": {', '"probe": {"511": null, "510": NaN,')
    [logged] = (folder / "metrics").iterdir()
    rewrite(logged, '"odd":1.0', '"odd":NaN')

    expected = {name: value for name, value in result.metrics.items() if "cost" not in name}
    read = steps.read(1).metrics
    assert read == {name: value for name, value in expected.items() if name in read}
    assert "loss" in read
    assert not {"a", "b", "c", "d", "e"} & read.keys()
    with server:
        async with server.backend() as backend, server.http() as http:
            assert await step_of(server, model) == 1
            [_, info] = await get(http, f"models/{model.full_name}/checkpoints")
            assert info["metrics"] == read | {"val/score": 0.5}
            await get(http, f"models/{model.full_name}/history")
            await model.register(backend)
            assert (
                await backend.train(model, as_groups(batch(model.full_name, 2, groups=1)))
            ).step == 2


async def test_what_a_user_sends_is_refused_with_its_name(
    server: ServerProcess, backend: art.Backend, model: art.TrainableModel
) -> None:
    for odd in (NAN, INFINITE):
        with pytest.raises(ConfigError, match=r"metrics\.score"):
            await model.log(metrics={"score": odd})
    async with server.http() as http:
        body = b'{"split": "val", "step": 0, "metrics": {"score": NaN}}'
        answer = await http.post(f"/art/v1/models/{model.full_name}/log", content=body)
        assert answer.status_code == 400
        assert "score" in answer.json()["error"]["message"]
    assert not any("val/score" in row for row in await model.history())


async def test_trajectories_with_odd_numbers_are_kept_as_json(
    server: ServerProcess, backend: art.Backend, model: art.TrainableModel, tmp_path: Path
) -> None:
    import pyarrow.parquet as pq

    groups = as_groups(batch(model.full_name, 1, groups=1))
    groups[0].trajectories[0].metrics |= {"odd": NAN, "turns": 3}
    groups[0].trajectories[0].metadata["seen"] = INFINITE
    with pytest.warns(UserWarning, match="not finite"):
        await model.log(groups, step=0)
    with pytest.warns(UserWarning, match="not finite"):
        await backend.train(model, groups)
    async with server.http() as http:
        row = (
            '{"group": 0, "trajectory": 0, "reward": 1.0, "metrics": {"odd": NaN, "turns": 3},'
            ' "metadata": {"seen": Infinity}, "messages": [{"content": NaN}], "logs": [],'
            ' "samples": []}'
        )
        body = f'{{"split": "raw", "step": 0, "metrics": {{}}, "trajectories": [{row}]}}'
        sent = await http.post(f"/art/v1/models/{model.full_name}/log", content=body)
        assert sent.is_success, sent.text
    found = list((server.store / str(model.full_name) / "trajectories").rglob("*.parquet"))
    assert len(found) == 3
    for path in found:
        for kept in pq.read_table(path).to_pylist():
            assert "odd" not in loads_json(kept["metrics"])
            loads_json(kept["metadata"])
            loads_json(kept["messages"] or "null")
        turns = [
            loads_json(kept["metrics"]).get("turns") for kept in pq.read_table(path).to_pylist()
        ]
        assert 3 in turns


GARBAGE = {
    "garbage": lambda text: "\x00garbage",
    "empty": lambda text: "",
    "a newer version": lambda text: text.replace('"format": 1', '"format": 2'),
    "an unknown field": lambda text: text.replace('"format": 1', '"format": 1, "later": {}'),
}


@pytest.mark.parametrize("damage", GARBAGE)
async def test_a_manifest_that_nobody_can_read_hurts_its_own_model(
    tmp_path: Path, tiny_model: Path, damage: str
) -> None:
    server = ServerProcess(tmp_path, "--model", tiny_model)
    hurt, whole = registered(tiny_model, "hurt"), registered(tiny_model, "whole")
    with server:
        async with server.backend() as backend:
            for model in (hurt, whole):
                await model.register(backend)
                await backend.train(model, as_groups(batch(model.full_name, 1, groups=1)))
        assert server.terminate() == 0
    manifest = server.store / "odd/hurt/steps/000001.json"
    before = manifest.read_text()
    manifest.write_text(GARBAGE[damage](before))
    with server:
        assert "odd/hurt is not served" in server.output
        async with server.backend() as backend:
            assert await step_of(server, whole) == 1
            await whole.register(backend)
            data = as_groups(batch(whole.full_name, 2, groups=1))
            assert (await backend.train(whole, data)).step == 2
            with pytest.raises(UnreadableError, match=r"odd/hurt/steps/000001\.json.*Restore"):
                await step_of(server, hurt)
            with pytest.raises(UnreadableError, match=r"odd/hurt/steps/000001\.json.*Restore"):
                await hurt.register(backend)

            listed = command(server.store, "ls")
            assert "odd/whole" in listed.stdout
            assert "odd/hurt/steps/000001.json" in listed.stderr
            verified = command(server.store, "verify")
            assert verified.returncode == 1
            assert "odd/hurt/steps/000001.json" in " ".join(verified.stdout.split())
            collected = command(server.store, "gc", "--yes", "--older-than", "1s")
            assert collected.returncode == 1
            assert "odd/hurt/steps/000001.json" in collected.stderr
            assert "Nothing was removed" in collected.stderr

            manifest.write_text(before)
            await hurt.register(backend)
            assert await hurt.get_step() == 1


async def test_a_missing_blob_hurts_its_own_model(tmp_path: Path, tiny_model: Path) -> None:
    server = ServerProcess(tmp_path, "--model", tiny_model)
    hurt, whole = registered(tiny_model, "hurt"), registered(tiny_model, "whole")
    with server:
        async with server.backend() as backend:
            for model in (hurt, whole):
                await model.register(backend)
            await backend.train(hurt, as_groups(batch(hurt.full_name, 1, groups=1)))
        assert server.terminate() == 0
    store = FileStore(server.store)
    files = Checkpoints(store, hurt.full_name).read(1).files
    (store.blob_folder / files["adapter/adapter_model.safetensors"].sha256).unlink()
    with server:
        async with server.backend() as backend:
            await whole.register(backend)
            with pytest.raises(NotFoundError, match="holds no blob"):
                await step_of(server, hurt)


async def test_a_model_of_another_base_does_not_keep_the_server_from_starting(
    tmp_path: Path, tiny_model: Path
) -> None:
    """Its registration was refused: the restart does not load its base."""
    other = tmp_path / "other"
    from art_server.tiny_model import make_tiny_model

    make_tiny_model(other, hidden_size=64, layers=1)
    first, second = ServerProcess(tmp_path / "1"), ServerProcess(tmp_path / "2")
    first.store = second.store = tmp_path / "store"
    theirs, mine = registered(other, "a-theirs"), registered(tiny_model, "mine")
    with first:
        async with first.backend() as backend:
            await theirs.register(backend)
    with second:
        async with second.backend() as backend:
            await mine.register(backend)
            with pytest.raises(ConflictError, match="one base model"):
                await theirs.register(backend)
        assert second.terminate() == 0
    with second:
        assert (await second.info()).base_model == str(tiny_model)
        assert await step_of(second, mine) == 0
