"""A ReAct agent in LangGraph, recorded as it is, learns which tool a question is for.

    python examples/langgraph_agent/train.py --control
    python examples/langgraph_agent/train.py --provider ssh -o host=gpu --base-model Qwen/Qwen3-4B

The agent answers questions about a shop by two tools. The reward is 0.25 for calling the right tool
first, 0.25 for the right item in that call, and 0.5 more for an answer that is the right number.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

import httpx
from langchain_core.messages import AIMessage, SystemMessage
from langchain_core.tools import BaseTool, tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from pydantic import SecretStr

import art_cloud as art
from art_cloud.demo import Experiment, run_example

SYSTEM = "Look it up. Then answer with the number."
QUESTIONS = {"price": "What does {} cost?", "stock": "How much {} is left?"}
ITEMS = ("tea", "rice", "salt")
GROUPS = 12
STEPS = 20
WARM_UP = 1500
HELD_OUT = range(1_000_000, 1_000_200)
HTTP = httpx.AsyncClient(timeout=600, trust_env=False)
"""What all agents call the server with."""


@dataclass(frozen=True)
class Shop:
    """Its prices, its stock and the question about it are a function of the seed."""

    seed: int

    @property
    def call(self) -> tuple[str, str]:
        """The tool and the item that the question is about."""
        chance = random.Random(self.seed)  # noqa: S311
        return chance.choice(sorted(QUESTIONS)), chance.choice(ITEMS)

    @property
    def question(self) -> str:
        name, item = self.call
        return QUESTIONS[name].format(item)

    def number(self, name: str, item: str) -> int:
        return random.Random(f"{self.seed} {name} {item}").randint(1, 9)  # noqa: S311

    def tools(self) -> list[BaseTool]:
        @tool
        def price(item: str) -> int:
            """The price."""
            return self.number("price", item)

        @tool
        def stock(item: str) -> int:
            """What is left."""
            return self.number("stock", item)

        return [price, stock]


async def answer(shop: Shop, llm: ChatOpenAI) -> tuple[list[tuple[str, str]], str]:
    """The agent as it could be anywhere: what it looked up, and what it answered."""
    tools = shop.tools()
    knows_tools = llm.bind_tools(tools)

    async def think(state: MessagesState) -> dict[str, Any]:
        said = await knows_tools.ainvoke([SystemMessage(SYSTEM), *state["messages"]])
        return {"messages": [said]}

    graph = StateGraph(MessagesState).add_node("think", think).add_node("tools", ToolNode(tools))
    graph.add_edge(START, "think").add_edge("tools", "think")
    agent = graph.add_conditional_edges("think", tools_condition).compile()
    try:
        state = await agent.ainvoke({"messages": [("user", shop.question)]}, {"recursion_limit": 6})
    except GraphRecursionError:
        return [], ""
    said = [message for message in state["messages"] if isinstance(message, AIMessage)]
    calls = [
        (call["name"], str(call["args"].get("item"))) for one in said for call in one.tool_calls
    ]
    return calls, str(said[-1].content).strip(" .\n")


async def rollout(
    model: art.TrainableModel[Any], seed: int, *, step: int | None = None
) -> art.Trajectory:
    shop = Shop(seed)
    async with model.record(step=step) as trajectory:
        llm = ChatOpenAI(
            model="gpt-5-mini",
            base_url=trajectory.base_url,
            api_key=SecretStr(trajectory.api_key),
            http_async_client=HTTP,
            max_completion_tokens=48,
            seed=None if step is None else seed,
        )
        calls, text = await answer(shop, llm)
    name, item = calls[0] if calls else ("", "")
    right_tool, right_item = name == shop.call[0], item == shop.call[1]
    looked_up = right_tool and right_item
    right = looked_up and text == str(shop.number(*shop.call))
    trajectory.reward = 0.25 * right_tool + 0.25 * right_item + 0.5 * right
    trajectory.metrics |= {
        "looked_up": looked_up,
        "right_tool": right_tool,
        "right_item": right_item,
        "right": right,
        "tool_calls": len(calls),
    }
    return trajectory


def warm_up(seed: int) -> art.Trajectory:
    """The format, and a little of the skill: every second call is the right one, the others are
    any. It answers with what it read."""
    shop, chance = Shop(seed), random.Random(~seed)  # noqa: S311
    any_call = chance.choice(sorted(QUESTIONS)), chance.choice(ITEMS)
    name, item = chance.choice((any_call, shop.call))
    found = str(shop.number(name, item))
    function = {"name": name, "arguments": json.dumps({"item": item})}
    call: Any = {"id": "call_1", "type": "function", "function": function}
    tools: Any = [convert_to_openai_tool(one) for one in shop.tools()]
    return art.Trajectory(
        messages_and_choices=[
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": shop.question},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": found},
            {"role": "assistant", "content": found},
        ],
        tools=tools,
    )


EXPERIMENT = Experiment(
    name="langgraph-agent",
    measure="looked_up",
    rollout=rollout,
    tasks=lambda number: range(number * GROUPS, (number + 1) * GROUPS),
    held_out=HELD_OUT,
    warm_up=[warm_up(-seed - 1) for seed in range(WARM_UP)],
    warm_up_config=art.SFTConfig(learning_rate=3e-3, batch_size=4),
    config=art.TrainConfig(learning_rate=1.5e-3),
    steps=STEPS,
)

if __name__ == "__main__":
    run_example(EXPERIMENT, "A LangGraph agent that looks things up")
