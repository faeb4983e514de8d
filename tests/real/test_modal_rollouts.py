"""The example in examples/modal_rollouts: the same script here, and on the tests' Modal, where
rollouts fan out by the real `.map` into functions that Modal's real entrypoint runs."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import art_cloud as art
from art_cloud.shared.errors import AuthError

from ..rigs.modal_plane import ModalPlane, modal_plane

EXAMPLE = Path(__file__).parents[2] / "examples" / "modal_rollouts"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ART_CLOUD_HOME", str(tmp_path / "home"))


@pytest.fixture
def plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModalPlane]:
    with modal_plane(tmp_path, monkeypatch) as plane:
        yield plane


async def train(tiny_model: Path, *arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(EXAMPLE / "train.py"), "--smoke", "--base-model", str(tiny_model)),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode()


async def test_it_runs_without_modal(tiny_model: Path) -> None:
    assert (await train(tiny_model)).startswith("step 1: reward ")


async def test_rollouts_fan_out_and_one_server_trains(
    plane: ModalPlane, tiny_model: Path, tmp_path: Path
) -> None:
    output = await train(tiny_model, "--modal", "--store", (tmp_path / "store").as_uri())
    assert output.startswith("step 1: reward ")
    [function] = plane.functions
    assert plane.calls["FunctionMap"] == 1
    times = [(one.input_started_at, one.output_created_at) for one in function.worked]
    assert len(times) == 2
    for (began, ended), (other_began, other_ended) in itertools.combinations(times, 2):
        assert max(began, other_began) < min(ended, other_ended)  # at once, each in its container
    assert plane.servers == []
    assert function.workers == []


async def test_what_a_function_does_when_something_is_lost_or_wrong(
    plane: ModalPlane,
    backend: art.Backend,
    model: art.TrainableModel[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import fan_out

    plane.preemptions = 1
    async with fan_out.app.run():
        groups = await fan_out.OnModal().groups(model, ["Peru", "Kenya"], attempts=2)
        assert [len(group.trajectories) for group in groups] == [2, 2]
        assert (plane.preemptions, plane.calls["FunctionRetryInputs"]) == (0, 1)
        groups[0].trajectories[0].reward += 1.0
        assert (await backend.train(model, groups)).step == 1

        model.inference_api_key = "another"
        with pytest.raises(AuthError, match="refused the token"):
            await fan_out.OnModal().groups(model, ["Peru"], attempts=2)
