"""The trainer's input: samples ready for a loss, and the optimizer's numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from art_cloud.shared.errors import ContextLengthError, UntrainableError


@dataclass(frozen=True)
class Datum:
    """One call of the model, ready for a loss.

    `prompt_ids` (P) and `completion_ids` (C) are the ids that the engine saw and sampled,
    `logprobs` (C) the sampler's natural logs of them at `temperature`; `cross_entropy` needs none.

    `sequence` numbers the trajectory, unique within the batch: the samples of one trajectory share
    it, and it is the unit of "sequence" and "fixed" normalization. The ratio level "sequence"
    (GSPO) is over one completion, that is one Datum. `group` numbers its group of trajectories:
    `dapo` leaves out a group whose advantages are all 0.
    """

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    logprobs: Sequence[float] = ()
    advantage: float = 0.0
    temperature: float = 1.0
    sequence: int = 0
    group: int = 0


@dataclass(frozen=True)
class AdamParams:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), after clipping the global 2-norm."""

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


def check(data: Sequence[Datum], context_length: int, *, with_logprobs: bool) -> None:
    """Raise `UntrainableError` or `ContextLengthError` for the first sample that can't be used."""
    if not data:
        raise UntrainableError("There is nothing to train on: the batch has no samples.")
    for number, datum in enumerate(data):
        prompt, completion = len(datum.prompt_ids), len(datum.completion_ids)
        if not prompt or not completion:
            raise UntrainableError(
                f"Sample {number} has {prompt} prompt and {completion} completion tokens. It needs "
                "at least one of each; leave it out of the batch."
            )
        if prompt + completion > context_length:
            raise ContextLengthError(
                f"Sample {number} has {prompt} + {completion} tokens, and the model's context "
                f"holds {context_length}. Shorten the prompt or sample fewer tokens."
            )
        if with_logprobs and len(datum.logprobs) != completion:
            raise UntrainableError(
                f"Sample {number} has {completion} completion tokens and {len(datum.logprobs)} "
                "logprobs. A policy loss needs the sampler's logprob of every completion token."
            )
        if datum.temperature <= 0:
            raise UntrainableError(
                f"Sample {number} has temperature {datum.temperature}. Logprobs are defined "
                "above 0; score a greedy sample at temperature 1."
            )
