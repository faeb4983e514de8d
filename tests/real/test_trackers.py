"""W&B and Langfuse, by their own packages, while real steps are made."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import art_cloud as art
from art_cloud.trackers.tracker import numbers

from ..rigs.server_process import TOKEN, ServerProcess
from ..rigs.wandb_files import WandbRun, runs

SCRIPT = """
import asyncio, os, sys
import art_cloud as art
from tests.rigs.synthetic import as_groups, batch

url, base_model, name, steps = sys.argv[1:]

async def main():
    async with art.connect(url, os.environ["TEST_TOKEN"]) as backend:
        model = art.TrainableModel(name=name, project="tracked", base_model=base_model,
                                   lora=art.LoRAConfig(rank=8), config={"note": "a test"})
        await model.register(backend)
        for step in range(await model.get_step(), int(steps)):
            groups = as_groups(batch(model.full_name, step))
            groups[0].metrics["difficulty"] = 3
            for group in groups:
                for number, trajectory in enumerate(group):
                    trajectory.metrics["turns"] = number
            result = await backend.train(model, groups, learning_rate=1e-4)
            await model.log(groups, split="train", metrics=result.metrics, step=result.step)
            await model.log(groups, split="val", metrics={"wins": 0.25}, step=step)

asyncio.run(main())
"""


async def run_script(
    server: ServerProcess,
    base_model: Path,
    name: str,
    steps: int,
    environment: Mapping[str, str],
) -> tuple[int, str]:
    """Train `name` up to `steps` in a process of its own; its status and what it said."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SCRIPT, server.url, str(base_model), name, str(steps)),
        env={**os.environ, "ART_PROGRESS": "0", "TEST_TOKEN": TOKEN, **environment},
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await asyncio.wait_for(process.communicate(), 120)
    return process.returncode or 0, said.decode()


def by_step(*runs: WandbRun) -> dict[int, dict[str, float]]:
    """All rows by their place on the x axis; a value that came twice is an error."""
    found: dict[int, dict[str, float]] = {}
    for row in [row for run in runs for row in run.rows]:
        step = found.setdefault(row["training_step"], {})
        news = {k: v for k, v in row.items() if not k.startswith("_") and k != "training_step"}
        assert not step.keys() & news.keys(), "a value was sent twice"
        step |= news
    return found


async def test_one_run_on_wandb_over_programs_that_end(
    server: ServerProcess, backend: art.Backend, tiny_model: Path, tmp_path: Path
) -> None:
    """Each value once: what was made without W&B, what a program sent, what came after."""
    name = uuid4().hex
    offline = {
        "WANDB_API_KEY": "0" * 40,
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
    }
    assert await run_script(server, tiny_model, name, 1, {}) == (0, "")
    assert (await run_script(server, tiny_model, name, 2, offline))[0] == 0
    status, said = await run_script(server, tiny_model, name, 3, offline)
    assert status == 0
    first, last = runs(tmp_path)
    assert first.finished
    assert last.finished
    assert f"{name} on W&B: wandb sync {tmp_path}" in "".join(said.split("\n"))
    assert first.id == last.id
    assert (last.project, last.name) == ("tracked", name)
    assert last.config["base_model"] == str(tiny_model)
    assert last.config["lora"]["rank"] == 8
    assert last.config["config"] == {"note": "a test"}
    assert {(m.name or m.glob_name, m.step_metric) for m in last.metrics} >= {
        ("training_step", ""),
        ("*", "training_step"),
    }
    shown = by_step(first, last)
    assert shown == {row["step"]: numbers(row) for row in await history(backend, name)}
    assert shown[3]["train/turns"] == 1
    assert shown[2]["val/turns"] == shown[3]["train/turns"] == 1
    assert shown[2]["val/group_difficulty"] == 3
    assert shown[2]["val/wins"] == 0.25


async def history(backend: art.Backend, name: str) -> list[dict[str, Any]]:
    model = art.TrainableModel(name=name, project="tracked", base_model="any")
    return await backend.checkpoints(model).history()


@pytest.mark.slow
async def test_training_goes_on_without_wandb(
    server: ServerProcess, tiny_model: Path, tmp_path: Path
) -> None:
    """Nobody listens at its address: the script is told once, and ends with all of its steps."""
    nobody = {
        "WANDB_API_KEY": "0" * 40,
        "WANDB_BASE_URL": "http://127.0.0.1:9",
        "WANDB_DIR": str(tmp_path),
    }
    name = uuid4().hex
    status, said = await run_script(server, tiny_model, name, 2, nobody)
    assert status == 0
    assert said.count("Training goes on") <= 1
    assert "W&B has not got all" in said
    async with server.backend() as backend:
        assert len(await history(backend, name)) == 3
