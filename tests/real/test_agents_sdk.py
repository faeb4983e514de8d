"""OpenAI's Agents SDK, as it is, through recorded sessions: tools, a handoff, streams."""

from __future__ import annotations

import json
from typing import Any

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    RunConfig,
    Runner,
    function_tool,
    handoff,
)
from agents.models.chatcmpl_converter import Converter

import art_cloud as art
from art_cloud.rollouts.trajectory import is_choice


@function_tool
def search(query: str) -> str:
    """Search the text"""
    return f"A {query}."


def call(id: str, name: str, arguments: str) -> Any:
    function = {"name": name, "arguments": arguments}
    tool_call = {"id": id, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [tool_call]}


def result(id: str, content: str) -> Any:
    return {"role": "tool", "tool_call_id": id, "content": content}


QUESTION: Any = {"role": "user", "content": "Look it up."}
HAND_ON = call("call_1", "transfer_to_librarian", "{}")
DESK: Any = [{"role": "system", "content": "You hand on."}, QUESTION, HAND_ON]
LIBRARIAN: Any = [
    {"role": "system", "content": "You search."},
    QUESTION,
    HAND_ON,
    result("call_1", '{"assistant": "Librarian"}'),
    call("call_2", "search", '{"query": "fox"}'),
    result("call_2", "A fox."),
    {"role": "assistant", "content": "It is a fox."},
]
DESK_TOOLS: Any = [Converter.convert_handoff_tool(handoff(Agent(name="Librarian")))]
LIBRARIAN_TOOLS: Any = [Converter.tool_to_openai(search)]
"""What the model is taught, with the tools as the SDK declares them."""


async def run(trajectory: art.RecordedTrajectory, *, streamed: bool) -> str:
    """A script for the SDK, which knows an address and a key; what its agents answer."""
    async with openai.AsyncOpenAI(
        base_url=trajectory.base_url, api_key=trajectory.api_key
    ) as client:
        shared: Any = {
            "model": OpenAIChatCompletionsModel("gpt-5-mini", client),
            "model_settings": ModelSettings(temperature=0, max_tokens=60),
        }
        librarian = Agent(name="Librarian", instructions="You search.", tools=[search], **shared)
        desk = Agent(name="Desk", instructions="You hand on.", handoffs=[librarian], **shared)
        config = RunConfig(tracing_disabled=True)
        if not streamed:
            return str((await Runner.run(desk, "Look it up.", run_config=config)).final_output)
        stream = Runner.run_streamed(desk, "Look it up.", run_config=config)
        async for _ in stream.stream_events():
            pass
        return str(stream.final_output)


def shape(history: art.History) -> list[str]:
    """The roles of a conversation, those that the model said as `choice`."""
    return ["choice" if is_choice(m) else m["role"] for m in history.messages_and_choices]


async def test_tools_and_a_handoff_are_recorded_and_trained_on(
    backend: art.Backend, model: art.TrainableModel[Any]
) -> None:
    await backend.train_sft(
        model,
        [
            art.Trajectory(messages_and_choices=DESK, tools=DESK_TOOLS),
            art.Trajectory(messages_and_choices=LIBRARIAN, tools=LIBRARIAN_TOOLS),
        ],
        art.SFTConfig(learning_rate=5e-3, epochs=20, schedule="constant"),
    )
    group = art.TrajectoryGroup([])
    for streamed in (False, True):
        async with model.record() as trajectory:
            assert await run(trajectory, streamed=streamed) == "It is a fox."
        trajectory.reward = float(streamed)
        group.trajectories.append(trajectory)
        [librarian] = trajectory.additional_histories
        assert shape(trajectory) == ["system", "user", "choice"]
        assert shape(librarian) == [
            *("system", "user", "assistant", "tool"),
            *("choice", "tool", "choice"),
        ]
        assert (trajectory.tools, librarian.tools) == (DESK_TOOLS, LIBRARIAN_TOOLS)
        [asked] = json.loads(librarian.messages_and_choices[4].message.model_dump_json())[
            "tool_calls"
        ]
        assert asked["function"] == {"name": "search", "arguments": '{"query": "fox"}'}
        first, second, third = trajectory.samples()
        whole = second.prompt_ids + second.completion_ids
        assert third.prompt_ids[: len(whole)] == whole
        assert first.prompt_ids != second.prompt_ids
    trained = await backend.train(model, [group])
    assert trained.metrics["samples"] == 6
    assert trained.metrics["kl_sampler"] < 1e-8
