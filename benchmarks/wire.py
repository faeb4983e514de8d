"""Bytes and seconds to ship a train call's trajectories: art-cloud's wire against OpenAI objects.

Shipped are 64 trajectories of 4,000 tokens each with the logprobs of what was sampled, in 8 groups
of 8 that share a prompt:

    half of the groups   a prompt of 1,000 tokens, then one completion of 3,000
    the other half       a prompt of 400 tokens, then 6 turns of 500 sampled tokens, and between
                         them 5 tool results of 120 tokens; each turn is a request of its own that
                         begins with all that came before

The peer is what a vLLM server answers and OpenPipe ART ships: for each trajectory its messages
(text) and its `openai` Choice objects with `logprobs.content` (token, bytes, logprob,
top_logprobs), as JSON written by pydantic. It carries neither the prompt's ids nor the sampled ids;
ours carries both, exactly, and the logprobs as the same float32.

Token ids are drawn from a Zipf-Mandelbrot distribution over 150,000 ids, as of a BPE vocabulary,
and each id stands for a text of 1 to 8 letters, the more frequent the shorter. Logprobs are
float32, with many close to 0, as a sampler's are. `worst_case` is 64 completions of 4,000 tokens
that share nothing, one for each trajectory, without a prompt.

The last line is one JSON object; `ratio` is the peer's bytes over ours, `peer_gzip` its bytes
had it been compressed too. Seconds are of the fastest of several runs, both sides in turn.
"""

from __future__ import annotations

import gzip
import random
import struct
import time
from bisect import bisect
from collections.abc import Callable
from itertools import accumulate
from typing import Any

from harness import report
from openai.types.chat.chat_completion import Choice
from pydantic import BaseModel, TypeAdapter

from art_cloud.shared.protocol import Sample, TrainGroup
from art_cloud.shared.wire import TrainBatch, decode_batch, encode_batch

VOCABULARY = 150_000
GROUPS, GROUP_SIZE, TOKENS = 8, 8, 4_000
ROUNDS = 3
LIMIT = 1 << 30


class PeerTrajectory(BaseModel):
    """What stands for a trajectory on the peer's side."""

    messages_and_choices: list[Choice | dict[str, Any]]
    reward: float


PEER = TypeAdapter(list[PeerTrajectory])


class Language:
    """Draws ids, their texts and their logprobs."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.cumulative = list(accumulate(1 / (rank + 2.7) for rank in range(VOCABULARY)))
        letters = "abcdefghijklmnopqrstuvwxyz"
        lengths = [min(8, max(1, len(f"{rank:b}") // 2)) for rank in range(VOCABULARY)]
        self.texts = [" " + "".join(self.random.choices(letters, k=length)) for length in lengths]

    def ids(self, count: int) -> list[int]:
        total = self.cumulative[-1]
        return [bisect(self.cumulative, self.random.random() * total) for _ in range(count)]

    def logprobs(self, count: int) -> list[float]:
        """Half of the tokens are all but certain, as they are to a large model."""
        draws = (
            -self.random.expovariate(1) * 10 ** self.random.choice((-6, -4, -2, -1, 0, 0, 0, 0.3))
            for _ in range(count)
        )
        return list(struct.unpack(f"{count}f", struct.pack(f"{count}f", *draws)))

    def text(self, ids: list[int]) -> str:
        return "".join(self.texts[id] for id in ids)

    def choice(self, ids: list[int], logprobs: list[float]) -> Choice:
        content = [
            {
                "token": self.texts[id],
                "bytes": list(self.texts[id].encode()),
                "logprob": logprob,
                "top_logprobs": [],
            }
            for id, logprob in zip(ids, logprobs, strict=True)
        ]
        return Choice.model_validate(
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": self.text(ids)},
                "logprobs": {"content": content},
            }
        )


Turns = list[tuple[int, int]]
"""For each turn: tokens of its new input, and tokens sampled."""
ONE_TURN: Turns = [(1_000, 3_000)]
MANY_TURNS: Turns = [(400, 500)] + [(120, 500)] * 5
NOTHING_SHARED: Turns = [(0, 4_000)]


def make(language: Language, plan: list[Turns]) -> tuple[TrainBatch, list[PeerTrajectory]]:
    """The same trajectories, for both sides: a group of GROUP_SIZE for each of `plan`."""
    groups, samples, peers = [], [], []
    for turns in plan:
        assert sum(map(sum, turns)) == TOKENS
        prompt = language.ids(turns[0][0])
        group = TrainGroup(rewards=[], samples=[])
        for _ in range(GROUP_SIZE):
            history, messages, numbers = list[int](), list[Choice | dict[str, Any]](), list[int]()
            for turn, (given, sampled) in enumerate(turns):
                new = prompt if turn == 0 else language.ids(given)
                ids, logprobs = language.ids(sampled), language.logprobs(sampled)
                history = history + new
                numbers.append(len(samples))
                samples.append(
                    Sample(
                        prompt_ids=history,
                        completion_ids=ids,
                        logprobs=logprobs,
                        policy="project/agent@17",
                    )
                )
                role = "user" if turn == 0 else "tool"
                messages += [{"role": role, "content": language.text(new)}]
                messages += [language.choice(ids, logprobs)]
                history = history + ids
            reward = language.random.random()
            group.rewards.append(reward)
            group.samples.append(numbers)
            peers.append(PeerTrajectory(messages_and_choices=messages, reward=reward))
        groups.append(group)
    return TrainBatch(groups=groups, samples=samples), peers


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def one_round(batch: TrainBatch, peers: list[PeerTrajectory]) -> tuple[float, ...]:
    """Seconds: ours to encode and decode, the peer's to encode and decode."""
    ours_encode, body = timed(lambda: encode_batch(batch))
    peer_encode, json = timed(lambda: PEER.dump_json(peers))
    ours_decode, back = timed(lambda: decode_batch(body, LIMIT))
    peer_decode, peer_back = timed(lambda: PEER.validate_json(json))
    assert back.unpack() == batch
    assert len(peer_back) == len(peers)
    return ours_encode, ours_decode, peer_encode, peer_decode


def main() -> None:
    language = Language()
    batch, peers = make(language, [ONE_TURN, MANY_TURNS] * (GROUPS // 2))
    seconds = [
        min(each) for each in zip(*(one_round(batch, peers) for _ in range(ROUNDS)), strict=True)
    ]
    body, json = encode_batch(batch), PEER.dump_json(peers)

    worst_batch, worst_peers = make(language, [NOTHING_SHARED] * GROUPS)
    worst_ours = len(encode_batch(worst_batch))
    worst_peer = len(PEER.dump_json(worst_peers))

    report(
        "wire",
        ours=len(body),
        peer=len(json),
        peer_name="JSON of openai Choice objects with logprobs (pydantic)",
        ratio=len(json) / len(body),
        unit="bytes",
        trajectories=GROUPS * GROUP_SIZE,
        tokens=GROUPS * GROUP_SIZE * TOKENS,
        requests=len(batch.samples),
        peer_gzip=len(gzip.compress(json, 6)),
        seconds_ours={"encode": round(seconds[0], 3), "decode": round(seconds[1], 3)},
        seconds_peer={"encode": round(seconds[2], 3), "decode": round(seconds[3], 3)},
        worst_case={
            "ours": worst_ours,
            "peer": worst_peer,
            "ratio": round(worst_peer / worst_ours, 2),
        },
    )


if __name__ == "__main__":
    main()
