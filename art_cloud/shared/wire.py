"""The body of a train call: a batch of samples in few bytes.

The body is a zlib stream (RFC 1950) of one safetensors file with three uint8 tensors:

    header      JSON of `Header`: groups, config, metrics and one `Entry` for each sample
    ids         token ids, uint32
    logprobs    the sampler's logprobs, float32, one for each completion token

Samples lie in the lexicographic order of their ids (prompt, then completion) and are front-coded
(Witten, Moffat and Bell, *Managing Gigabytes*, section 4.1): each says how many ids it shares with
the one before it, and only the rest is written. In that order the sum of what is written is exactly
the number of nodes of the samples' trie, so shared prompts, turns of one conversation and forks of
sub-agents cost nothing, wherever in the batch they are.

Numbers are split into byte planes (every highest byte, then every second byte, ...), as in the
shuffle filter of HDF5 and Blosc: the planes that hardly vary then compress to almost nothing.

Logprobs come back bit for bit as the float32 that they are; ids as the integers that they are.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import isfinite
from typing import Any, Literal

from pydantic import Field, FiniteFloat, NonNegativeInt, ValidationError, model_validator
from safetensors import SafetensorError, TensorSpec, deserialize, serialize

from .config import Frozen, TrainConfig
from .errors import InvalidRequestError, RequestTooLargeError, UntrainableError
from .protocol import Sample, TrainGroup

WIDTH = 4  # bytes of an id, and of a logprob
VALUE_BYTES = 128
"""The most that one value of JSON takes as an object of Python, beside its text."""
LEVEL = 6  # of zlib: 9 gains under 1 % here and takes several times as long


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
    """One sample: its place in the batch and the lengths that its ids are cut by."""

    place: NonNegativeInt
    shared: NonNegativeInt
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
    keys = [_big_endian_ids(number, sample) for number, sample in enumerate(batch.samples)]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    policies = sorted({sample.policy for sample in batch.samples})
    entries: list[Entry] = []
    ids: list[bytes] = []
    before = b""
    for place in order:
        sample, key = batch.samples[place], keys[place]
        shared = _shared_prefix(before, key) // WIDTH
        ids.append(key[shared * WIDTH :])
        entries.append(
            Entry(
                place=place,
                shared=shared,
                prompt=len(sample.prompt_ids),
                completion=len(sample.completion_ids),
                policy=policies.index(sample.policy),
                temperature=sample.temperature,
                masked=sample.masked,
            )
        )
        before = key
    header = Header(
        entries=entries,
        policies=policies,
        groups=batch.groups,
        config=batch.config,
        metrics=batch.metrics,
    )
    logprobs = b"".join(_float32(place, batch.samples[place]) for place in order)
    return _deflate(
        _pack(
            {
                "header": header.model_dump_json().encode(),
                "ids": _to_planes(b"".join(ids)),
                "logprobs": _to_planes(logprobs),
            }
        )
    )


def decode_batch(body: bytes, max_bytes: int) -> PackedBatch:
    """Return the batch that `encode_batch` made `body` from.

    `max_bytes` limits the inflated body, and also the samples once they are written out (4 bytes an
    id) and what its header takes once it is read, however small the body is. So all of it, while it
    is decoded, takes less than four times `max_bytes`, the body itself included.

    Raises:
        RequestTooLargeError: the batch is over `max_bytes`.
        InvalidRequestError: the body is not a batch, or not a whole one.
    """
    tensors = _unpack(_inflate(body, max_bytes))
    text = tensors.pop("header")
    check_values(text, max_bytes)
    try:
        header = Header.model_validate_json(text)
    except ValidationError as error:
        raise InvalidRequestError(f"The batch's header is not valid: {_first(error)}") from error
    entries = header.entries
    lengths = [entry.prompt + entry.completion for entry in entries]
    written_out = WIDTH * (sum(lengths) + max(lengths, default=0))  # the longest is there twice
    if written_out > max_bytes:
        raise _too_large(f"{written_out:,} bytes of token ids", max_bytes)
    if sorted(entry.place for entry in entries) != list(range(len(entries))):
        raise InvalidRequestError("The batch's samples are not numbered from 0 without a gap.")
    if any(entry.policy >= len(header.policies) for entry in entries):
        raise InvalidRequestError("A sample of the batch names a policy that is not listed.")

    try:
        _check_groups(header.groups, len(entries))
    except ValueError as error:
        raise InvalidRequestError(f"The batch is not valid: {error}.") from error
    ids = _words(tensors.pop("ids"), "I")
    logprobs = _words(tensors.pop("logprobs"), "f")
    if not all(map(isfinite, logprobs)):
        raise InvalidRequestError("The batch is not valid: a logprob is not a finite number.")
    in_place = memoryview(ids).cast("B")
    samples: list[PackedSample | None] = [None] * len(entries)
    before: array[int] = array("I")
    for entry, new, sampled in zip(
        entries,
        _cuts((e.prompt + e.completion - e.shared for e in entries), len(ids), "ids"),
        _cuts((entry.completion for entry in entries), len(logprobs), "logprobs"),
        strict=True,
    ):
        if entry.shared > len(before):
            raise InvalidRequestError(
                f"Sample {entry.place} of the batch shares {entry.shared} ids with one of "
                f"{len(before)}."
            )
        del before[entry.shared :]
        before.frombytes(in_place[WIDTH * new.start : WIDTH * new.stop])
        samples[entry.place] = PackedSample(
            prompt_ids=before[: entry.prompt],
            completion_ids=before[entry.prompt :],
            logprobs=logprobs[sampled],
            policy=header.policies[entry.policy],
            temperature=entry.temperature,
            masked=entry.masked,
        )
    return PackedBatch(
        groups=header.groups,
        samples=[sample for sample in samples if sample is not None],
        config=header.config,
        metrics=header.metrics,
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


def _big_endian_ids(number: int, sample: Sample) -> bytes:
    """The sample's ids in the byte order in which bytes sort as their numbers do."""
    try:
        ids = array("I", sample.prompt_ids + sample.completion_ids)
    except OverflowError as error:
        raise UntrainableError(
            f"Sample {number} holds a token id that is not between 0 and 2**32 - 1. Send samples "
            "as the server returned them."
        ) from error
    if sys.byteorder == "little":
        ids.byteswap()
    return ids.tobytes()


def _float32(number: int, sample: Sample) -> bytes:
    """The sample's logprobs as big-endian float32."""
    logprobs = array("f", sample.logprobs)
    if not all(map(isfinite, logprobs)):
        raise UntrainableError(
            f"Sample {number} holds a logprob that float32 can't. Send samples as the server "
            "returned them."
        )
    if sys.byteorder == "little":
        logprobs.byteswap()
    return logprobs.tobytes()


def _shared_prefix(a: bytes, b: bytes) -> int:
    """How many bytes `a` and `b` begin with in common."""
    length = min(len(a), len(b))
    differing = int.from_bytes(a[:length], "big") ^ int.from_bytes(b[:length], "big")
    return length - -(-differing.bit_length() // 8)


def _to_planes(words: bytes) -> bytes:
    return b"".join(words[byte::WIDTH] for byte in range(WIDTH))


def _words(planes: bytearray, typecode: Literal["I", "f"]) -> array[Any]:
    """The numbers of `planes`, in this machine's byte order."""
    count, odd = divmod(len(planes), WIDTH)
    if odd:
        raise InvalidRequestError("The batch is damaged: its numbers do not fill whole words.")
    words = array(typecode, [0]) * count
    in_place, source = memoryview(words).cast("B"), memoryview(planes)
    for byte in range(WIDTH):
        place = WIDTH - 1 - byte if sys.byteorder == "little" else byte
        in_place[place::WIDTH] = source[byte * count : (byte + 1) * count]
    return words


def _cuts(lengths: Iterable[int], there: int, what: str) -> list[slice]:
    """The pieces of these `lengths` that `there` numbers are cut into."""
    ends = list(accumulate(lengths, initial=0))
    pieces = [slice(start, end) for start, end in pairwise(ends)]
    if ends[-1] != there or any(piece.start > piece.stop for piece in pieces):
        raise InvalidRequestError(
            f"The batch is damaged: its header asks for {ends[-1]} {what}, it holds {there}."
        )
    return pieces


def _pack(tensors: dict[str, bytes]) -> bytes:
    buffers = {name: array("B", content) for name, content in tensors.items()}  # outlive their use
    return bytes(
        serialize(
            {
                name: TensorSpec(
                    dtype="uint8",
                    shape=[len(buffer)],
                    data_ptr=buffer.buffer_info()[0],
                    data_len=len(buffer),
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
    if tensors.keys() != {"header", "ids", "logprobs"}:
        raise InvalidRequestError(f"The body is not a batch: it holds {', '.join(sorted(tensors))}")
    return tensors


def _deflate(file: bytes) -> bytes:
    """Z_FILTERED: long matches only, which is both smaller and faster on byte planes."""
    stream = zlib.compressobj(LEVEL, strategy=zlib.Z_FILTERED)
    return stream.compress(file) + stream.flush()


def _inflate(body: bytes, max_bytes: int) -> bytes:
    stream = zlib.decompressobj()
    try:
        file = stream.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise InvalidRequestError("The body is not a batch: it is no zlib stream.") from error
    if len(file) > max_bytes:
        raise _too_large(f"more than {max_bytes:,} bytes", max_bytes)
    if not stream.eof:
        raise InvalidRequestError("The body ends in the middle of the batch. Send it again.")
    if stream.unused_data:
        raise InvalidRequestError("The body goes on after the end of the batch.")
    return file


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


def _too_large(size: str, max_bytes: int) -> RequestTooLargeError:
    return RequestTooLargeError(
        f"The batch is {size}; this server takes {max_bytes:,}. Send fewer groups in a call."
    )


def _first(error: ValidationError) -> str:
    """The first thing that is wrong, without the offending value: it may be huge."""
    found = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, found["loc"]))
    return f"{where}: {found['msg']}" if where else found["msg"]
