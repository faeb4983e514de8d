"""Wall time of a step: the blocking loop against the pipeline, one step off policy.

The same server, model and work for both, in turns: groups of rollouts that sample, wait for a tool
as agents do, and sample again. `ours` is the pipeline's seconds per step (the median of
runs), `peer` the blocking loop's: the same code with `max_steps_off_policy=0`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median
from typing import Any

from art_server.tiny_model import make_tiny_model
from harness import report

import art_cloud as art

GROUPS, GROUP_SIZE, TOKENS = 4, 8, 32


async def rollout(model: art.TrainableModel[Any], number: int, tool: float) -> art.Trajectory:
    client = model.openai_client()
    items: list[Any] = []
    for turn in ("Look at it", "And now"):
        items.append({"role": "user", "content": f"{turn}: task {number}."})
        answer = await client.chat.completions.create(
            model=model.get_inference_name(),
            messages=art.History(messages_and_choices=items).messages(),
            max_tokens=TOKENS,
            extra_body={"ignore_eos": True},
        )
        items.append(answer.choices[0])
        await asyncio.sleep(tool)
    sample = items[-1].sample
    return art.Trajectory(
        messages_and_choices=items,
        reward=sum(token % 2 == 0 for token in sample["completion_ids"]) / TOKENS,
    )


async def seconds_per_step(
    backend: art.Backend, base_model: str, name: str, off_policy: int, steps: int, tool: float
) -> float:
    """The mean over one run."""
    model = art.TrainableModel(name=name, project="bench", base_model=base_model)
    await model.register(backend)

    def group(model: art.TrainableModel[Any], number: int) -> art.TrajectoryGroup:
        return art.TrajectoryGroup(rollout(model, number, tool) for _ in range(GROUP_SIZE))

    async def endless() -> AsyncIterator[int]:
        number = 0
        while True:
            yield number
            number += 1

    pipeline = art.PipelineTrainer(
        model,
        backend,
        group,
        endless(),
        groups_per_step=GROUPS,
        max_steps_off_policy=off_policy,
        max_steps=steps,
    )
    started = time.perf_counter()
    await pipeline.train()
    return (time.perf_counter() - started) / steps


async def main(rounds: int, steps: int, tool: float) -> None:
    blocking: list[float] = []
    overlapped: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ART_CLOUD_HOME"] = f"{folder}/home"
        base_model = str(make_tiny_model(Path(folder) / "model"))
        async with art.up("local", name="bench-pipeline", base_model=base_model) as backend:
            for number in range(rounds + 1):
                for off_policy, found in ((0, blocking), (1, overlapped)):
                    name = f"round-{number}-{off_policy}"
                    found.append(
                        await seconds_per_step(backend, base_model, name, off_policy, steps, tool)
                    )
    blocking, overlapped = blocking[1:], overlapped[1:]  # the first round warms up
    for label, found in (("blocking", blocking), ("one step off policy", overlapped)):
        print(label, [round(value, 3) for value in found], file=sys.stderr)
    report(
        "pipeline",
        ours=round(median(overlapped), 3),
        peer=round(median(blocking), 3),
        peer_name="blocking loop",
        ratio=median(blocking) / median(overlapped),
        unit="s/step",
        tool_seconds=tool,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tool", type=float, default=0.3, help="seconds that a tool takes")
    options = parser.parse_args()
    os.environ["ART_PROGRESS"] = "0"
    asyncio.run(main(options.rounds, options.steps, options.tool))
