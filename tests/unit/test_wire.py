"""The batch codec: exact both ways, small, and never trusting."""

from __future__ import annotations

import json
import random
import struct
import subprocess
import sys
from array import array
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import TensorSpec, serialize
from zstandard import ZstdCompressor

from art_cloud.shared.config import TrainConfig
from art_cloud.shared.errors import InvalidRequestError, RequestTooLargeError, UntrainableError
from art_cloud.shared.protocol import Sample, TrainGroup
from art_cloud.shared.wire import (
    VALUE_BYTES,
    TrainBatch,
    _compress,
    _decompress,
    _pack,
    decode_batch,
    encode_batch,
)

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
    back = decode_batch(encode_batch(batch), LIMIT).unpack()
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
        back = decode_batch(bytes(body), LIMIT).unpack()
    except InvalidRequestError:
        return
    assert back == batch  # flips that undid each other, or of the header's level hint


@quick
@given(batches(), st.data())
def test_a_damaged_file_in_a_sound_stream_never_breaks_the_decoder(
    batch: TrainBatch, data: st.DataObject
) -> None:
    file = bytearray(_decompress(encode_batch(batch), LIMIT))
    for _ in range(data.draw(st.integers(1, 3))):
        file[data.draw(st.integers(0, len(file) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        back = decode_batch(_compress(bytes(file)), LIMIT)
    except InvalidRequestError:
        return
    assert all(len(s.completion_ids) == len(s.logprobs) for s in back.samples)


@quick
@given(st.binary(max_size=200))
def test_garbage_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        decode_batch(body, LIMIT)
    with pytest.raises(InvalidRequestError):
        decode_batch(_compress(body), LIMIT)


def sample(prompt: list[int], completion: list[int]) -> Sample:
    logprobs = [-0.5] * len(completion)
    return Sample(prompt_ids=prompt, completion_ids=completion, logprobs=logprobs, policy="p/m@3")


def one_group(drawn: list[Sample]) -> TrainBatch:
    group = TrainGroup(rewards=[0.0] * len(drawn), samples=[[i] for i in range(len(drawn))])
    return TrainBatch(groups=[group], samples=drawn)


def test_what_samples_share_is_written_once() -> None:
    """A prompt, the turns of a conversation and rollouts of one prompt, wherever they are."""
    numbers = random.Random(0)
    prompt, other = ([numbers.randrange(2**32) for _ in range(n)] for n in (5_000, 1 << 20))
    first, tool = [7, 8, 9], [200, 201]
    drawn = [
        sample(prompt, first),
        sample(other, [6]),  # of something else, in between
        sample(prompt + first + tool, [1, 2]),  # the next turn
        sample(prompt, [7, 8, 10]),  # another rollout of the same prompt
    ]
    once = 4 * (len(prompt) + len(other))
    assert once < len(encode_batch(one_group(drawn))) < once + 2_000


@pytest.mark.parametrize("cut", [0, 1, 2, 20, -1, -4])
def test_a_truncated_body_says_so(cut: int) -> None:
    body = encode_batch(one_group([sample([1, 2], [3])]))
    with pytest.raises(InvalidRequestError, match="ends in the middle"):
        decode_batch(body[:cut], LIMIT)


def test_trailing_bytes_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="goes on after"):
        decode_batch(encode_batch(one_group([sample([1], [2])])) + b"x", LIMIT)


def test_a_bomb_is_refused_at_the_limit() -> None:
    bomb = _compress(bytes(50_000_000))
    assert len(bomb) < 10_000
    with pytest.raises(RequestTooLargeError, match="takes 100,000"):
        decode_batch(bomb, 100_000)


def test_a_bomb_that_does_not_say_its_size_or_says_a_wrong_one_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="could not determine content size"):
        decode_batch(ZstdCompressor(write_content_size=False).compress(bytes(50_000_000)), LIMIT)
    bomb = bytearray(_compress(bytes(50_000_000)))
    assert bomb[5:9] == (50_000_000).to_bytes(4, "little")
    bomb[5:9] = (100).to_bytes(4, "little")
    with pytest.raises(InvalidRequestError, match="damaged"):
        decode_batch(bytes(bomb), LIMIT)


def test_a_batch_that_only_grows_when_written_out_is_refused() -> None:
    prompt = list(range(20_000))
    body = encode_batch(one_group([sample(prompt, [1, i]) for i in range(50)]))
    assert len(body) < 100_000
    with pytest.raises(RequestTooLargeError, match="bytes of token ids"):
        decode_batch(body, 1_000_000)
    assert len(decode_batch(body, 5_000_000).samples) == 50


MEASURE = """
import re, sys
from pathlib import Path
from art_cloud.shared.errors import InvalidRequestError
from art_cloud.shared.wire import TrainBatch, decode_batch, encode_batch


def most() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search("VmHWM:[^0-9]*([0-9]+) kB", status)[1]) << 10

decode_batch(encode_batch(TrainBatch(groups=[], samples=[])), 1 << 20)  # all is imported
body = Path(sys.argv[1]).read_bytes()
before = most() - len(body)
try:
    batch = decode_batch(body, int(sys.argv[2]))
    print("decoded", end=" ")
except InvalidRequestError:
    print("refused", end=" ")
print(most() - before)
"""


def body_of(header: bytes, ids: bytes = b"", logprobs: bytes = b"") -> bytes:
    return _compress(_pack({"header": header, "ids": ids, "logprobs": logprobs}))


def header_of(entries: list[list[int]], groups: str = "") -> bytes:
    fields = ("prompt", "completion", "policy", "temperature")
    rows = [dict(zip(fields, (*row, 0, 1), strict=True)) for row in entries]
    start = json.dumps({"entries": rows, "policies": ["p/m@0"], "config": {}, "metrics": {}})
    return f'{start[:-1]}, "groups": [{groups}]}}'.encode()


def large(limit: int, kind: str) -> bytes:
    words = (limit // 4 - (1 << 19)) // 64000 * 64000
    match kind:
        case "as many ids as there may be, all different":
            ids = random.Random(0).randbytes(words * 4)
            return body_of(header_of([[words // 64, 0]] * 64), ids)
        case "as many ids and logprobs as there may be":
            ids, logprobs = random.Random(0).randbytes(words * 2), bytes(words * 2)
            return body_of(header_of([[0, words // 128]] * 64), ids, logprobs)
        case "a small body, written out":
            n = 1000
            prompt = random.Random(0).randbytes(words // n * 4)
            return body_of(header_of([[words // n, 0]] * n), prompt * n)
        case "many small values":
            group = '{"rewards":[0.5],"samples":[[]]},'
            return body_of(header_of([], group * (limit // 50)).replace(b",]", b"]"))
        case "as many values as there may be":
            group = '{"rewards":[0.5],"samples":[[]],"metadata":[{"a":{"b":[]}}]},'
            many = limit // VALUE_BYTES // 18
            return body_of(header_of([], group * many).replace(b",]", b"]"))
        case _:
            return body_of(header_of([[0, 0]] * (limit // VALUE_BYTES // 10)))


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [
        ("as many ids as there may be, all different", "decoded"),
        ("as many ids and logprobs as there may be", "decoded"),
        ("a small body, written out", "decoded"),
        ("many small values", "refused"),
        ("as many values as there may be", "decoded"),
        ("as many samples as there may be", "decoded"),
    ],
)
def test_what_a_batch_takes_is_bounded_by_the_limit(
    tmp_path: Path, kind: str, outcome: str
) -> None:
    limit = 64 << 20
    (tmp_path / "body").write_bytes(large(limit, kind))
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "body"), str(limit)],
        capture_output=True,
        text=True,
        check=True,
    )
    said, taken = done.stdout.split()
    assert said == outcome
    print(f"{kind}: {int(taken) / limit:.2f}")
    assert int(taken) < 4 * limit


def test_another_safetensors_file_is_refused() -> None:
    data = array("B", b"abc")
    spec = TensorSpec(dtype="uint8", shape=[3], data_ptr=data.buffer_info()[0], data_len=3)
    with pytest.raises(InvalidRequestError, match="it holds weight"):
        decode_batch(_compress(bytes(serialize({"weight": spec}))), LIMIT)


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
