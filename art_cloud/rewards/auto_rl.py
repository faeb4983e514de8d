"""AutoRL: from a sentence about what an agent should do to an agent that was trained to do it.

A generator writes tasks, a plain agent with tools works on them, RULER scores its attempts, GRPO
trains. At the end the judge compares new and first weights on tasks that were held out, side by
side and without knowing which is which.
"""

from __future__ import annotations

import asyncio
import random
import re
import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Unpack

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ..agents.agent import TURNS, run_agent
from ..agents.mcp import MCPServer
from ..agents.tools import FunctionTools, Toolkit
from ..backend import Backend
from ..model import Model, TrainableModel
from ..rollouts.gather import gather_trajectory_groups
from ..rollouts.group import TrajectoryGroup
from ..rollouts.trajectory import Trajectory
from ..shared.config import TrainConfig
from ..shared.errors import AnswerError, ConfigError, RolloutError
from ..shared.names import ModelName
from ..shared.progress import progress, say
from .ruler import DEFAULT_RUBRIC, ruler_score_group
from .scenarios import Scenario, generate_scenarios, load_scenarios, save_scenarios
from .structured import ChatOptions, open_chat

SHOWN = ("answered", "turns", "tool_calls", "tool_errors")
EXCEPTIONS = 0.1
"""The share of a step's rollouts that may fail before the step is given up."""


@dataclass(frozen=True)
class AutoResult:
    """How the agent does on the held-out tasks, before and after: one entry for each task."""

    model: str
    step: int
    base: list[dict[str, float]]
    """Means over the attempts of the weights of step 0: `score` and the names in `SHOWN`."""
    trained: list[dict[str, float]]
    """Means over the attempts of the weights of `step`, judged beside those of step 0."""

    def summary(self) -> dict[str, float | int | str | None]:
        """`base`, `trained`: mean scores, 0 to 1; `difference` with `error`, the half width of its
        95 % interval over tasks (normal approximation; None for one task); `wins`, `losses`,
        `ties`: tasks that the trained weights do better at, worse, or the same."""
        gains = [b["score"] - a["score"] for a, b in zip(self.base, self.trained, strict=True)]
        return {
            "model": self.model,
            "step": self.step,
            "tasks": len(gains),
            "base": fmean(task["score"] for task in self.base),
            "trained": fmean(task["score"] for task in self.trained),
            "difference": fmean(gains),
            "error": 1.96 * stdev(gains) / sqrt(len(gains)) if len(gains) > 1 else None,
            "wins": sum(gain > 0 for gain in gains),
            "losses": sum(gain < 0 for gain in gains),
            "ties": sum(gain == 0 for gain in gains),
        }


async def auto(
    model: TrainableModel[Any],
    backend: Backend,
    description: str,
    *,
    judge_model: str | Model[Any],
    scenarios: Path,
    tools: Toolkit | None = None,
    generator_model: str | Model[Any] | None = None,
    count: int = 32,
    steps: int = 10,
    groups_per_step: int = 4,
    rollouts_per_group: int = 4,
    config: TrainConfig | None = None,
    rubric: str = DEFAULT_RUBRIC,
    max_turns: int = TURNS,
    max_tokens: int = 1024,
    seed: int = 0,
    **options: Unpack[ChatOptions],
) -> AutoResult:
    """Train `model` to do what `description` says. Run again, it goes on from the newest step.

    Args:
        model: registered with `backend` here.
        description: what the agent should do; also its system prompt.
        judge_model, rubric, options: as for `ruler_score_group`.
        scenarios: a JSONL file of tasks. If it exists it is used as it is; otherwise `count` tasks
            are written to it.
        tools: `FunctionTools` or an `MCPServer`.
        generator_model: what writes the tasks. Default: the judge.
        steps: of the model in all.
        groups_per_step: tasks that a step is trained on.
        rollouts_per_group: attempts at each of them, and of either weights at a held-out task.
        max_turns, max_tokens: of a rollout; of each of its answers.

    Raises:
        ConfigError: no task is held out, or none is left to train on.
        AnswerError: the judge or the generator gave no usable answer, in any group of a step.
        TooManyExceptionsError: more than one rollout in ten failed.
        And what `ruler`, `generate_scenarios` and `backend.train` raise.
    """
    if steps < 1 or groups_per_step < 1 or rollouts_per_group < 2:
        raise ConfigError(
            "A run needs at least one step of one group, and two rollouts in it to compare."
        )
    tasks = await prepare_scenarios(
        scenarios,
        description,
        generator_model or judge_model,
        tools=tools,
        count=count,
        seed=seed,
        **options,
    )
    held_out = [one for one in tasks if one.split == "test"]
    train = [one for one in tasks if one.split == "train"]
    await model.register(backend)

    async def attempt(one: Scenario, step: int | None = None) -> Trajectory:
        async with tools.session() if tools else nullcontext() as session:
            trajectory = await run_agent(
                model,
                one.task,
                session,
                system=description,
                step=step,
                max_turns=max_turns,
                max_tokens=max_tokens,
            )
        trajectory.metadata |= {"difficulty": one.difficulty, "step": step}
        return trajectory

    async def score(group: TrajectoryGroup) -> TrajectoryGroup:
        return await ruler_score_group(
            group, judge_model, rubric=rubric, swallow_exceptions=True, seed=seed, **options
        )

    async def scored(groups: Sequence[TrajectoryGroup], label: str) -> list[TrajectoryGroup]:
        done = await gather_trajectory_groups(
            groups, pbar_desc=label, max_exceptions=EXCEPTIONS, after_each=score
        )
        judged = [group for group in done if not group.metrics["ruler_failed"]]
        if not judged:
            raise AnswerError(f"{label}: no group could be judged. {done[-1].logs[-1]}")
        return judged

    with progress(f"{model.name}: steps", steps) as bar:
        for step in range(await model.get_step(), steps):
            chosen = _chosen(train, step * groups_per_step, groups_per_step, seed)
            groups = [
                TrajectoryGroup(
                    (attempt(one) for _ in range(rollouts_per_group)), metadata={"task": one.task}
                )
                for one in chosen
            ]
            judged = await scored(groups, f"step {step + 1}")
            result = await backend.train(model, judged, config)
            bar.update(result.step, note=f"reward {result.metrics.get('reward', 0.0):.3f}")
    newest = await model.get_step()
    pairs = [
        TrajectoryGroup(
            attempt(one, step) for step in (0, newest) for _ in range(rollouts_per_group)
        )
        for one in held_out
    ]
    return await _report(model, newest, await scored(pairs, "held-out tasks"))


async def prepare_scenarios(
    path: Path,
    description: str,
    generator_model: str | Model[Any],
    *,
    tools: Toolkit | None = None,
    count: int = 32,
    seed: int = 0,
    **options: Unpack[ChatOptions],
) -> list[Scenario]:
    """The tasks in `path`, of both splits; if there is no such file, new ones are written to it.

    Raises:
        ConfigError: no task is held out, or none is left to train on; or it is not known where the
            generator answers, even if it is not needed: the judge is mostly the same.
        And what `generate_scenarios` and `load_scenarios` raise.
    """
    async with open_chat(generator_model, options):
        pass
    tasks = await _load_or_generate(path, description, generator_model, tools, count, seed, options)
    if {one.split for one in tasks} != {"train", "test"}:
        raise ConfigError(
            f"All tasks of {path} are of the split {tasks[0].split!r}. It needs both: some to "
            'train on ("train") and some that are held out ("test").'
        )
    return tasks


async def _load_or_generate(
    path: Path,
    description: str,
    generator_model: str | Model[Any],
    tools: Toolkit | None,
    count: int,
    seed: int,
    options: ChatOptions,
) -> list[Scenario]:
    if await asyncio.to_thread(path.exists):
        say(f"Tasks are read from {path}.")
        return load_scenarios(path)
    schemas, resources = None, []
    if tools is not None:
        async with tools.session() as session:
            schemas = session.tools
        resources = list(await tools.resources())
    tasks = await generate_scenarios(
        description,
        generator_model,
        count=count,
        tools=schemas,
        resources=resources,
        seed=seed,
        **options,
    )
    save_scenarios(path, tasks)
    say(f"{len(tasks)} tasks are written to {path}. Edit them, and the next run takes them so.")
    return tasks


def _chosen(train: Sequence[Scenario], start: int, number: int, seed: int) -> list[Scenario]:
    """Tasks `start` to `start + number` of an endless row of shuffled passes over `train`."""
    chosen = []
    for place in range(start, start + number):
        epoch, index = divmod(place, len(train))
        order = random.Random(f"{seed} {epoch}").sample(range(len(train)), len(train))  # noqa: S311
        chosen.append(train[order[index]])
    return chosen


async def _report(
    model: TrainableModel[Any], newest: int, groups: Sequence[TrajectoryGroup]
) -> AutoResult:
    attempts: list[tuple[list[Trajectory], list[Trajectory]]] = []
    for group in groups:
        base, trained = ([t for t in group if t.metadata["step"] == s] for s in (0, newest))
        if base and trained:
            attempts.append((base, trained))
    if not attempts:
        raise RolloutError("On no held-out task did both weights make an attempt. Run it again.")
    for step, several in zip((0, newest), zip(*attempts, strict=True), strict=True):
        await model.log([t for one in several for t in one], split="val", step=step)
    return AutoResult(
        model=str(model.full_name),
        step=newest,
        base=[_means(base) for base, _ in attempts],
        trained=[_means(trained) for _, trained in attempts],
    )


def _means(attempts: Sequence[Trajectory]) -> dict[str, float]:
    found = {name: fmean(t.metrics[name] for t in attempts) for name in SHOWN}
    return {"score": fmean(t.reward for t in attempts), **found}


def print_result(result: AutoResult, console: Console) -> None:
    """The comparison as a table."""
    found = result.summary()
    table = Table("", "base model", f"step {result.step}", box=SIMPLE)
    table.title = f"{found['tasks']} held-out tasks, judged side by side"
    for name in ("score", *SHOWN):
        means = [fmean(task[name] for task in side) for side in (result.base, result.trained)]
        table.add_row(
            name.replace("_", " "),
            *(f"{mean:.3f}" for mean in means),
            style="bold" if name == "score" else None,
        )
    console.print(table)
    error = "" if found["error"] is None else f" (95 % interval ± {found['error']:.3f})"
    console.print(
        f"{result.model}: {found['difference']:+.3f}{error}; better "
        f"at {found['wins']} tasks, worse at {found['losses']}, the same at {found['ties']}"
    )


def make_model(name: str | None, description: str, base_model: str) -> TrainableModel[Any]:
    """The model `name` (project/model); by default one that is named after what it is to do.

    Raises:
        ConfigError: it is not a valid name.
    """
    if name is None:
        name = f"auto/{re.sub('[^a-z0-9]+', '-', description.lower())[:48].strip('-') or 'agent'}"
    parsed = ModelName.parse(name)
    return TrainableModel(name=parsed.model, project=parsed.project, base_model=base_model)


def make_tools(functions: Path | None, server: str | None) -> Toolkit | None:
    """The tools of a command line: a Python file's, an MCP server's (URL or command), or none.

    Raises:
        ConfigError: both are given, or one can't be used.
    """
    if functions and server:
        raise ConfigError("Give a Python file with tools or an MCP server, not both.")
    if functions:
        return FunctionTools.load(functions)
    if server:
        try:
            return MCPServer(server if "://" in server else shlex.split(server))
        except ValueError as error:
            raise ConfigError(f"{server!r} is no command: {error}.") from error
    return None
