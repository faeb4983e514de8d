"""RULER (Relative Universal LLM-Elicited Rewards): a judge compares the trajectories of a group.

GRPO needs to know which rollouts of a task are better than which, and a language model that sees
them side by side can say so without a reward function. The idea is OpenPipe ART's.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any, TypeAlias, Unpack

from pydantic import BaseModel, Field

from ..model import Model
from ..rollouts.group import TrajectoryGroup
from ..rollouts.trajectory import History, Messages, Tools, Trajectory
from ..shared.errors import AnswerError, ConfigError, InvalidRequestError, ServerError
from ..shared.progress import say
from .judging import Content, Judgement, content_of, make_call, shuffled
from .structured import ChatOptions, ChatUsage, StructuredChat, open_chat

Combine: TypeAlias = Callable[[Trajectory, float], float]

DEFAULT_JUDGE = "openai/o3"
DEFAULT_RUBRIC = """\
- A trajectory that reaches its goal scores clearly higher than any that does not.
- Of two that reach it, the one that does so with fewer detours and mistakes scores higher.
- Small differences in quality are small differences in score, large ones are large.
- Progress towards a goal that is not reached earns part of the score.
"""
"""The rubric that serves for most tasks: the judge finds the goal in the messages themselves."""

PER_CALL = 16
"""How many trajectories one call compares. More are split into calls that share some."""
ANCHORS = 3
STRETCH = 2.0
"""The most that the scores of a call are stretched or squeezed to fit those of the first call."""


class TrajectoryScore(BaseModel):
    """What a judge says of one trajectory."""

    trajectory_id: str
    """The place of the trajectory among those that were judged, from "1"."""
    explanation: str
    score: float = Field(ge=0, le=1)


async def ruler(
    message_lists: Sequence[Messages],
    judge_model: str | Model[Any] = DEFAULT_JUDGE,
    extra_litellm_params: Mapping[str, Any] | None = None,
    rubric: str = DEFAULT_RUBRIC,
    *,
    tools: Tools | None = None,
    max_per_call: int = PER_CALL,
    seed: int = 0,
    debug: bool = False,
    **options: Unpack[ChatOptions],
) -> list[TrajectoryScore]:
    """Score conversations relative to one another.

    What several of them begin with is sent once, equal ones are judged once. The judge sees them
    shuffled, under random ids, and its answer has to have one score from 0 to 1 for each id. More
    than `max_per_call` are judged in calls that share three of them, which put all scores on the
    scale of the first call.

    Args:
        message_lists: one conversation for each trajectory.
        judge_model: the name of a model (`base_url=` and `api_key=` say where it answers; by
            default at OpenAI), or a `Model` with its own endpoint.
        extra_litellm_params: parameters of the judge's requests, under the name that OpenPipe ART
            gives them: temperature, max_completion_tokens, reasoning_effort, timeout, ...
        rubric: what makes a trajectory good.
        tools: that the agent had, in all of them.
        seed: of the order in which the judge sees them. The order they are given in has no part.
        debug: show the judge's explanations.
        options: see `ChatOptions`.

    Returns:
        A score for each conversation, in their order.

    Raises:
        AnswerError: the judge's answer could not be used, even mended: a score is missing, doubled
            or out of range, or it is no JSON.
        AuthError, NotFoundError, InvalidRequestError: the judge's endpoint refused.
        ServerUnavailableError: the judge did not answer, after retries.
        ConfigError: it is not known where the judge answers, or an option can't be meant.
    """
    contents = [content_of(History(messages_and_choices=m, tools=tools)) for m in message_lists]
    parameters, options = _as_litellm(extra_litellm_params, options)
    async with open_chat(judge_model, options, parameters) as chat:
        scores = await _score(chat, contents, rubric, max_per_call, seed)
    if debug:
        _show(scores)
    return scores


async def ruler_score_group(
    group: TrajectoryGroup,
    judge_model: str | Model[Any] = DEFAULT_JUDGE,
    extra_litellm_params: Mapping[str, Any] | None = None,
    rubric: str = DEFAULT_RUBRIC,
    *,
    combine: Combine | None = None,
    swallow_exceptions: bool = False,
    max_per_call: int = PER_CALL,
    seed: int = 0,
    debug: bool = False,
    **options: Unpack[ChatOptions],
) -> TrajectoryGroup:
    """A copy of `group` in which each trajectory has the judge's score as its reward.

        groups = await art.gather_trajectory_groups(
            (art.TrajectoryGroup(rollout(task) for _ in range(8)) for task in tasks),
            after_each=lambda group: art.ruler_score_group(group, "gpt-5-mini"),
        )

    Additional histories and tools are shown to the judge too. Metrics of each trajectory:
    `ruler_score`; `independent_reward`, the reward that it came with; its share of the judge's
    `ruler_prompt_tokens`, `ruler_completion_tokens` and, where the price is known, `ruler_cost` in
    USD. The explanation goes to its `logs`.

    Args:
        combine: the reward, from a trajectory with the reward that it came with and the judge's
            score: `lambda t, score: score - 0.01 * t.metrics["turns"]`. Default: the score.
        swallow_exceptions: where the judge fails, return the group with its rewards as they were,
            its metric `ruler_failed` 1 instead of 0 and the reason in its `logs`. A wrong key or a
            wrong name of the judge is raised all the same: no later call would fare better.

    The other arguments and all errors are those of `ruler`.
    """
    contents = [content_of(t, t.additional_histories) for t in group]
    parameters, options = _as_litellm(extra_litellm_params, options)
    async with open_chat(judge_model, options, parameters) as chat:
        try:
            scores = await _score(chat, contents, rubric, max_per_call, seed)
        except (AnswerError, InvalidRequestError, ServerError) as error:
            if not swallow_exceptions:
                raise
            failed = _copy(group, [_spent(t, chat.usage, len(group)) for t in group], failed=True)
            failed.log(f"RULER gave no scores: {type(error).__name__}: {error}")
            say(failed.logs[-1])
            return failed
    if debug:
        _show(scores)
    trajectories = [_spent(t, chat.usage, len(group)) for t in group]
    for trajectory, score in zip(trajectories, scores, strict=True):
        independent = trajectory.metrics.setdefault("independent_reward", trajectory.reward)
        trajectory.metrics["ruler_score"] = score.score
        trajectory.log(f"RULER explanation: {score.explanation}")
        trajectory.reward = float(independent)
        trajectory.reward = combine(trajectory, score.score) if combine else score.score
    return _copy(group, trajectories, failed=False)


async def _score(
    chat: StructuredChat, contents: Sequence[Content], rubric: str, max_per_call: int, seed: int
) -> list[TrajectoryScore]:
    if max_per_call <= ANCHORS:
        raise ConfigError(
            f"max_per_call is {max_per_call}. Calls share {ANCHORS} trajectories, so give at least "
            f"{ANCHORS + 1}."
        )
    if not contents:
        return []
    distinct = shuffled(contents, seed)
    calls = [await _judge(chat, distinct[:max_per_call], rubric)]
    if rest := distinct[max_per_call:]:
        anchors = _spread(calls[0])
        count = -(-len(rest) // (max_per_call - ANCHORS))
        questions = [shuffled([*anchors, *rest[n::count]], seed) for n in range(count)]
        try:
            async with asyncio.TaskGroup() as tasks:
                more = [tasks.create_task(_judge(chat, one, rubric)) for one in questions]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        calls += [task.result() for task in more]
    found = _one_scale(calls)
    return [
        TrajectoryScore(
            trajectory_id=str(place), explanation=found[content][1], score=found[content][0]
        )
        for place, content in enumerate(contents, 1)
    ]


Verdicts: TypeAlias = dict[Content, tuple[float, str]]
"""The score and the explanation of each content."""


async def _judge(chat: StructuredChat, contents: Sequence[Content], rubric: str) -> Verdicts:
    call = make_call(contents, rubric)
    answer = await chat.ask(call.system, call.user, Judgement, call.check)
    by_id = {score.trajectory_id: (score.score, score.explanation) for score in answer.scores}
    return {content: by_id[id] for content, id in zip(contents, call.ids, strict=True)}


def _spread(scores: Verdicts) -> list[Content]:
    """`ANCHORS` trajectories of a call, spread evenly from the worst to the best."""
    ranked = sorted(scores, key=lambda content: scores[content][0])
    return [ranked[round(n * (len(ranked) - 1) / (ANCHORS - 1))] for n in range(ANCHORS)]


def _one_scale(calls: Sequence[Verdicts]) -> Verdicts:
    """All scores on the scale of the first call, by linear linking on the trajectories in common.

    Mean/sigma method (Marco 1977, Journal of Educational Measurement 14; Kolen and Brennan, Test
    Equating, Scaling, and Linking, chapter 6): the scores of a call are mapped so that those of the
    anchors get the mean and the standard deviation that they have in the first call. The slope is
    bounded by STRETCH, since three anchors say little about it. A trajectory's score is the mean
    over its calls; if some fall outside of 0 to 1, all are moved and squeezed together, which
    leaves their order and the ratios of their distances.
    """
    first, *others = calls
    linked: dict[Content, list[float]] = defaultdict(list)
    for call in calls:
        common = [content for content in first if content in call] if others else []
        there, here = ([one[c][0] for c in common] or [0.0] for one in (first, call))
        slope = pstdev(there) / pstdev(here) if pstdev(there) and pstdev(here) else 1.0
        slope = min(max(slope, 1 / STRETCH), STRETCH)
        for content, (score, _) in call.items():
            linked[content].append(fmean(there) + slope * (score - fmean(here)))
    means = {content: fmean(scores) for content, scores in linked.items()}
    low, high = min(0.0, *means.values()), max(1.0, *means.values())
    explanations = {
        content: text for call in reversed(calls) for content, (_, text) in call.items()
    }
    return {c: ((mean - low) / (high - low), explanations[c]) for c, mean in means.items()}


def _as_litellm(
    parameters: Mapping[str, Any] | None, options: ChatOptions
) -> tuple[dict[str, Any], ChatOptions]:
    """`api_base`, `base_url` and `api_key` among the parameters are options, as in LiteLLM."""
    rest = dict(parameters or {})
    found = options.copy()
    for name in ("api_base", "base_url"):
        if name in rest:
            found["base_url"] = rest.pop(name)
    if "api_key" in rest:
        found["api_key"] = rest.pop("api_key")
    return rest, found


def _spent(trajectory: Trajectory, usage: ChatUsage, among: int) -> Trajectory:
    """A copy of `trajectory` for the score, with its share of the tokens that the judge used."""
    metrics = trajectory.metrics | {
        "ruler_prompt_tokens": usage.prompt_tokens / among,
        "ruler_completion_tokens": usage.completion_tokens / among,
    }
    if usage.cost is not None:
        metrics["ruler_cost"] = usage.cost / among
    return trajectory.model_copy(update={"metrics": metrics, "logs": [*trajectory.logs]})


def _copy(
    group: TrajectoryGroup, trajectories: Sequence[Trajectory], *, failed: bool
) -> TrajectoryGroup:
    return TrajectoryGroup(
        trajectories,
        exceptions=group.exceptions,
        metadata=dict(group.metadata),
        metrics=group.metrics | {"ruler_failed": float(failed)},
        logs=[*group.logs],
    )


def _show(scores: Sequence[TrajectoryScore]) -> None:
    for score in scores:
        say(f"RULER, trajectory {score.trajectory_id}: {score.score:.3f}. {score.explanation}")
