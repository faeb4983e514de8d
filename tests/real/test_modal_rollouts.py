"""The example in examples/modal_rollouts: the whole script here, and the body of its function."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import art_cloud as art

EXAMPLE = Path(__file__).parents[2] / "examples" / "modal_rollouts"


async def test_it_runs_without_modal(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ART_CLOUD_HOME", str(tmp_path / "home"))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(EXAMPLE / "train.py"), "--smoke", "--base-model", str(tiny_model)),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    assert output.decode().startswith("step 1: reward ")


async def test_what_a_function_does(
    backend: art.Backend, model: art.TrainableModel[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.setenv("MODAL_PROXY_TOKEN_ID", "wk-1")
    monkeypatch.setenv("MODAL_PROXY_TOKEN_SECRET", "ws-1")
    import fan_out

    job = asdict(fan_out.job_of(model, "Peru", attempts=2))
    assert job["headers"] == {"Modal-Key": "wk-1", "Modal-Secret": "ws-1"}
    text = await fan_out.roll_out.local(job)
    group = art.TrajectoryGroup.model_validate_json(text)
    assert len(group.trajectories) == 2
    group.trajectories[0].reward += 1.0
    assert (await backend.train(model, [group])).step == 1
