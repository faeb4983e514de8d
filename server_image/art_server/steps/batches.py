"""From what a call carries to what the trainer takes."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Sequence
from statistics import fmean

from art_cloud.shared.config import SFTConfig
from art_cloud.shared.errors import InvalidRequestError, RequestTooLargeError, UntrainableError
from art_cloud.shared.protocol import Metrics, SFTExample
from art_cloud.shared.wire import PackedBatch

from ..inference import PromptLength, render
from ..training import BaseModel, Datum, group_advantages, has_signal

ID_BYTES = 4


def rl_data(batch: PackedBatch, vocabulary: int) -> tuple[list[Datum], Metrics]:
    """The batch's samples, each with the advantage of its trajectory, and what they are like.

    Raises `UntrainableError` for a group with nothing in it, and for an id that is not in the base
    model's vocabulary.
    """
    if not batch.groups:
        raise UntrainableError("The batch has no groups: there is nothing to learn.")
    for number, group in enumerate(batch.groups):
        if not group.rewards or not all(group.samples):
            raise UntrainableError(
                f"Group {number} has no trajectory, or one without a sample: there is nothing to "
                "learn from it."
            )
    for number, sample in enumerate(batch.samples):
        if sample.masked:
            raise UntrainableError(
                f"Sample {number} (by {sample.policy}) was drawn from a masked distribution, so "
                "its logprobs are not the model's. Leave it out of the batch."
            )
        top = max(max(ids, default=0) for ids in (sample.prompt_ids, sample.completion_ids))
        if top >= vocabulary:
            raise UntrainableError(
                f"Sample {number} (by {sample.policy}) holds the token id {top}, and the base "
                f"model has {vocabulary}. It was sampled from another model."
            )
    rewards = [group.rewards for group in batch.groups]
    advantages = group_advantages(rewards, batch.config.options.scale_rewards)
    data = []
    trajectory = 0
    for number, (group, of_group) in enumerate(zip(batch.groups, advantages, strict=True)):
        for indices, advantage in zip(group.samples, of_group, strict=True):
            for sample in (batch.samples[index] for index in indices):
                data.append(
                    Datum(
                        prompt_ids=sample.prompt_ids,
                        completion_ids=sample.completion_ids,
                        logprobs=sample.logprobs,
                        advantage=advantage,
                        temperature=sample.temperature or 1.0,
                        sequence=trajectory,
                        group=number,
                    )
                )
            trajectory += 1
    flat = [reward for group in rewards for reward in group]
    metrics = {
        "reward": fmean(flat),
        "reward_std": fmean(_std(group) for group in rewards),
        "groups": float(len(rewards)),
        "groups_without_signal": float(sum(not has_signal(group) for group in rewards)),
        "trajectories": float(len(flat)),
        "samples": float(len(batch.samples)),
    }
    return data, metrics


def sft_data(examples: Sequence[SFTExample], base: BaseModel, max_bytes: int) -> list[Datum]:
    """One datum for each message of the assistant: what came before it, and the message itself,
    in the ids that the engine would have seen and sampled.

    Raises `UntrainableError` that names an example without one, `ContextLengthError` that names one
    that can't fit, `RequestTooLargeError` where the ids (4 bytes each) are over `max_bytes`.
    """
    length = PromptLength.of(base.tokenizer, base.context_length)
    left = max_bytes
    if not examples:
        raise UntrainableError("There are no examples: there is nothing to learn.")
    data: list[Datum] = []
    for number, example in enumerate(examples):
        messages = example.messages
        turns = [n for n, message in enumerate(messages) if message.get("role") == "assistant"]
        if not turns:
            raise UntrainableError(
                f"Example {number} has no message of the assistant: there is nothing to learn."
            )
        for turn in turns:
            before, whole = _rendered(number, example, turn, base)
            if not whole.startswith(before):
                raise UntrainableError(
                    f"Example {number}, message {turn}: the chat template of {base.name} does not "
                    "write the assistant's message after what it writes to ask for one, so the "
                    "model can't be taught to sample it."
                )
            length.check(whole, f"Example {number}, message {turn},")
            prompt_ids = _encode(base, before)
            completion_ids = _encode(base, whole[len(before) :])
            left -= ID_BYTES * (len(prompt_ids) + len(completion_ids))
            if left < 0:
                raise RequestTooLargeError(
                    f"The examples up to number {number} are over {max_bytes:,} bytes of token "
                    "ids, each message of the assistant with all that is before it. Send fewer in "
                    "one call, or start the server with a higher --max-body."
                )
            end = base.tokenizer.eos_token_id
            if end in completion_ids:
                completion_ids = completion_ids[: completion_ids.index(end) + 1]
            data.append(
                Datum(
                    prompt_ids=prompt_ids,
                    completion_ids=completion_ids,
                    logprobs=[],
                    sequence=len(data),
                )
            )
    return data


def _rendered(number: int, example: SFTExample, turn: int, base: BaseModel) -> tuple[str, str]:
    """The conversation up to message `turn`, as the engine would be asked for it, and with it."""
    messages = example.messages
    try:
        before = render(base.tokenizer, messages[:turn], example.tools)
        whole = render(
            base.tokenizer, messages[: turn + 1], example.tools, add_generation_prompt=False
        )
    except InvalidRequestError as error:
        raise UntrainableError(f"Example {number}: {error}") from error
    return before, whole


def sft_batches(data: Sequence[Datum], config: SFTConfig) -> list[list[Datum]]:
    """All epochs, each in an order of its own that depends on the seed only."""
    batches = []
    for epoch in range(config.epochs):
        order = list(data)
        random.Random(f"{config.seed}/{epoch}").shuffle(order)  # noqa: S311
        batches += [
            order[start : start + config.batch_size]
            for start in range(0, len(order), config.batch_size)
        ]
    return batches


def sft_learning_rate(config: SFTConfig, number: int, total: int) -> float:
    """The rate of optimizer step `number` (from 0) of `total`: linear warm-up, then `schedule`."""
    warmup = round(config.warmup_ratio * total)
    if number < warmup:
        return config.learning_rate * (number + 1) / warmup
    left = 1 - (number - warmup) / max(1, total - warmup)
    factor = {
        "constant": 1.0,
        "linear": left,
        "cosine": (1 + math.cos(math.pi * (1 - left))) / 2,
    }[config.schedule]
    return config.learning_rate * factor


def _encode(base: BaseModel, text: str) -> array[int]:
    return array("I", base.tokenizer.encode(text, add_special_tokens=False))


def _std(values: Sequence[float]) -> float:
    mean = fmean(values)
    return math.sqrt(fmean((value - mean) ** 2 for value in values))
