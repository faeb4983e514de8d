"""An agent that answers questions from a mailbox with tools: search, read, answer.

Reward, of 1: 0.2 the right mail was among the hits of a search, 0.2 it was read, 0.4 the answer is
right, 0.1 it names the right mail as its source, 0.1 all of that in three turns. With `--judge` a
language model compares the attempts instead (RULER).

    python examples/email_agent/train.py --control
"""

from __future__ import annotations

import json
import random
from collections.abc import Awaitable
from dataclasses import replace
from functools import partial
from typing import Any

from inbox import HITS, HOURS, TOOLS, TOPICS, Desk, Mailbox

import art_cloud as art
from art_cloud.demo import Experiment, experiment_parser, run_example

NAME, TITLE, STEPS = "email-agent", "Email agent", 24
GROUPS = 8
WARM_UP = 1500
HELD_OUT = range(1_000_000, 1_000_200)
MAX_TURNS = 5
WORDS = [word for word, _ in TOPICS.values()]
WAYS = [*["search read answer"] * 3, "search search read answer", "search answer"]
WEIGHTS = {"found": 0.2, "read": 0.2, "right": 0.4, "source": 0.1, "quick": 0.1}


async def rollout(
    model: art.TrainableModel[Any], seed: int, *, step: int | None = None
) -> art.Trajectory:
    desk = Desk(Mailbox(seed))
    trajectory = await art.run_agent(
        model,
        desk.mailbox.question,
        desk,
        step=step,
        max_turns=MAX_TURNS,
        max_tokens=1000,
        until="answer",
    )
    done = desk.done(int(trajectory.metrics["turns"]))
    credit = sum(weight * done[name] for name, weight in WEIGHTS.items())
    trajectory.reward = credit
    trajectory.metrics |= {"credit": credit} | done
    return trajectory


def judged(judge: str, group: art.TrajectoryGroup) -> Awaitable[art.TrajectoryGroup]:
    """The rewards of a group by RULER. The judge sees the tools, the calls and what they gave."""
    return art.ruler_score_group(group, judge)


def clumsy_work(seed: int) -> art.Trajectory:
    """The format, and a little of the skill: it searches for the person and, every second time, the
    right word, reads any of the hits, answers with the hour that it read, and names any hit."""
    chance = random.Random(seed)  # noqa: S311
    mailbox = Mailbox(seed)
    desk = Desk(mailbox)
    messages: list[Any] = [{"role": "user", "content": mailbox.question}]

    def call(name: str, **arguments: str | int) -> str:
        text = desk.act(name, arguments).text
        function = {"name": name, "arguments": json.dumps(arguments)}
        call = {"id": f"call-{len(messages)}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        return text

    hour = chance.choice(HOURS)
    for action in chance.choice(WAYS).split():
        hit = chance.randint(1, HITS)
        if action == "search":
            word = chance.choice((mailbox.wanted.subject, chance.choice(WORDS)))
            call("search", query=f"{mailbox.wanted.sender} {word}")
        elif action == "read":
            hour = call("read", hit=hit).removesuffix(".")[-1]
        else:
            call("answer", text=hour, hit=hit)
    return art.Trajectory(messages_and_choices=messages[:-1], tools=TOOLS)


email_agent: Experiment[int] = Experiment(
    name=NAME,
    measure="credit",
    rollout=rollout,
    tasks=lambda number: range(number * GROUPS, (number + 1) * GROUPS),
    held_out=HELD_OUT,
    warm_up=[clumsy_work(-seed) for seed in range(1, WARM_UP + 1)],
    warm_up_config=art.SFTConfig(learning_rate=3e-3, batch_size=4),
    config=art.TrainConfig(learning_rate=1.5e-3),
    steps=STEPS,
)


if __name__ == "__main__":
    parser = experiment_parser(NAME, TITLE, STEPS)
    parser.add_argument("--judge", help="a model that compares the attempts (RULER): gpt-5-mini")
    options = parser.parse_args()
    if options.judge:
        email_agent = replace(email_agent, score=partial(judged, options.judge))
    run_example(email_agent, TITLE, options)
