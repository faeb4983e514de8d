"""From scored trajectories to the batch of a train call, with every check that needs no server."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from statistics import fmean, pstdev

from ..shared.config import TrainConfig
from ..shared.errors import ConfigError, UntrainableError
from ..shared.names import ModelName, PolicyName
from ..shared.protocol import LoggedTrajectory, Metrics, Sample, TrainGroup
from ..shared.wire import TrainBatch, encode_batch
from .group import TrajectoryGroup
from .trajectory import Trajectory


def make_batch(
    name: ModelName, groups: Iterable[TrajectoryGroup], config: TrainConfig
) -> TrainBatch:
    """The batch that trains `name` on `groups`.

    A group of which rollouts failed until fewer than two were left is skipped with a warning.

    Raises:
        UntrainableError: nothing can be learned from a group or trajectory as it is.
        ConfigError: one of `groups` is no group.
    """
    given = list(groups)
    for item in given:
        if not isinstance(item, TrajectoryGroup):
            raise ConfigError(
                f"What is trained on is a list of TrajectoryGroups, and one item is a "
                f"{type(item).__name__}. Of one group: train(model, [group]). Of rollouts: "
                "TrajectoryGroup([...])."
            )
    if not given:
        raise UntrainableError(
            "There is no group to train on. Were all of them dropped by after_each, or by "
            "max_exceptions?"
        )
    kept: list[TrainGroup] = []
    samples: list[Sample] = []
    skipped = masked = 0
    for number, group in enumerate(given):
        where = f"Group {number}{_told(group.metadata)}"
        if len(group) < 2:
            _check_too_small(group, where)
            skipped += 1
            continue
        rewards: list[float] = []
        indices: list[list[int]] = []
        for place, trajectory in enumerate(group):
            what = f"{where}, trajectory {place}{_told(trajectory.metadata)}"
            rewards.append(_reward(trajectory, what))
            sampled = _samples(trajectory, name, what)
            found = _unmasked(sampled, what, config)
            masked += len(sampled) - len(found)
            indices.append(list(range(len(samples), len(samples) + len(found))))
            samples += found
        kept.append(
            TrainGroup(
                rewards=rewards,
                samples=indices,
                metrics=[_finite(trajectory.metrics) for trajectory in group],
                metadata=[group.metadata | trajectory.metadata for trajectory in group],
            )
        )
    if not kept:
        raise UntrainableError(
            f"None of the {len(given)} groups has two trajectories left to compare. See why their "
            "rollouts fail: group.exceptions."
        )
    metrics = {f"trajectory/{key}": value for key, value in mean_metrics(given).items()}
    metrics["groups_too_small"] = float(skipped)
    metrics["samples_masked"] = float(masked)
    return TrainBatch(groups=kept, samples=samples, config=config, metrics=metrics)


def logged_trajectories(
    groups: Sequence[TrajectoryGroup],
) -> tuple[list[LoggedTrajectory], bytes]:
    """The trajectories as `model.log` keeps them, and the batch of their samples.

    A trajectory that could not be trained on (it holds something that is neither a message nor a
    choice) is kept without samples.
    """
    rows: list[LoggedTrajectory] = []
    samples: list[Sample] = []
    for number, group in enumerate(groups):
        for place, trajectory in enumerate(group):
            try:
                found = trajectory.samples()
            except UntrainableError:
                found = []
            rows.append(
                LoggedTrajectory(
                    group=number,
                    trajectory=place,
                    reward=trajectory.reward,
                    metrics=trajectory.metrics,
                    metadata=group.metadata | trajectory.metadata,
                    messages=trajectory.messages(),
                    logs=trajectory.logs,
                    samples=list(range(len(samples), len(samples) + len(found))),
                )
            )
            samples += found
    return rows, encode_batch(TrainBatch(groups=[], samples=samples)) if samples else b""


def mean_metrics(groups: Sequence[TrajectoryGroup]) -> Metrics:
    """Means over trajectories of what they measured; over groups, as `group_...`, of theirs.

    `exception_rate` is the share of rollouts that failed. A value that is not finite is left out
    with a warning.
    """
    values: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        for trajectory in group:
            for key, value in trajectory.metrics.items():
                values[key].append(float(value))
        for key, value in group.metrics.items():
            values[f"group_{key}"].append(float(value))
        values["exception_rate"] += [0.0] * len(group) + [1.0] * len(group.exceptions)
    means = {}
    for key, several in values.items():
        finite = [value for value in several if isfinite(value)]
        if len(finite) < len(several):
            warnings.warn(
                f"{len(several) - len(finite)} of {len(several)} values of metric {key!r} are not "
                "finite; the mean is over the others.",
                stacklevel=2,
            )
        if finite:
            means[key] = fmean(finite)
    return means


def reward_metrics(groups: Sequence[TrajectoryGroup]) -> Metrics:
    """`reward`: the mean over trajectories; `reward_std`: over groups, of the std in each.

    Raises:
        UntrainableError: a reward is not finite.
    """
    rewards = [
        [
            _reward(trajectory, f"Group {number}, trajectory {place}{_told(trajectory.metadata)}")
            for place, trajectory in enumerate(group)
        ]
        for number, group in enumerate(groups)
    ]
    flat = [reward for group in rewards for reward in group]
    if not flat:
        return {}
    stds = [pstdev(group) for group in rewards if len(group) > 1]
    return {"reward": fmean(flat), **({"reward_std": fmean(stds)} if stds else {})}


def as_groups(
    trajectories: Iterable[Trajectory | TrajectoryGroup | BaseException],
) -> list[TrajectoryGroup]:
    """Groups stay as they are; trajectories and exceptions that stand alone become one group.

    Raises:
        ConfigError: something is neither.
    """
    given = list(trajectories)
    groups = [item for item in given if isinstance(item, TrajectoryGroup)]
    alone = [item for item in given if isinstance(item, Trajectory | BaseException)]
    if len(groups) + len(alone) < len(given):
        odd = next(
            i for i in given if not isinstance(i, TrajectoryGroup | Trajectory | BaseException)
        )
        raise ConfigError(
            f"A {type(odd).__name__} is neither a Trajectory nor a TrajectoryGroup. Pass what "
            "gather_trajectory_groups or gather_trajectories returned."
        )
    return [*groups, *([TrajectoryGroup(alone)] if alone else [])]


def _check_too_small(group: TrajectoryGroup, where: str) -> None:
    if not group.exceptions:
        raise UntrainableError(
            f"{where} has {len(group)} trajectories. GRPO compares rewards within a group: roll "
            "each task out at least twice."
        )
    last = group.exceptions[-1]
    warnings.warn(
        f"{where} is skipped: {len(group.exceptions)} of its rollouts failed and {len(group)} is "
        f"left. The last failure: {last.type}: {last.message}",
        stacklevel=3,
    )


def _finite(metrics: Mapping[str, float]) -> Metrics:
    return {key: float(value) for key, value in metrics.items() if isfinite(value)}


def _reward(trajectory: Trajectory, what: str) -> float:
    if not isfinite(trajectory.reward):
        raise UntrainableError(f"{what} has reward {trajectory.reward}. Give it a finite number.")
    return float(trajectory.reward)


def _samples(trajectory: Trajectory, name: ModelName, what: str) -> list[Sample]:
    try:
        samples = trajectory.samples()
    except UntrainableError as error:
        raise UntrainableError(f"{what}: {error}") from error
    if not samples:
        raise UntrainableError(
            f"{what} has no sample from this server, so there is nothing to train on. Append "
            "response.choices[0], as model.openai_client() returned it, to messages_and_choices."
        )
    for sample in samples:
        if _model_of(sample.policy) != name:
            raise UntrainableError(
                f"{what} was sampled from {sample.policy}, which is not {name}. Sample from "
                "model.get_inference_name()."
            )
    return samples


def _unmasked(samples: list[Sample], what: str, config: TrainConfig) -> list[Sample]:
    """The samples that may be trained on: no grammar or forced tool had a say in them."""
    unmasked = [sample for sample in samples if not sample.masked]
    if len(unmasked) < len(samples) and config.masked_samples == "refuse":
        raise UntrainableError(
            f"{what}: {len(samples) - len(unmasked)} of its {len(samples)} samples were drawn from "
            "a masked distribution (structured output, a forced tool, a bias or a penalty). Their "
            "logprobs are not the model's, and the importance ratio would be wrong. Ask for the "
            'format in the prompt and reward it, or train with masked_samples="skip": then the '
            "other samples are learned from."
        )
    if not unmasked:
        raise UntrainableError(
            f"{what}: all of its {len(samples)} samples were drawn from a masked distribution "
            "(structured output, a forced tool, a bias or a penalty), so there is nothing to "
            "learn from it. Ask for the format in the prompt and reward it."
        )
    return unmasked


def _model_of(policy: str) -> ModelName | None:
    """The model that a policy belongs to; None for the base model."""
    try:
        return PolicyName.parse(policy).model
    except ConfigError:
        return None


def _told(metadata: Mapping[str, object]) -> str:
    """A few entries of the metadata, so that a message can say which trajectory it means."""
    return f" ({', '.join(f'{k}={v}' for k, v in list(metadata.items())[:3])})" if metadata else ""
