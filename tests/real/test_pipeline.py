"""PipelineTrainer against the real server: what overlaps, what is dropped, what is learned."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import art_cloud as art

from ..rigs.server_process import ServerProcess

TRAIN = art.TrainConfig(learning_rate=1e-2, loss="cispo")
STEPS = 14
TOOL_SECONDS = 0.25
"""What a rollout waits for its environment, during which the engine could do other things."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("pipeline"), "--model", tiny_model) as server:
        yield server
        assert server.terminate() == 0


@pytest.fixture
async def backend(server: ServerProcess) -> AsyncIterator[art.Backend]:
    async with server.backend() as backend:
        yield backend


Registered = Callable[[str], Awaitable[art.TrainableModel[Any]]]


@pytest.fixture
def registered(backend: art.Backend, tiny_model: Path) -> Registered:
    async def register(name: str) -> art.TrainableModel[Any]:
        model = art.TrainableModel(name=name, project="pipeline", base_model=str(tiny_model))
        await model.register(backend)
        return model

    return register


class Events:
    """Begins and ends of groups and train calls, in the order in which they came."""

    def __init__(self, backend: art.Backend, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order: list[str] = []
        train = backend.train

        async def watched(*args: Any, **kwargs: Any) -> art.TrainResult:
            self.order.append("train")
            result = await train(*args, **kwargs)
            self.order.append("trained")
            return result

        monkeypatch.setattr(backend, "train", watched)

    def during_training(self, event: str) -> int:
        """How many such events came while a train call was under way."""
        training, count = False, 0
        for one in self.order:
            if one in ("train", "trained"):
                training = one == "train"
            count += training and one == event
        return count

    async def group(self, model: art.TrainableModel[Any], number: int) -> art.TrajectoryGroup:
        self.order.append("begin")
        group = await art.TrajectoryGroup(rollout(model, number) for _ in range(8))
        self.order.append("end")
        return group


async def rollout(model: art.TrainableModel[Any], number: int) -> art.Trajectory:
    """The more of the sampled tokens have an even id, the better."""
    message: Any = {"role": "user", "content": f"Task {number % 4}"}
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(),
        messages=[message],
        max_tokens=8,
        extra_body={"ignore_eos": True},
    )
    await asyncio.sleep(TOOL_SECONDS)
    choice: Any = completion.choices[0]
    reward = fmean(token % 2 == 0 for token in choice.sample["completion_ids"])
    return art.Trajectory(messages_and_choices=[message, choice], reward=reward)


async def test_rollouts_overlap_with_training_and_as_much_is_learned(
    backend: art.Backend, registered: Registered, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewards: dict[int, list[float]] = {}
    for steps_off_policy in (0, 1):
        model = await registered(f"off-{steps_off_policy}")
        with monkeypatch.context() as patched:
            events = Events(backend, patched)
            pipeline = art.PipelineTrainer(
                model,
                backend,
                events.group,
                range(1000),
                config=TRAIN,
                groups_per_step=4,
                max_steps_off_policy=steps_off_policy,
                max_steps=STEPS,
            )
            results = await pipeline.train()
        rewards[steps_off_policy] = [result.metrics["reward"] for result in results]
        assert [result.step for result in results] == list(range(1, STEPS + 1))
        overlapping = events.during_training("end") + events.during_training("begin")
        infos = await backend.checkpoints(model).list()
        ages = [info.metrics["pipeline/off_policy_steps"] for info in infos[1:]]
        if steps_off_policy == 0:
            assert overlapping == 0
            assert ages == [0] * STEPS
        else:
            assert overlapping > 0
            assert 0.5 < fmean(ages) <= 1
            assert max(ages) <= 1
            ratios = [result.metrics.get("ratio_max", 1.0) for result in results]
            assert max(ratios) > 1.01  # to the logprobs of the older weights
        assert pipeline.stale_groups == 0
    for curve in rewards.values():
        assert fmean(curve[:2]) < 0.65
        assert fmean(curve[-2:]) > 0.8


async def test_stale_groups_are_dropped_and_counted(
    backend: art.Backend, registered: Registered
) -> None:
    model = await registered("stale")
    release = asyncio.Event()

    async def group(model: art.TrainableModel[Any], number: int) -> art.TrajectoryGroup:
        group = await art.TrajectoryGroup(rollout(model, number) for _ in range(2))
        if number == 0:
            await release.wait()
        if await model.get_step() == 2:
            release.set()
        return group

    pipeline = art.PipelineTrainer(
        model, backend, group, range(5), groups_per_step=1, max_steps_off_policy=1
    )
    results = await pipeline.train()
    assert pipeline.stale_groups == 1
    assert len(results) == 4
    infos = await backend.checkpoints(model).list()
    assert sum(info.metrics.get("pipeline/stale_groups", 0) for info in infos) == 1


async def test_evaluations_are_of_pinned_steps_while_training_goes_on(
    backend: art.Backend, registered: Registered
) -> None:
    model = await registered("evaluated")
    seen: list[tuple[int, int]] = []

    async def evaluate(model: art.TrainableModel[Any], step: int) -> list[art.Trajectory]:
        while await model.get_step() < min(step + 1, 4):  # there are newer weights meanwhile
            await asyncio.sleep(0.01)
        message: Any = {"role": "user", "content": "Task"}
        answer = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(step), messages=[message], max_tokens=2
        )
        trajectory = art.Trajectory(messages_and_choices=[message, answer.choices[0]], reward=step)
        [sample] = trajectory.samples()
        seen.append((step, int(sample.policy.rpartition("@")[2])))
        return [trajectory]

    def group(model: art.TrainableModel[Any], number: int) -> art.TrajectoryGroup:
        return art.TrajectoryGroup(rollout(model, number) for _ in range(2))

    pipeline = art.PipelineTrainer(
        model, backend, group, range(8), groups_per_step=2, eval_fn=evaluate, eval_every_n_steps=2
    )
    assert len(await pipeline.train()) == 4
    assert seen == [(0, 0), (2, 2), (4, 4)]
    infos = await backend.checkpoints(model).list()
    assert {info.step: info.metrics.get("val/reward") for info in infos} == {
        0: 0, 1: None, 2: 2, 3: None, 4: 4
    }  # fmt: skip


async def test_a_stop_finishes_the_step_and_cancels_the_rollouts(
    backend: art.Backend, registered: Registered
) -> None:
    model = await registered("stopped")
    cancelled: list[int] = []

    async def one(model: art.TrainableModel[Any], number: int) -> art.Trajectory:
        if number >= 2:
            pipeline.request_stop()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(number)
                raise
        return await rollout(model, number)

    def group(model: art.TrainableModel[Any], number: int) -> art.TrajectoryGroup:
        return art.TrajectoryGroup(one(model, number) for _ in range(2))

    async def scenarios() -> AsyncIterator[int]:
        yield 0
        yield 1
        while await model.get_step() < 1:
            await asyncio.sleep(0.01)
        yield 2

    pipeline = art.PipelineTrainer(
        model, backend, group, scenarios(), groups_per_step=2, max_steps_off_policy=1
    )
    results = await pipeline.train()
    assert [result.step for result in results] == [1]
    assert cancelled == [2, 2]
    assert await model.get_step() == 1


async def test_errors_end_it_as_themselves(backend: art.Backend, registered: Registered) -> None:
    model = await registered("failing")

    async def fails(model: art.TrainableModel[Any], number: int) -> art.Trajectory:
        if number % 2:
            raise ZeroDivisionError("in the rollout")
        return await rollout(model, number)

    def group(model: art.TrainableModel[Any], number: int) -> art.TrajectoryGroup:
        return art.TrajectoryGroup(fails(model, number) for _ in range(2))

    def pipeline(**more: Any) -> art.PipelineTrainer[int]:
        return art.PipelineTrainer(model, backend, group, range(4), groups_per_step=2, **more)

    with pytest.raises(art.TooManyExceptionsError, match="ZeroDivisionError: in the rollout"):
        await pipeline().train()
    assert len(await pipeline(max_exceptions=0.5).train()) == 1

    async def bad_eval(model: art.TrainableModel[Any], step: int) -> list[art.Trajectory]:
        raise RuntimeError("in the evaluation")

    with pytest.raises(RuntimeError, match="in the evaluation"):
        await pipeline(max_exceptions=0.5, eval_fn=bad_eval).train()
    with pytest.raises(art.ConfigError, match="groups_per_step"):
        art.PipelineTrainer(model, backend, group, range(4), groups_per_step=0)
