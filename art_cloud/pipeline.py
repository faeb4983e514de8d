"""Rollouts of the next steps while a step is trained: off-policy by choice, and by how much.

A blocking loop leaves the engine idle while the trainer works, and the trainer while rollouts run.
`PipelineTrainer` keeps both busy. What it trains on may have been sampled from older weights; the
losses correct for that by the importance ratio to the logprobs that were recorded with each sample.

How old is bounded as in AReaL (Fu et al. 2025, arXiv:2505.24298, section 5.1, eq. 3): a group is
begun only while those that are begun and not trained on yet fit into `max_steps_off_policy + 1`
steps. One that is overtaken by others nevertheless, and is older than that by the time it is
through, is dropped and counted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Generic, TypeAlias, TypeVar

from .backend import Backend, TrainResult
from .model import TrainableModel
from .rollouts.batch import reward_metrics
from .rollouts.gather import gather_one
from .rollouts.group import TrajectoryGroup
from .rollouts.running import Gathering
from .rollouts.trajectory import Trajectory
from .shared.config import TrainConfig
from .shared.errors import ConfigError
from .shared.names import PolicyName
from .shared.progress import Bar, progress

S = TypeVar("S")
RolloutFn: TypeAlias = Callable[[TrainableModel[Any], S], Awaitable[TrajectoryGroup]]
EvalFn: TypeAlias = Callable[
    [TrainableModel[Any], int], Awaitable[Iterable[Trajectory | TrajectoryGroup]]
]

SPLIT = "pipeline"
"""The split under which the pipeline's own metrics are kept beside each step."""


@dataclass(frozen=True)
class _Group:
    """A group whose rollouts are done, and the steps that it was sampled from."""

    group: TrajectoryGroup
    steps: list[int]
    """The step that each of its samples was drawn from."""


class PipelineTrainer(Generic[S]):
    """Trains `model` on what `rollout_fn` makes of `scenarios`, without waiting in between.

    Args:
        rollout_fn: `rollout_fn(model, scenario)` gives a TrajectoryGroup to await, say
            `TrajectoryGroup(rollout(model, scenario) for _ in range(8))`. It samples from
            `model.get_inference_name()`: each request from the newest weights there are.
        scenarios: taken one by one, in order; training ends when they do. They may be endless.
        eval_fn: `eval_fn(model, step)` gives trajectories (or groups) sampled from
            `model.get_inference_name(step)`, whatever is trained meanwhile. They are logged as
            `val/...` of that step.
        config: of every step. Default: the loss "cispo", which goes on learning from tokens whose
            ratio it clips. The others that clip leave them out, and learn slower off policy.
        groups_per_step: how many groups a step is trained on.
        max_steps_off_policy: how many steps older than the newest the weights may be that a sample
            was drawn from. 0 is the blocking loop; 1 overlaps one step's training
            with the next one's rollouts.
        max_steps: train so many steps at most; None: until the scenarios end.
        eval_every_n_steps: evaluate the first step, and every n-th after it; 0: never.
        max_exceptions: how many rollouts may fail (or, between 0 and 1, which share of them).
        timeout: seconds that each rollout may take.

    Raises:
        ConfigError: a number is out of range.
    """

    def __init__(
        self,
        model: TrainableModel[Any],
        backend: Backend,
        rollout_fn: RolloutFn[S],
        scenarios: Iterable[S] | AsyncIterator[S],
        *,
        eval_fn: EvalFn | None = None,
        config: TrainConfig | None = None,
        groups_per_step: int = 4,
        max_steps_off_policy: int = 1,
        max_steps: int | None = None,
        eval_every_n_steps: int = 20,
        max_exceptions: int | float = 0,
        timeout: float | None = None,
    ) -> None:
        if groups_per_step < 1 or max_steps_off_policy < 0 or eval_every_n_steps < 0:
            raise ConfigError(
                f"PipelineTrainer: groups_per_step is {groups_per_step} (at least 1), "
                f"max_steps_off_policy {max_steps_off_policy} and eval_every_n_steps "
                f"{eval_every_n_steps} (at least 0)."
            )
        self.model = model
        self.backend = backend
        self.rollout_fn = rollout_fn
        self.eval_fn = eval_fn
        self.config = config or TrainConfig(loss="cispo")
        self.groups_per_step = groups_per_step
        self.max_steps_off_policy = max_steps_off_policy
        self.max_steps = max_steps
        self.eval_every_n_steps = eval_every_n_steps
        self.stale_groups = 0
        """How many groups were dropped because they were older than `max_steps_off_policy`."""
        self._scenarios = scenarios
        self._gathering = Gathering(Bar("", None), max_exceptions, timeout)
        self._stopping = asyncio.Event()

    def request_stop(self) -> None:
        """Finish the step that is being trained, cancel the rollouts under way, and return."""
        self._stopping.set()

    async def train(self) -> list[TrainResult]:
        """Run until the scenarios or `max_steps` are through, or a stop is requested.

        Groups that are left over when the scenarios end make a last, smaller step.

        Returns:
            What each step returned. The pipeline's own metrics are logged with the step, as
            `pipeline/...`: `stale_groups` dropped since the step before, `off_policy_steps` (mean
            over samples), `seconds` of the whole step, and those of them that it
            `waited_for_rollouts`.

        Raises:
            TooManyExceptionsError: more rollouts failed than `max_exceptions` allows.
            ArtCloudError: what a train call or an evaluation raised. Rollouts under way are
                cancelled; the steps that were made stay.
        """
        results: list[TrainResult] = []
        permits = asyncio.Semaphore((self.max_steps_off_policy + 1) * self.groups_per_step)
        done: asyncio.Queue[_Group | None] = asyncio.Queue()
        try:
            with progress(f"{self.model.name}: pipeline", self.max_steps) as bar:
                async with asyncio.TaskGroup() as tasks:
                    rolling = tasks.create_task(self._roll_out(permits, done))
                    stopping = tasks.create_task(self._stopping.wait())
                    training = tasks.create_task(self._train_steps(done, permits, results, bar))
                    await asyncio.wait([training, stopping], return_when="FIRST_COMPLETED")
                    self._stopping.set()
                    rolling.cancel()
                    done.put_nowait(None)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return results

    async def _roll_out(
        self, permits: asyncio.Semaphore, done: asyncio.Queue[_Group | None]
    ) -> None:
        """Start the rollouts of a group for every permit, until the scenarios end."""
        try:
            async with asyncio.TaskGroup() as tasks:
                async for scenario in _iterate(self._scenarios):
                    await permits.acquire()
                    tasks.create_task(self._one(scenario, permits, done))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        done.put_nowait(None)

    async def _one(
        self, scenario: S, permits: asyncio.Semaphore, done: asyncio.Queue[_Group | None]
    ) -> None:
        group = await gather_one(self.rollout_fn(self.model, scenario), self._gathering)
        if group is None or len(group) < 2:
            permits.release()
            return
        done.put_nowait(_Group(group, _steps(group)))

    async def _train_steps(
        self,
        done: asyncio.Queue[_Group | None],
        permits: asyncio.Semaphore,
        results: list[TrainResult],
        bar: Bar,
    ) -> None:
        step = await self.model.get_step()
        evaluations = _Evaluations(self)
        try:
            evaluations.start(step)
            while not self._stopping.is_set() and len(results) != self.max_steps:
                started, stale_before = time.monotonic(), self.stale_groups
                batch = await self._next_batch(done, permits, step)
                if not batch or self._stopping.is_set():
                    break
                waited = time.monotonic() - started
                groups = [one.group for one in batch]
                result = await self.backend.train(self.model, groups, self.config)
                results.append(result)
                ages = [float(step - drawn) for one in batch for drawn in one.steps]
                step = result.step
                for _ in batch:
                    permits.release()
                metrics = {
                    "stale_groups": float(self.stale_groups - stale_before),
                    "off_policy_steps": fmean(ages),
                    "seconds": time.monotonic() - started,
                    "waited_for_rollouts": waited,
                }
                await self.model.log(split=SPLIT, metrics=metrics, step=step)
                evaluations.start(step)
                reward = reward_metrics(groups)["reward"]
                note = f"step {step}, reward {reward:.3f}, {fmean(ages):.1f} steps off policy"
                bar.update(len(results), note=note)
            await evaluations.finish()
        finally:
            await evaluations.cancel()

    async def _next_batch(
        self, done: asyncio.Queue[_Group | None], permits: asyncio.Semaphore, step: int
    ) -> list[_Group]:
        """The next groups that are not too old; fewer than a step's only at the end."""
        batch: list[_Group] = []
        while len(batch) < self.groups_per_step:
            one = await done.get()
            if one is None:
                done.put_nowait(None)
                break
            if step - min(one.steps, default=step) > self.max_steps_off_policy:
                self.stale_groups += 1
                permits.release()
                continue
            batch.append(one)
        return batch


class _Evaluations:
    """Evaluations beside the training, one at a time, in the order of their steps."""

    def __init__(self, trainer: PipelineTrainer[Any]) -> None:
        self._trainer = trainer
        self._first: int | None = None
        self._running: asyncio.Task[None] | None = None

    def start(self, step: int) -> None:
        """Evaluate `step` if it is its turn."""
        trainer = self._trainer
        if trainer.eval_fn is None or not trainer.eval_every_n_steps:
            return
        self._first = step if self._first is None else self._first
        if self._running is not None and self._running.done():
            self._running.result()
        if (step - self._first) % trainer.eval_every_n_steps == 0:
            self._running = asyncio.create_task(self._run(trainer.eval_fn, step, self._running))

    async def finish(self) -> None:
        if self._running is not None:
            await self._running

    async def cancel(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    async def _run(self, eval_fn: EvalFn, step: int, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await before
        model = self._trainer.model
        await model.log(await eval_fn(model, step), split="val", step=step)


async def _iterate(scenarios: Iterable[S] | AsyncIterator[S]) -> AsyncIterator[S]:
    if isinstance(scenarios, AsyncIterator):
        async for scenario in scenarios:
            yield scenario
    else:
        for scenario in scenarios:
            yield scenario


def _steps(group: TrajectoryGroup) -> list[int]:
    """The step that each sample of this model was drawn from. The train call refuses samples of
    other models."""
    policies = [sample.policy for trajectory in group for sample in trajectory.samples()]
    return [PolicyName.parse(policy).step for policy in policies if "@" in policy]
