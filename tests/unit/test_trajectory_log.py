"""Trajectories as Parquet: of training steps and of evaluations, in one schema."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import duckdb
import pandas as pd
import pytest
from art_server.steps.programs import Programs
from art_server.steps.runtime import Runtime, Settings
from art_server.steps.trajectory_log import write_logged

import art_cloud as art
from art_cloud.rollouts.batch import logged_trajectories, make_batch
from art_cloud.shared.config import LoRAConfig
from art_cloud.shared.errors import InvalidRequestError, JobError, StoreUnavailableError
from art_cloud.shared.names import ModelName
from art_cloud.shared.protocol import JobInfo, JobKind, LogRequest, RegisterRequest, StepResult
from art_cloud.shared.wire import encode_batch

from ..rigs.synthetic import as_groups, batch

NAME = ModelName("p", "m")


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[Runtime]:
    (tmp_path / "state").mkdir()
    runtime = Runtime(Settings(state=tmp_path / "state", store=str(tmp_path / "store")))
    yield runtime
    await runtime.close()


@pytest.fixture
async def programs(runtime: Runtime, tiny_model: Path) -> Programs:
    programs = runtime.programs
    body = RegisterRequest(base_model=str(tiny_model), lora=LoRAConfig(rank=4)).model_dump_json()
    await run(programs, "register", body.encode())
    return programs


async def run(
    programs: Programs,
    kind: JobKind,
    body: bytes,
    job: str | None = None,
    told: list[dict[str, Any]] | None = None,
) -> StepResult:
    info = JobInfo(id=job or uuid4().hex, kind=kind, project="p", model="m", state="running")
    return await programs.run(info, body, (told if told is not None else []).append)


def files(folder: Path) -> list[str]:
    root = folder / "store" / "p" / "m" / "trajectories"
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*.parquet"))


async def test_what_is_trained_on_and_what_is_logged_are_read_together(
    runtime: Runtime, programs: Programs, tmp_path: Path
) -> None:
    groups = as_groups(batch(NAME, 1, groups=2))
    groups[0].metadata["task"] = "addition"
    groups[0].trajectories[2].metrics = {"turns": 3, "odd": float("nan")}
    sent = make_batch(NAME, groups, art.TrainConfig())
    call = uuid4().hex
    await run(programs, "train", encode_batch(sent), call)
    rows, samples = logged_trajectories(groups)
    entry = LogRequest(split="val", step=1, metrics={}, trajectories=rows, samples=samples)
    for _ in range(2):  # an answer that was lost
        write_logged(runtime.models.checkpoints(NAME), entry, runtime.compute.base)
        await run(programs, "train", encode_batch(sent), call)
    assert [name.partition("-")[0] for name in files(tmp_path)] == ["train/000001", "val/000001"]
    assert f"train/000001-{call}.parquet" in files(tmp_path)

    glob = f"{tmp_path}/store/*/*/trajectories/*/*.parquet"
    summary = duckdb.sql(
        f"SELECT split, step, count(*), avg(reward), max(CAST(metrics->>'turns' AS DOUBLE)),"
        f" min(metadata->>'task'), count(call_id) FROM read_parquet('{glob}')"
        " GROUP BY ALL ORDER BY split"
    ).fetchall()
    assert summary == [
        ("train", 1, 6, 0.5, 3.0, "addition", 6),
        ("val", 1, 6, 0.5, 3.0, "addition", 0),
    ]
    tokens = duckdb.sql(
        "SELECT sample.policy, len(sample.prompt_ids), len(sample.completion_ids),"
        f" len(sample.logprobs) FROM (SELECT unnest(samples) AS sample FROM read_parquet('{glob}'))"
    ).fetchall()
    assert tokens == [("p/m@0", 20, 12, 12)] * 12

    table = pd.read_parquet(tmp_path / "store" / "p" / "m" / "trajectories")
    for (_, row), sample in zip(
        table[table["split"] == "train"].iterrows(), sent.samples, strict=True
    ):
        [kept] = row["samples"]
        assert kept["completion_ids"].tolist() == sample.completion_ids
        assert kept["logprobs"].tolist() == pytest.approx(sample.logprobs)
        assert kept["completion"] == runtime.compute.base.tokenizer.decode(sample.completion_ids)
        assert kept["prompt"] == runtime.compute.base.tokenizer.decode(sample.prompt_ids)
    logged = table[table["split"] == "val"].iloc[0]
    assert json.loads(logged["messages"])[0]["role"] == "user"


async def test_a_step_that_was_not_counted_leaves_no_trajectories(
    runtime: Runtime, programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> dict[str, float]:
        raise JobError("The gradient is not finite.")

    body, call = encode_batch(batch(NAME, 1, groups=1)), uuid4().hex
    with monkeypatch.context() as patch:
        patch.setattr(runtime.compute.trainer, "optim_step", refuse)
        with pytest.raises(JobError, match="not finite"):
            await run(programs, "train", body, call)
    assert files(tmp_path) == []
    await run(programs, "train", body, call)
    assert files(tmp_path) == [f"train/000001-{call}.parquet"]


async def test_a_step_stands_whose_trajectories_could_not_be_kept(
    runtime: Runtime, programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store goes away right after the step; the call that is repeated makes up for it."""
    create = runtime.store.create

    def go_away(key: str, data: bytes) -> bool:
        if key.endswith(".parquet"):
            raise StoreUnavailableError("The store did not answer.")
        return create(key, data)

    body, call, told = encode_batch(batch(NAME, 1, groups=1)), uuid4().hex, []
    with monkeypatch.context() as patch:
        patch.setattr(runtime.store, "create", go_away)
        result = await run(programs, "train", body, call, told)
    assert (result.step, runtime.models.newest(NAME).step, files(tmp_path)) == (1, 1, [])
    [warning] = [data["warning"] for data in told if "warning" in data]
    assert "trajectories of step 1 were not kept; the step itself is" in warning
    assert (await run(programs, "train", body, call)).step == 1
    assert files(tmp_path) == [f"train/000001-{call}.parquet"]


def test_a_sample_that_was_not_sent_is_refused(runtime: Runtime, tmp_path: Path) -> None:
    rows, samples = logged_trajectories(as_groups(batch(NAME, 1, groups=1)))
    rows[0] = rows[0].model_copy(update={"samples": [99]})
    entry = LogRequest(split="val", step=0, metrics={}, trajectories=rows, samples=samples)
    with pytest.raises(InvalidRequestError, match="not among the 3 sent"):
        write_logged(runtime.models.checkpoints(NAME), entry, None)
    assert files(tmp_path) == []


async def test_a_file_that_can_not_be_made_does_not_fail_the_step(
    runtime: Runtime, programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down(*_: object, **__: object) -> str:
        raise OverflowError("A tokenizer that can't write this id.")

    monkeypatch.setattr(runtime.compute.base.tokenizer, "decode", break_down)
    told: list[dict[str, Any]] = []
    result = await run(programs, "train", encode_batch(batch(NAME, 1, groups=1)), told=told)
    assert (result.step, runtime.models.newest(NAME).step, files(tmp_path)) == (1, 1, [])
    assert any("can't write this id" in data.get("warning", "") for data in told)
