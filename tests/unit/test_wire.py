"""The batch codec: exact both ways, small, and never trusting."""

from __future__ import annotations

import json
import struct
import zlib
from array import array

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import TensorSpec, serialize

from art_cloud.config import TrainConfig
from art_cloud.errors import InvalidRequestError, RequestTooLargeError, UntrainableError
from art_cloud.protocol import Sample, TrainGroup
from art_cloud.wire import TrainBatch, decode_batch, encode_batch

LIMIT = 1 << 24
float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    ids = st.lists(st.integers(0, 3) | st.integers(0, 2**32 - 1), max_size=12)
    completion = draw(ids)
    n = len(completion)
    return Sample(
        prompt_ids=draw(ids),
        completion_ids=completion,
        logprobs=draw(st.lists(float32, min_size=n, max_size=n)),
        policy=draw(st.sampled_from(["a/b@0", "a/b@1", "c/d@7"])),
        temperature=draw(st.floats(0, 2)),
    )


@st.composite
def batches(draw: st.DrawFn) -> TrainBatch:
    drawn = draw(st.lists(samples(), max_size=8))
    groups = []
    for _ in range(draw(st.integers(0, 3))):
        size = draw(st.integers(0, 3))
        index = st.integers(0, len(drawn) - 1) if drawn else st.nothing()
        groups.append(
            TrainGroup(
                rewards=draw(st.lists(float32, min_size=size, max_size=size)),
                samples=[draw(st.lists(index, max_size=3)) if drawn else [] for _ in range(size)],
            )
        )
    return TrainBatch(
        groups=groups,
        samples=drawn,
        config=TrainConfig(learning_rate=draw(st.floats(0, 1)), loss="cispo"),
        metrics=draw(st.dictionaries(st.text(max_size=5), float32, max_size=2)),
    )


@quick
@given(batches())
def test_a_batch_comes_back_as_it_was(batch: TrainBatch) -> None:
    back = decode_batch(encode_batch(batch), LIMIT)
    assert back == batch
    for ours, theirs in zip(batch.samples, back.samples, strict=True):
        assert struct.pack(f"{len(ours.logprobs)}f", *ours.logprobs) == struct.pack(
            f"{len(theirs.logprobs)}f", *theirs.logprobs
        )


@quick
@given(batches(), st.data())
def test_a_damaged_body_is_refused_or_means_the_same(
    batch: TrainBatch, data: st.DataObject
) -> None:
    body = bytearray(encode_batch(batch))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        back = decode_batch(bytes(body), LIMIT)
    except InvalidRequestError:
        return
    assert back == batch  # flips that undid each other, or of the header's level hint


@quick
@given(batches(), st.data())
def test_a_damaged_file_in_a_sound_stream_never_breaks_the_decoder(
    batch: TrainBatch, data: st.DataObject
) -> None:
    file = bytearray(zlib.decompress(encode_batch(batch)))
    for _ in range(data.draw(st.integers(1, 3))):
        file[data.draw(st.integers(0, len(file) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        back = decode_batch(zlib.compress(bytes(file)), LIMIT)
    except InvalidRequestError:
        return
    assert all(len(s.completion_ids) == len(s.logprobs) for s in back.samples)


@quick
@given(st.binary(max_size=200))
def test_garbage_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        decode_batch(body, LIMIT)
    with pytest.raises(InvalidRequestError):
        decode_batch(zlib.compress(body), LIMIT)


def sample(prompt: list[int], completion: list[int]) -> Sample:
    logprobs = [-0.5] * len(completion)
    return Sample(prompt_ids=prompt, completion_ids=completion, logprobs=logprobs, policy="p/m@3")


def one_group(drawn: list[Sample]) -> TrainBatch:
    group = TrainGroup(rewards=[0.0] * len(drawn), samples=[[i] for i in range(len(drawn))])
    return TrainBatch(groups=[group], samples=drawn)


def ids_written(body: bytes) -> int:
    file = zlib.decompress(body)
    size = int.from_bytes(file[:8], "little")
    start, end = json.loads(file[8 : 8 + size])["ids"]["data_offsets"]
    return (end - start) // 4


def test_what_samples_share_is_written_once() -> None:
    prompt, first, tool, second = list(range(100)), [7, 8, 9], [200, 201], [1, 2]
    drawn = [
        sample(prompt, first),
        sample([5, 5, 5], [6]),  # of something else, in between
        sample(prompt + first + tool, second),  # the next turn
        sample(prompt, [7, 8, 10]),  # another rollout of the same prompt
    ]
    assert ids_written(encode_batch(one_group(drawn))) == 100 + 3 + 2 + 2 + 4 + 1


@pytest.mark.parametrize("cut", [0, 1, 2, 20, -1, -4])
def test_a_truncated_body_says_so(cut: int) -> None:
    body = encode_batch(one_group([sample([1, 2], [3])]))
    with pytest.raises(InvalidRequestError, match="ends in the middle"):
        decode_batch(body[:cut], LIMIT)


def test_trailing_bytes_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="goes on after"):
        decode_batch(encode_batch(one_group([sample([1], [2])])) + b"x", LIMIT)


def test_a_zlib_bomb_is_refused_at_the_limit() -> None:
    with pytest.raises(RequestTooLargeError, match="takes 100,000"):
        decode_batch(zlib.compress(bytes(50_000_000)), 100_000)


def test_a_batch_that_only_grows_when_written_out_is_refused() -> None:
    prompt = list(range(20_000))
    body = encode_batch(one_group([sample(prompt, [1, i]) for i in range(50)]))
    assert len(body) < 100_000
    with pytest.raises(RequestTooLargeError, match="bytes of token ids"):
        decode_batch(body, 1_000_000)
    assert len(decode_batch(body, 5_000_000).samples) == 50


def test_another_safetensors_file_is_refused() -> None:
    data = array("B", b"abc")
    spec = TensorSpec(dtype="uint8", shape=[3], data_ptr=data.buffer_info()[0], data_len=3)
    with pytest.raises(InvalidRequestError, match="it holds weight"):
        decode_batch(zlib.compress(bytes(serialize({"weight": spec}))), LIMIT)


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_an_id_that_is_no_uint32_is_refused(bad: int) -> None:
    with pytest.raises(UntrainableError, match="Sample 1"):
        encode_batch(one_group([sample([1], [2]), sample([bad], [2])]))


def test_a_logprob_beyond_float32_is_refused() -> None:
    wild = Sample(prompt_ids=[1], completion_ids=[2], logprobs=[-1e300], policy="p/m@0")
    with pytest.raises(UntrainableError, match="float32"):
        encode_batch(one_group([wild]))


def test_a_batch_that_does_not_fit_together_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="2 rewards for 1 trajectories"):
        TrainBatch(groups=[TrainGroup(rewards=[0, 1], samples=[[0]])], samples=[sample([1], [2])])
    with pytest.raises(ValueError, match="not among the 1 sent"):
        TrainBatch(groups=[TrainGroup(rewards=[0], samples=[[1]])], samples=[sample([1], [2])])
    odd = Sample(prompt_ids=[], completion_ids=[1], logprobs=[0, 0], policy="p/m@0")
    with pytest.raises(ValueError, match="2 logprobs for 1"):
        TrainBatch(groups=[], samples=[odd])
