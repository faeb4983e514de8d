"""MCP-RL: an agent learns to use an MCP server, from nothing but the server.

    export OPENAI_API_KEY=...        # of the judge; OPENAI_BASE_URL for another than OpenAI's
    python examples/mcp_rl/train.py --judge gpt-5-mini --base-model Qwen/Qwen3-0.6B

The server's tools and resources say what tasks can be about; the judge's endpoint writes them.
Each attempt has a session with the server, over stdio. The reward is what the judge gives the
attempt, 0 to 1, beside the others at the same task (RULER).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

import art_cloud as art
from art_cloud.clusters.command_line import run
from art_cloud.demo import auto_settings, example_parser, prepare
from art_cloud.rewards.auto_rl import print_result

DESCRIPTION = "Keeps a list of things to do: does with it what it is asked to, and says what it did"
SERVER = [sys.executable, str(Path(__file__).with_name("server.py"))]
TASKS = Path("todo.jsonl")
STEPS = 20


async def main(options: argparse.Namespace) -> None:
    place = prepare(options)
    model = art.TrainableModel[Any](name=options.run, project="mcp-rl", base_model=place.base_model)
    async with place.cluster as backend:
        result = await art.auto(
            model,
            backend,
            DESCRIPTION,
            judge_model=options.judge,
            scenarios=TASKS,
            tools=art.MCPServer(SERVER),
            **auto_settings(options, STEPS),
        )
    print_result(result, Console(stderr=options.json))
    if options.json:
        print(json.dumps(result.summary()))


if __name__ == "__main__":
    parser = example_parser("mcp-rl", "An agent from an MCP server", STEPS)
    parser.add_argument("--judge", required=True, help="model that writes tasks and scores")
    run(main(parser.parse_args()))
