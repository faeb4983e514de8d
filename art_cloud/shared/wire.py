"""The body of a train call: a batch of samples in few bytes.

The body is one Zstandard frame (RFC 8878) that says its size, of one safetensors file:

    header      uint8: JSON of `Header`: groups, config, metrics and one `Entry` for each sample
    ids         uint32: of each sample the ids of its prompt, then of its completion
    logprobs    float32: the sampler's, one for each id of a completion

Zstandard looks for repetitions within 128 MiB, so shared prompts, turns of one conversation and
forks of sub-agents cost next to nothing, wherever in the batch they are.

Logprobs come back bit for bit as the float32 that they are; ids as the integers that they are.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

from pydantic import Field, FiniteFloat, NonNegativeInt, ValidationError, model_validator
from safetensors import SafetensorError, TensorSpec, deserialize, serialize
from zstandard import (
    ZstdCompressionParameters,
    ZstdCompressor,
    ZstdDecompressor,
    ZstdError,
    frame_content_size,
)

from .config import Frozen, TrainConfig
from .errors import InvalidRequestError, RequestTooLargeError, UntrainableError
from .protocol import Sample, TrainGroup
from .validation import complaint

WIDTH = 4  # bytes of an id, and of a logprob
VALUE_BYTES = 128
"""The most that one value of JSON takes as an object of Python, beside its text."""
LEVEL = 3
"""Of Zstandard: 9 gains 1 % here and takes three times as long."""
WINDOW_LOG = 27
"""The longest window, in bits of bytes, that every decoder takes without being asked to."""
TYPECODES = {"header": "B", "ids": "I", "logprobs": "f"}
"""Of the file's tensors, as `array` has them."""
DTYPES = {"B": "uint8", "I": "uint32", "f": "float32"}


class TrainBatch(Frozen):
    """One train call: `groups` name their samples by their place in `samples`."""

    groups: list[TrainGroup]
    samples: list[Sample]
    config: TrainConfig = TrainConfig()
    metrics: dict[str, FiniteFloat] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _whole(self) -> TrainBatch:
        _check_groups(self.groups, len(self.samples))
        for number, sample in enumerate(self.samples):
            if len(sample.completion_ids) != len(sample.logprobs):
                raise ValueError(
                    f"sample {number} has {len(sample.logprobs)} logprobs for "
                    f"{len(sample.completion_ids)} sampled ids"
                )
        return self


@dataclass(frozen=True, slots=True)
class PackedSample:
    """A `Sample` in 4 bytes an id and 4 a logprob, where one of lists takes ten times as much."""

    prompt_ids: array[int]
    completion_ids: array[int]
    logprobs: array[float]
    policy: str
    temperature: float
    masked: bool

    @classmethod
    def of(cls, sample: Sample) -> PackedSample:
        return cls(
            array("I", sample.prompt_ids),
            array("I", sample.completion_ids),
            array("f", sample.logprobs),
            sample.policy,
            sample.temperature,
            sample.masked,
        )

    @property
    def bytes(self) -> int:
        return WIDTH * (len(self.prompt_ids) + 2 * len(self.completion_ids))

    def unpack(self) -> Sample:
        return Sample(
            prompt_ids=self.prompt_ids.tolist(),
            completion_ids=self.completion_ids.tolist(),
            logprobs=self.logprobs.tolist(),
            policy=self.policy,
            temperature=self.temperature,
            masked=self.masked,
        )


@dataclass(frozen=True)
class PackedBatch:
    """A `TrainBatch` as it is received: all that is in it, in a few times the body's size."""

    groups: list[TrainGroup]
    samples: list[PackedSample]
    config: TrainConfig
    metrics: dict[str, float]

    def unpack(self) -> TrainBatch:
        return TrainBatch(
            groups=self.groups,
            samples=[sample.unpack() for sample in self.samples],
            config=self.config,
            metrics=self.metrics,
        )


class Entry(Frozen):
    """One sample: how many of the ids are its own, and what else is known of it."""

    prompt: NonNegativeInt
    completion: NonNegativeInt
    policy: NonNegativeInt
    temperature: FiniteFloat
    masked: bool = False


class Header(Frozen):
    entries: list[Entry]
    policies: list[str]
    groups: list[TrainGroup]
    config: TrainConfig
    metrics: dict[str, FiniteFloat]


def encode_batch(batch: TrainBatch) -> bytes:
    """Return the body for `batch`.

    Raises:
        UntrainableError: an id is no uint32, or a logprob is no finite float32.
    """
    policies = sorted({sample.policy for sample in batch.samples})
    ids, logprobs = array("I"), array("f")
    for number, sample in enumerate(batch.samples):
        try:
            ids.extend(sample.prompt_ids)
            ids.extend(sample.completion_ids)
        except OverflowError as error:
            raise UntrainableError(
                f"Sample {number} holds a token id that is not between 0 and 2**32 - 1. Send "
                "samples as the server returned them."
            ) from error
        sampled = array("f", sample.logprobs)
        if not all(map(isfinite, sampled)):
            raise UntrainableError(
                f"Sample {number} holds a logprob that float32 can't. Send samples as the server "
                "returned them."
            )
        logprobs.extend(sampled)
    header = Header(
        entries=[
            Entry(
                prompt=len(sample.prompt_ids),
                completion=len(sample.completion_ids),
                policy=policies.index(sample.policy),
                temperature=sample.temperature,
                masked=sample.masked,
            )
            for sample in batch.samples
        ],
        policies=policies,
        groups=batch.groups,
        config=batch.config,
        metrics=batch.metrics,
    )
    return _compress(
        _pack(
            {
                "header": header.model_dump_json().encode(),
                "ids": _little_endian(ids).tobytes(),
                "logprobs": _little_endian(logprobs).tobytes(),
            }
        )
    )


def decode_batch(body: bytes, max_bytes: int) -> PackedBatch:
    """Return the batch that `encode_batch` made `body` from.

    `max_bytes` limits the file that the body holds, in which each id and each logprob has 4 bytes,
    and what its header takes once it is read, however small the body is. So all of it, while it is
    decoded, takes less than four times `max_bytes`, the body itself included.

    Raises:
        RequestTooLargeError: the batch is over `max_bytes`.
        InvalidRequestError: the body is not a batch, or not a whole one.
    """
    tensors = _unpack(_decompress(body, max_bytes))
    text = tensors.pop("header")
    check_values(text, max_bytes)
    try:
        header = Header.model_validate_json(text)
        _check_groups(header.groups, len(header.entries))
    except ValidationError as error:
        raise InvalidRequestError(f"The batch's header is not valid: {complaint(error)}") from error
    except ValueError as error:
        raise InvalidRequestError(f"The batch is not valid: {error}.") from error
    entries = header.entries
    if any(entry.policy >= len(header.policies) for entry in entries):
        raise InvalidRequestError("A sample of the batch names a policy that is not listed.")
    completions = sum(entry.completion for entry in entries)
    _check_count("ids", completions + sum(entry.prompt for entry in entries), tensors["ids"])
    _check_count("logprobs", completions, tensors["logprobs"])

    ids, logprobs = memoryview(tensors["ids"]), memoryview(tensors["logprobs"])
    samples: list[PackedSample] = []
    for entry in entries:
        prompt, completion = WIDTH * entry.prompt, WIDTH * entry.completion
        sample = PackedSample(
            prompt_ids=_words("I", ids[:prompt]),
            completion_ids=_words("I", ids[prompt : prompt + completion]),
            logprobs=_words("f", logprobs[:completion]),
            policy=header.policies[entry.policy],
            temperature=entry.temperature,
            masked=entry.masked,
        )
        if not all(map(isfinite, sample.logprobs)):
            raise InvalidRequestError("The batch is not valid: a logprob is not a finite number.")
        samples.append(sample)
        ids, logprobs = ids[prompt + completion :], logprobs[completion:]
    return PackedBatch(
        groups=header.groups, samples=samples, config=header.config, metrics=header.metrics
    )


def _check_groups(groups: Sequence[TrainGroup], samples: int) -> None:
    """Raise `ValueError` for a group that does not fit together, or to so many samples."""
    for number, group in enumerate(groups):
        if len(group.rewards) != len(group.samples):
            raise ValueError(
                f"group {number} has {len(group.rewards)} rewards for "
                f"{len(group.samples)} trajectories"
            )
        for what, several in (("metrics", group.metrics), ("metadata", group.metadata)):
            if several and len(several) != len(group.rewards):
                raise ValueError(f"group {number} has {what} for {len(several)} trajectories")
        if any(index >= samples for indices in group.samples for index in indices):
            raise ValueError(f"group {number} names a sample that is not among the {samples} sent")


def _check_count(what: str, asked: int, words: bytearray) -> None:
    if asked * WIDTH != len(words):
        raise InvalidRequestError(
            f"The batch is damaged: its header asks for {asked} {what}, it holds "
            f"{len(words) // WIDTH}."
        )


def _words(typecode: Literal["I", "f"], little_endian: memoryview) -> array[Any]:
    words = array(typecode)
    words.frombytes(little_endian)
    return _little_endian(words)


def _little_endian(words: array[Any]) -> array[Any]:
    """These, from this machine's byte order or back to it."""
    if sys.byteorder == "big":
        words.byteswap()
    return words


def _pack(tensors: dict[str, bytes]) -> bytes:
    buffers = {name: array(TYPECODES[name], content) for name, content in tensors.items()}
    return bytes(
        serialize(
            {
                name: TensorSpec(
                    dtype=DTYPES[buffer.typecode],
                    shape=[len(buffer)],
                    data_ptr=buffer.buffer_info()[0],
                    data_len=len(buffer) * buffer.itemsize,
                )
                for name, buffer in buffers.items()
            }
        )
    )


def _unpack(file: bytes) -> dict[str, bytearray]:
    try:
        tensors = {name: tensor["data"] for name, tensor in deserialize(file)}  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise InvalidRequestError(f"The batch is damaged: {error}.") from error
    if tensors.keys() != TYPECODES.keys():
        raise InvalidRequestError(f"The body is not a batch: it holds {', '.join(sorted(tensors))}")
    return tensors


def _compress(file: bytes) -> bytes:
    parameters = ZstdCompressionParameters.from_level(
        LEVEL, enable_ldm=True, window_log=WINDOW_LOG, write_content_size=True, write_checksum=True
    )
    return ZstdCompressor(compression_params=parameters).compress(file)


def _decompress(body: bytes, max_bytes: int) -> bytes:
    """What `_compress` was given. The frame's head says how much that is: no more is made of it."""
    try:
        size = frame_content_size(body)
    except ZstdError as error:
        raise InvalidRequestError(
            "The body is not a batch: it is no zstd stream, or ends in the middle of its head."
        ) from error
    if size > max_bytes:
        raise RequestTooLargeError(
            f"The batch is {size:,} bytes of token ids, logprobs and rewards; this server takes "
            f"{max_bytes:,}. Send fewer groups in a call."
        )
    try:
        return ZstdDecompressor().decompress(body, allow_extra_data=False)
    except ZstdError as error:
        raise InvalidRequestError(
            "The body is not a whole batch: it ends in the middle, goes on after the end, or was "
            f"damaged on its way ({error}). Send it again."
        ) from error


def check_values(text: bytes | bytearray, most: int) -> None:
    """Raise `RequestTooLargeError` if JSON may have too many values to be read into `most` bytes.

    Each value but the first follows a bracket, a comma or a colon.
    """
    values = sum(text.count(mark) for mark in b"[{,:")
    if values * VALUE_BYTES > most:
        raise RequestTooLargeError(
            f"The JSON of {len(text):,} bytes may hold {values:,} values; this server takes "
            f"{most // VALUE_BYTES:,} in one call. Send less in a call, or start the server with a "
            "higher --max-body."
        )
