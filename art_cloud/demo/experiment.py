"""Does an agent learn from its reward? Held-out tasks before and after GRPO, and a control.

The control is a copy of the warmed-up agent that goes through the same steps with its rewards
permuted within each group. What the two differ by was learned from the reward, and from nothing
else. The demo and the examples are experiments.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from math import sqrt
from statistics import fmean, stdev
from typing import Any, Generic, Protocol, TypeVar

from ..backend import Backend
from ..model import TrainableModel
from ..rollouts.gather import gather_trajectories, gather_trajectory_groups
from ..rollouts.group import TrajectoryGroup
from ..rollouts.trajectory import Messages, Trajectory
from ..shared.config import SFTConfig, TrainConfig
from ..shared.errors import ConflictError
from ..shared.progress import progress, say

NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
"""The `extra_body` of a request that has Qwen3, which thinks by default, answer at once."""
TaskT = TypeVar("TaskT")
TaskT_contra = TypeVar("TaskT_contra", contravariant=True)


class Rollout(Protocol[TaskT_contra]):
    """A function that makes one attempt at a task. With `step` it uses the weights of that step,
    repeatably."""

    def __call__(
        self, model: TrainableModel[Any], task: TaskT_contra, /, *, step: int | None = None
    ) -> Awaitable[Trajectory]: ...


@dataclass(frozen=True)
class Experiment(Generic[TaskT]):
    name: str
    """The name of the project in the store."""
    measure: str
    """The metric of a trajectory that says how well the agent did."""
    rollout: Rollout[TaskT]
    tasks: Callable[[int], Sequence[TaskT]]
    """What a step is trained on: a group for each task. A function of the step alone."""
    held_out: Sequence[TaskT]
    warm_up: Sequence[Trajectory | Messages] = ()
    """Conversations that teach the format, not the skill, to a model made on the spot."""
    warm_up_config: SFTConfig = field(default_factory=SFTConfig)
    config: TrainConfig = field(default_factory=TrainConfig)
    steps: int = 40
    group_size: int = 8
    score: Callable[[TrajectoryGroup], Awaitable[TrajectoryGroup | None]] | None = None
    """Gives a group its rewards, where the rollouts don't: a judge, say."""
    watched: Callable[[int], Sequence[TaskT]] | None = None
    """Tasks to follow the steps by, and not to train on, where `tasks` are no measure: games of an
    agent against itself, say. A function of the step alone."""

    @property
    def curve(self) -> str:
        """The metric in the store's history that says how well each step did."""
        return f"{'trajectory' if self.watched is None else 'watched'}/{self.measure}"


@dataclass
class Curve:
    """The measurements of one agent."""

    before: dict[str, list[float]] = field(default_factory=dict)
    """The metrics of the held-out tasks, by name."""
    after: dict[str, list[float]] = field(default_factory=dict)
    by_step: list[float] = field(default_factory=list)
    """Mean of the measure over what each step was trained on (or watched by), sampled before it."""


@dataclass
class Result:
    measure: str
    trained: Curve
    control: Curve | None
    seconds: float

    @property
    def steps(self) -> int:
        return len(self.trained.by_step)

    def summary(self) -> dict[str, float]:
        """`MEASURE_before`, `MEASURE_after`, `MEASURE_control` if there was one, `steps` and
        `seconds`."""
        found = {
            f"{self.measure}_before": fmean(self.trained.before[self.measure]),
            f"{self.measure}_after": fmean(self.trained.after[self.measure]),
            "steps": self.steps,
            "seconds": round(self.seconds, 1),
        }
        if self.control is not None:
            found[f"{self.measure}_control"] = fmean(self.control.after[self.measure])
        return found


async def run_experiment(
    experiment: Experiment[Any],
    cluster: AbstractAsyncContextManager[Backend],
    base_model: str,
    *,
    run: str,
    control: bool,
    warm_up: bool,
) -> Result:
    """Warm-up, evaluation, GRPO, evaluation.

    Args:
        run: names the models, `agent-RUN` and `control-RUN`. Given again, they go on.
        warm_up: fine-tune on `experiment.warm_up` first.
    """
    started = time.perf_counter()
    agent, copy = (
        TrainableModel[Any](name=f"{kind}-{run}", project=experiment.name, base_model=base_model)
        for kind in ("agent", "control")
    )
    trained, permuted = Curve(), Curve()
    async with cluster as backend:
        await agent.register(backend)
        if warm_up and await agent.get_step() == 0:
            await backend.train_sft(agent, experiment.warm_up, experiment.warm_up_config)
        first = int(warm_up)
        trained.before = permuted.before = await _evaluate(experiment, agent, first, "before")
        say(f"{experiment.measure} before: {fmean(trained.before[experiment.measure]):.3g}")
        if control:
            with suppress(ConflictError):  # it was forked by a run that this one goes on from
                await backend.checkpoints(agent).fork(copy, first)
        last = first + experiment.steps
        await _learn(experiment, backend, agent, trained, first, permute=False)
        trained.after = await _evaluate(experiment, agent, last, "after")
        say(f"{experiment.measure} after: {fmean(trained.after[experiment.measure]):.3g}")
        if control:
            await copy.register(backend)
            await _learn(experiment, backend, copy, permuted, first, permute=True)
            permuted.after = await _evaluate(experiment, copy, last, "control")
    seconds = time.perf_counter() - started
    return Result(experiment.measure, trained, permuted if control else None, seconds)


async def _learn(
    experiment: Experiment[Any],
    backend: Backend,
    model: TrainableModel[Any],
    curve: Curve,
    first: int,
    *,
    permute: bool,
) -> None:
    """The loop that every agent is trained with. `first` is the step after the warm-up."""
    with progress(f"{model.name}: GRPO steps", experiment.steps) as bar:
        for number in range(await model.get_step() - first, experiment.steps):
            groups = await gather_trajectory_groups(
                (
                    TrajectoryGroup(
                        experiment.rollout(model, task) for _ in range(experiment.group_size)
                    )
                    for task in experiment.tasks(number)
                ),
                pbar_desc="rollouts",
                after_each=experiment.score,
            )
            if permute:
                _permute_rewards(groups, number)
            done = [one for group in groups for one in group]
            if experiment.watched:
                done = await _try(experiment, model, first + number, experiment.watched(number))
                await model.log(done, split="watched", step=first + number)
            await backend.train(model, groups, experiment.config)
            reached = fmean(_metrics(done)[experiment.measure])
            bar.update(number + 1, note=f"{experiment.measure} {reached:.3g}")
    history = await model.history()
    curve.by_step = [row[experiment.curve] for row in history if experiment.curve in row]


def _permute_rewards(groups: Sequence[TrajectoryGroup], seed: int) -> None:
    shuffle = random.Random(seed)  # noqa: S311
    for group in groups:
        rewards = [trajectory.reward for trajectory in group]
        shuffle.shuffle(rewards)
        for trajectory, reward in zip(group, rewards, strict=True):
            trajectory.reward = reward


async def _evaluate(
    experiment: Experiment[Any], model: TrainableModel[Any], step: int, label: str
) -> dict[str, list[float]]:
    """Try the held-out tasks with the weights of `step`; the result is kept beside it."""
    done = await _try(experiment, model, step, experiment.held_out, f"held-out tasks, {label}")
    await model.log(done, split="val", step=step)
    return _metrics(done)


async def _try(
    experiment: Experiment[Any],
    model: TrainableModel[Any],
    step: int,
    tasks: Sequence[Any],
    title: str | None = None,
) -> list[Trajectory]:
    return await gather_trajectories(
        (experiment.rollout(model, task, step=step) for task in tasks), pbar_desc=title
    )


def _metrics(trajectories: Sequence[Trajectory]) -> dict[str, list[float]]:
    """The values of each metric by its name, one for each trajectory; `reward` is one of them."""
    found: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in ({"reward": trajectory.reward} | trajectory.metrics).items():
            found.setdefault(name, []).append(float(value))
    return found


def interval(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of the mean (normal approximation)."""
    return 1.96 * stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
