"""AutoRL: a sentence and a file of tools, and no reward function.

    export OPENAI_API_KEY=...        # of the judge; OPENAI_BASE_URL for another than OpenAI's
    python examples/auto_rl/train.py --judge gpt-5-mini --base-model Qwen/Qwen3-0.6B

The judge's endpoint writes tasks about the warehouse, the agent works on them, and the reward is
what the judge gives each attempt, 0 to 1, beside the others at the same task (RULER). At the end it
compares the trained weights with the first ones, blind, on tasks that were held out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

import art_cloud as art
from art_cloud.clusters.command_line import run
from art_cloud.demo import auto_settings, example_parser, prepare
from art_cloud.rewards.auto_rl import print_result

DESCRIPTION = (
    "Answers questions about what a warehouse holds. Looks up every number with the tools, in as "
    "few calls as it can, and answers in one short sentence."
)
TOOLS = Path(__file__).with_name("warehouse.py")
TASKS = Path("warehouse.jsonl")
STEPS = 20


async def main(options: argparse.Namespace) -> None:
    place = prepare(options)
    model = art.TrainableModel[Any](
        name=options.run, project="auto-rl", base_model=place.base_model
    )
    async with place.cluster as backend:
        result = await art.auto(
            model,
            backend,
            DESCRIPTION,
            judge_model=options.judge,
            scenarios=TASKS,
            tools=art.FunctionTools.load(TOOLS),
            **auto_settings(options, STEPS),
        )
    print_result(result, Console(stderr=options.json))
    if options.json:
        print(json.dumps(result.summary()))


if __name__ == "__main__":
    parser = example_parser("auto-rl", "An agent from a sentence and a file of tools", STEPS)
    parser.add_argument("--judge", required=True, help="model that writes tasks and scores")
    run(main(parser.parse_args()))
