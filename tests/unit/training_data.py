"""Random batches for the training tests: shared prefixes, chains of turns, duplicates."""

from __future__ import annotations

import random
from dataclasses import replace

from art_server.training import Datum

VOCABULARY = 512


def random_batch(seed: int, *, samples: int = 10, longest: int = 24) -> list[Datum]:
    """Two groups' worth of samples, off policy by some noise; a forest of several temperatures."""
    rng = random.Random(seed)

    def ids(low: int, high: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(rng.randint(low, high))]

    prompts = [ids(1, longest) for _ in range(2)]
    temperatures = rng.choice([[1.0], [0.7, 1.0]])
    data: list[Datum] = []
    for number in range(rng.randint(2, samples)):
        earlier = rng.choice(data) if data else None
        kind = rng.choice(["group", "group", "turn", "cut", "duplicate", "alone"])
        if earlier is None or kind == "group":
            group = rng.randrange(2)
            datum = Datum(prompts[group], ids(1, longest), group=group, sequence=number)
        elif kind == "turn":  # the next call of a conversation
            prompt = earlier.prompt_ids + earlier.completion_ids + ids(0, 4)
            datum = replace(earlier, prompt_ids=prompt, completion_ids=ids(1, longest))
        elif kind == "cut":  # branches off in the middle of another sample
            whole = earlier.prompt_ids + earlier.completion_ids
            prompt = whole[: rng.randint(1, len(whole))]
            datum = Datum(prompt, ids(1, longest), group=earlier.group, sequence=number)
        elif kind == "duplicate":
            datum = replace(earlier, sequence=number)
        else:
            datum = Datum(ids(1, longest), ids(1, longest), group=2, sequence=number)
        data.append(replace(datum, temperature=rng.choice(temperatures)))
    return [
        replace(
            datum,
            logprobs=[-6.2 + rng.gauss(0, 0.4) for _ in datum.completion_ids],
            advantage=rng.choice([0.0, rng.gauss(0, 1), rng.gauss(0, 1)]),
        )
        for datum in data
    ]
