"""Rewards to group-relative advantages (DeepSeekMath, arXiv:2402.03300, section 4.1.2)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from art_cloud.shared.config import RewardScale

EPS = 1e-4
"""Added to the standard deviation, as in TRL's GRPOTrainer."""


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether the group tells its members apart; if not, all its advantages are 0."""
    return min(rewards) != max(rewards)


def group_advantages(
    groups: Sequence[Sequence[float]], scale: RewardScale = "group"
) -> list[list[float]]:
    """The advantage of each trajectory of each group: (reward - mean of its group) / (std + EPS).

    The standard deviation is the unbiased one (n - 1 in the denominator, as in TRL), of the group,
    or of all rewards of the batch ("batch"); "none" does not divide (Dr. GRPO, arXiv:2503.20783,
    section 3.2). A group whose rewards are all equal has advantages of exactly 0.
    """
    rewards = [reward for group in groups for reward in group]
    batch_std = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
    advantages: list[list[float]] = []
    for group in groups:
        if not has_signal(group):
            advantages.append([0.0] * len(group))
            continue
        mean = statistics.fmean(group)
        divisor = 1.0
        if scale != "none":
            divisor = (statistics.stdev(group) if scale == "group" else batch_std) + EPS
        advantages.append([(reward - mean) / divisor for reward in group])
    return advantages
