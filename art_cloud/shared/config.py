"""What a user can set about training. Defaults are the named paper's, or common practice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from .validation import refused

RewardScale = Literal["group", "batch", "none"]
Normalization = Literal["token", "sequence", "fixed"]
RatioLevel = Literal["token", "sequence"]
PolicyLoss = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "ppo", "importance_sampling"]


Count = Annotated[int, Field(ge=0, lt=2**63)]
StepNumber = Annotated[int, Field(ge=0, lt=10**9)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Moderate = Annotated[FiniteFloat, Field(ge=0, le=1e6)]
"""A number up to 1e6: with larger ones the products that it is part of overflow in float32."""
Beta = Annotated[float, Field(ge=0, lt=1)]


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Config(Frozen):
    """What a script sets by name. What can't be meant is a `ConfigError` where it is set, and
    pydantic's own error where data are read."""

    if not TYPE_CHECKING:  # type checkers know the names from the fields

        def __init__(self, **chosen: Any) -> None:
            try:
                super().__init__(**chosen)
            except ValidationError as error:
                raise refused(type(self).__name__, error, type(self)) from None

        __init__.__pydantic_base_init__ = True  # what reads data does not come here


class LoRAConfig(Config):
    """The adapter (Hu et al. 2021, arXiv:2106.09685). `seed` makes its first weights repeatable."""

    rank: int = Field(16, ge=1, le=1024)
    alpha: int = Field(32, ge=1, le=10**6)
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    seed: Seed = 0


class LossOptions(NamedTuple):
    """A policy loss with every choice made.

    advantage   = (reward - mean of its group) / scale        scale: std of group or batch, or 1
    ratio       = exp(logprob - sampler's logprob)            per token, or the geometric mean of
                                                              one completion ("sequence")
    objective   = min(ratio * advantage,
                      clip(ratio, 1 - epsilon_low, 1 + epsilon_high) * advantage)
    the batch   = sum of token losses / all tokens ("token"), mean over trajectories of the mean
                  over their tokens ("sequence"), or sum / (trajectories * fixed_length) ("fixed")
    """

    scale_rewards: RewardScale
    normalization: Normalization
    ratio_level: RatioLevel
    epsilon_low: float
    epsilon_high: float


PRESETS: dict[PolicyLoss, LossOptions] = {
    # DeepSeekMath, arXiv:2402.03300, eq. 3
    "grpo": LossOptions("group", "sequence", "token", 0.2, 0.2),
    # Understanding R1-Zero-like training, arXiv:2503.20783, section 3.2
    "dr_grpo": LossOptions("none", "fixed", "token", 0.2, 0.2),
    # DAPO, arXiv:2503.14476, eq. 8: clip-higher, token mean, groups without signal left out
    "dapo": LossOptions("group", "token", "token", 0.2, 0.28),
    # GSPO, arXiv:2507.18071, eq. 5 and section 5.1
    "gspo": LossOptions("group", "sequence", "sequence", 3e-4, 4e-4),
    # MiniMax-M1, arXiv:2506.13585, eq. 4 and 5: the clipped ratio is a weight without gradient
    "cispo": LossOptions("group", "token", "token", 1.0, 4.0),
    # PPO, arXiv:1707.06347, eq. 7, on group-relative advantages
    "ppo": LossOptions("group", "token", "token", 0.2, 0.2),
    # off-policy REINFORCE: ratio * advantage, never clipped
    "importance_sampling": LossOptions("group", "token", "token", float("inf"), float("inf")),
}


class TrainConfig(Config):
    """One GRPO step. An option left at None takes the value that the paper of `loss` gives."""

    learning_rate: Moderate = 5e-6
    loss: PolicyLoss = "grpo"
    scale_rewards: RewardScale | None = None
    normalization: Normalization | None = None
    fixed_length: PositiveInt | None = None
    """The number of tokens that "fixed" normalization divides by, for each trajectory."""
    ratio_level: RatioLevel | None = None
    epsilon_low: Moderate | None = None
    epsilon_high: Moderate | None = None
    kl_coef: Moderate = 0.0
    """Weight of the KL penalty to the reference, the k3 estimator of arXiv:2402.03300, eq. 4."""
    kl_reference_step: StepNumber | None = None
    """Step of this model that the penalty pulls towards; None: the base model."""
    max_grad_norm: FiniteFloat = Field(1.0, gt=0, le=1e30)
    weight_decay: Moderate = 0.0
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    masked_samples: Literal["refuse", "skip"] = "refuse"
    """What becomes of samples that a grammar or a forced tool had a say in (`Sample.masked`). Their
    logprobs are not the model's, so no loss on them is right. "skip" learns from the trajectory's
    other samples, as if the masked ones were the environment's."""

    @model_validator(mode="after")
    def _fixed_needs_a_length(self) -> TrainConfig:
        if self.options.normalization == "fixed" and self.fixed_length is None:
            raise ValueError(
                "normalization 'fixed' (the default of loss 'dr_grpo') needs fixed_length: the "
                "most tokens that the model may sample in one trajectory"
            )
        return self

    @property
    def options(self) -> LossOptions:
        preset = PRESETS[self.loss]
        chosen = {name: getattr(self, name) for name in preset._fields}
        return preset._replace(**{k: v for k, v in chosen.items() if v is not None})


class SFTConfig(Config):
    """Supervised fine-tuning on the assistant's messages. One call is one step of the model."""

    learning_rate: Moderate = 1e-4
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    warmup_ratio: FiniteFloat = Field(0.0, ge=0, le=1)
    batch_size: PositiveInt = 16
    epochs: int = Field(1, ge=1, le=10_000)
    max_grad_norm: FiniteFloat = Field(1.0, gt=0, le=1e30)
    weight_decay: Moderate = 0.0
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    seed: Seed = 0
    """The seed of the order in which examples are seen."""


class Retention(Config):
    """Which steps of a model stay; those that no rule names are removed.

    What always stays: the newest step, and the one that the model began with.
    """

    keep_last: PositiveInt | None = None
    """The number of newest steps that stay."""
    keep_best: str | None = None
    """The step where this metric is highest, say "val/reward". Steps that are newer than the last
    one that has the metric stay until they have it: their evaluation may be under way."""
    keep_every: PositiveInt | None = None
    """Every step whose number can be divided by this."""

    @model_validator(mode="after")
    def _keeps_something(self) -> Retention:
        if not (self.keep_last or self.keep_best or self.keep_every):
            raise ValueError("say what to keep: keep_last, keep_best or keep_every")
        return self
