"""MCP-RL: real MCP servers over both transports, and the real art-server that trains."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import art_cloud as art

from ..rigs import mcp_notes
from ..rigs.openai_server import KEY, Answer, Shown, either, generate, judge_by, openai_server
from ..unit.stand_in import serve

COMMAND = [sys.executable, mcp_notes.__file__]


@pytest.fixture
def url() -> Iterator[str]:
    with serve(mcp_notes.make_server().streamable_http_app(), lifespan="on") as url:
        yield f"{url}/mcp"


@pytest.fixture(params=["stdio", "http"])
def notes(request: pytest.FixtureRequest) -> art.MCPServer:
    if request.param == "stdio":
        return art.MCPServer(COMMAND)
    return art.MCPServer(request.getfixturevalue("url"), headers={"X-Test": "1"})


async def test_tools_and_resources(notes: art.MCPServer) -> None:
    assert await notes.instructions() == "Keeps notes."
    async with notes.session() as session:
        tools: Any = session.tools
        assert [tool["function"]["name"] for tool in tools] == ["read", "notes_write", "crash"]
        assert tools[0]["function"]["description"] == "Read a note."
        assert tools[0]["function"]["parameters"]["required"] == ["title"]
        assert await session.call("read", {"title": "fox"}) == ("The fox is quick.", False)
        note = {"title": "dog", "text": "It is lazy."}
        assert await session.call("notes_write", {"note": note}) == ("2 notes", False)
        assert await session.call("read", {"title": "dog"}) == ("It is lazy.", False)
        for name, arguments in (("read", {"title": "cat"}), ("read", {}), ("none", {})):
            result = await session.call(name, arguments)
            assert result.failed
            assert result.text
        [titles] = await session.resources()
        assert titles == "titles (notes://titles) All titles.\nfox\ndog"


async def test_what_a_rollout_raises_comes_out_as_it_is(notes: art.MCPServer) -> None:
    with pytest.raises(ZeroDivisionError):
        async with notes.session():
            raise ZeroDivisionError


async def test_a_server_that_ends_fails_the_rollout() -> None:
    with pytest.raises(art.ServerUnavailableError, match="closed the connection"):
        async with art.MCPServer(COMMAND).session() as session:
            await session.call("crash", {})


@pytest.mark.parametrize(
    "server", [["/nowhere/at-all"], [sys.executable, "-c", "0"], "http://127.0.0.1:9/mcp"]
)
async def test_a_server_that_is_not_there_is_named(server: Any) -> None:
    with pytest.raises(art.ServerUnavailableError, match=r"The MCP server .* does not answer"):
        async with art.MCPServer(server).session():
            pass


def test_what_cannot_be_meant_is_refused() -> None:
    for wrong in ("npx server", [], "ftp://there"):
        with pytest.raises(art.ConfigError):
            art.MCPServer(wrong)
    with pytest.raises(art.ConfigError, match="Headers"):
        art.MCPServer("http://example.com/mcp", headers={"Authorization": "Bearer secret"})
    assert "pass" not in str(art.MCPServer("https://me:pass@example.com/mcp"))


async def test_an_agent_works_with_the_tools(notes: art.MCPServer) -> None:
    script = [
        Answer("Let me see.", calls=[("read", '{"title": "fox"}'), ("read", '{"title": "cat"}')]),
        Answer(calls=[("read", "{"), ("read", "[]")]),
        Answer("It is quick."),
    ]
    with openai_server(lambda body: Answer(calls=[("read", "{}")]), *script) as policy:
        model = art.Model(
            name="m", project="p", inference_base_url=policy.url, inference_api_key=KEY
        )
        async with notes.session() as session:
            trajectory = await art.run_agent(model, "How is the fox?", session, system="Be brief.")
            endless = await art.run_agent(model, "Go on.", session, max_turns=3)
        await model.close()
    roles = [message["role"] for message in trajectory.messages()]
    assert roles == [
        *("system", "user", "assistant", "tool", "tool", "assistant", "tool", "tool", "assistant")
    ]
    results = [str(m["content"]) for m in trajectory.messages() if m["role"] == "tool"]
    assert results[0] == "The fox is quick."
    assert "not JSON" in results[2]
    assert "not a JSON object" in results[3]
    assert policy.bodies[0]["tools"] == trajectory.tools
    counted = {name: trajectory.metrics[name] for name in ("turns", "tool_calls", "tool_errors")}
    assert counted == {"turns": 3, "tool_calls": 4, "tool_errors": 3}
    assert trajectory.metrics["answered"] == 1
    assert (endless.metrics["turns"], endless.metrics["answered"]) == (3, 0)


async def test_a_policy_is_trained_on_a_server(
    url: str, backend: art.Backend, model: art.TrainableModel, tmp_path: Path
) -> None:
    """One step of the real thing, from a policy that was taught to call the tool."""

    tasks = ["Ask for the fox.", "What does the fox look like?"]

    def judged(shown: Shown) -> float:
        text = json.dumps(shown.conversations)
        return 0.5 * ("The fox is quick." in text) + len(text) % 97 / 970

    notes = art.MCPServer(url)
    async with notes.session() as session:
        tools = session.tools
    function = {"name": "read", "arguments": '{"title": "fox"}'}
    call = {"id": "call_1", "type": "function", "function": function}
    lessons: list[Any] = [
        [
            {"role": "system", "content": "Read."},
            {"role": "user", "content": task},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "The fox is quick."},
            {"role": "assistant", "content": "It is quick."},
        ]
        for task in tasks
    ]
    await model.train_sft(
        [art.Trajectory(messages_and_choices=lesson, tools=tools) for lesson in lessons],
        art.SFTConfig(learning_rate=5e-3, epochs=32, schedule="constant"),
    )
    with openai_server(either(generate(tasks.__getitem__), judge_by(judged))) as asked:
        result = await art.auto(
            model,
            backend,
            "Read.",
            judge_model="a-judge",
            scenarios=tmp_path / "tasks.jsonl",
            tools=notes,
            count=2,
            steps=2,
            groups_per_step=1,
            rollouts_per_group=2,
            max_turns=3,
            max_tokens=80,
            base_url=asked.url,
            api_key=KEY,
        )
    question = asked.bodies[0]["messages"][1]["content"]
    assert "notes_write" in question
    assert "notes://titles" in question
    assert await model.get_step() == 2
    summary = result.summary()
    assert summary["tasks"] == 1
    assert summary["wins"] == 1
    assert result.trained[0]["tool_calls"] > result.base[0]["tool_calls"] == 0
    first, *_, newest = await backend.checkpoints(model).list()
    assert newest.metrics["trajectory/ruler_score"] > 0
    assert newest.metrics["val/reward"] > first.metrics["val/reward"]
