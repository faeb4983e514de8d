"""Recorded sessions: clients that know nothing of art-cloud, against the real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from pydantic import SecretStr

import art_cloud as art
from art_cloud.rollouts.trajectory import is_choice
from art_cloud.shared.protocol import Sample

from ..rigs.server_process import ServerProcess

QUESTION: Any = {"role": "user", "content": "Look it up."}


@tool
def search(query: str) -> str:
    """Search the text"""
    return f"A {query}."


TOOLS: Any = [convert_to_openai_tool(search)]
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "search", "arguments": '{"query": "fox"}'},
}
CONVERSATION: Any = [
    QUESTION,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "A fox."},
    {"role": "assistant", "content": "It is a fox."},
]
"""What the agent is taught: to call a tool once, and to answer."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("recording"), "--model", tiny_model) as server:

        async def teach() -> None:
            async with server.backend() as backend:
                model = agent(tiny_model)
                await model.register(backend)
                await model.train_sft(
                    [art.Trajectory(messages_and_choices=CONVERSATION, tools=TOOLS)],
                    art.SFTConfig(learning_rate=5e-3, epochs=20, schedule="constant"),
                )

        asyncio.run(teach())
        yield server
        assert server.terminate() == 0


def agent(tiny_model: Path) -> art.TrainableModel[Any]:
    return art.TrainableModel(name="agent", project="recording", base_model=str(tiny_model))


@pytest.fixture
async def model(server: ServerProcess, tiny_model: Path) -> AsyncIterator[art.TrainableModel[Any]]:
    async with server.backend() as backend:
        model = agent(tiny_model)
        await model.register(backend)
        yield model


def client_of(trajectory: art.RecordedTrajectory) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=trajectory.base_url, api_key=trajectory.api_key, max_retries=0
    )


async def ask(client: openai.AsyncOpenAI, messages: Any, **parameters: Any) -> Any:
    return await client.chat.completions.create(
        model="gpt-5-mini", messages=messages, max_tokens=6, **parameters
    )


def shape(history: art.History) -> list[str]:
    """The roles of a conversation, those that the model said as `choice`."""
    return ["choice" if is_choice(m) else m["role"] for m in history.messages_and_choices]


def said(content: str | None) -> Any:
    return {"role": "assistant", "content": content}


async def test_a_conversation_has_a_choice_wherever_the_model_answered(
    model: art.TrainableModel[Any],
) -> None:
    system: Any = {"role": "system", "content": "You are a helpful agent."}
    async with model.record() as trajectory:
        async with client_of(trajectory) as client:
            assert [m.id async for m in client.models.list()] == ["recording/agent"]
            first = await ask(client, [system, QUESTION])
            more = [system, QUESTION, said(first.choices[0].message.content)]
            second = await ask(client, [*more, {"role": "user", "content": "Why?"}])
        trajectory.reward = 0.5
        assert trajectory.messages_and_choices == []
    assert trajectory.reward == 0.5
    assert shape(trajectory) == ["system", "user", "choice", "user", "choice"]
    assert trajectory.additional_histories == []
    samples = [answer.choices[0].sample for answer in (first, second)]
    assert trajectory.samples() == [Sample.model_validate(sample) for sample in samples]
    assert {sample.policy for sample in trajectory.samples()} == {first.model}
    assert trajectory.messages()[2]["content"] == first.choices[0].message.content
    assert trajectory.api_key not in f"{trajectory!r} {trajectory} {trajectory.model_dump_json()}"


async def test_a_stream_is_recorded_as_the_whole_answer_would_be(
    model: art.TrainableModel[Any],
) -> None:
    parameters: Any = {"model": "any", "messages": [QUESTION], "tools": TOOLS, "max_tokens": 40}
    async with model.record() as trajectory, client_of(trajectory) as client:
        whole = await client.chat.completions.create(**parameters, temperature=0)
        stream = await client.chat.completions.create(**parameters, temperature=0, stream=True)
        chunks = [chunk async for chunk in stream]
        [call] = whole.choices[0].message.tool_calls
        streamed_call = next(c for x in chunks for c in x.choices[0].delta.tool_calls or [])
        result: Any = {"role": "tool", "tool_call_id": streamed_call.id, "content": "A fox."}
        asked: Any = {"role": "assistant", "tool_calls": [streamed_call.model_dump()]}
        messages = [QUESTION, asked, result]
        await client.chat.completions.create(**parameters | {"messages": messages})
    assert shape(trajectory) == ["user", "choice"]
    [streamed] = trajectory.additional_histories
    assert shape(streamed) == ["user", "choice", "tool", "choice"]
    assert streamed.tools == trajectory.tools == TOOLS
    one, other = (h.messages_and_choices[1] for h in (trajectory, streamed))
    assert one.finish_reason == other.finish_reason == "tool_calls"
    assert one.sample["completion_ids"] == other.sample["completion_ids"]
    assert one.message.tool_calls == [call]
    assert other.message.tool_calls[0].function == call.function
    assert other.message.tool_calls[0].id == streamed_call.id


async def test_parallel_calls_sub_agents_and_compaction_are_histories_of_their_own(
    model: art.TrainableModel[Any],
) -> None:
    planner: Any = {"role": "system", "content": "You plan."}
    workers: Any = [{"role": "system", "content": f"You are worker {n}."} for n in range(3)]
    async with model.record() as trajectory, client_of(trajectory) as client:
        plan = said((await ask(client, [planner, QUESTION])).choices[0].message.content)

        async def work(worker: Any) -> Any:
            first = await ask(client, [worker, plan, QUESTION])
            history = [worker, plan, QUESTION, said(first.choices[0].message.content), QUESTION]
            return (await ask(client, history)).choices[0].message.content

        reports = await asyncio.gather(*map(work, workers))
        done: Any = {"role": "user", "content": json.dumps(reports)}
        await ask(client, [planner, QUESTION, plan, done])
        await ask(client, [planner, {"role": "user", "content": "In short: go on."}])
        await ask(client, [QUESTION], n=2)
    assert shape(trajectory) == ["system", "user", "choice", "user", "choice"]
    *sub_agents, compacted, one, other = trajectory.additional_histories
    for sub_agent in sub_agents:
        assert shape(sub_agent) == ["system", "assistant", "user", "choice", "user", "choice"]
    assert {h.messages()[0]["content"] for h in sub_agents} == {w["content"] for w in workers}
    assert shape(compacted) == ["system", "user", "choice"]
    assert shape(one) == shape(other) == ["user", "choice"]
    assert len(trajectory.samples()) == 2 + 3 * 2 + 1 + 2


async def test_an_agent_that_compacts_its_history_is_trained_on_all_of_it(
    model: art.TrainableModel[Any],
) -> None:
    """Every two turns it has the model sum up, and goes on with nothing but the summary."""
    system: Any = {"role": "system", "content": "You take notes."}
    sum_up: Any = {"role": "user", "content": "Sum up."}

    async def agent(client: openai.AsyncOpenAI) -> None:
        history = [system, QUESTION]
        for turn in range(1, 5):
            answer = await ask(client, history)
            history.append(said(answer.choices[0].message.content))
            if turn % 2 == 0:
                summary = (await ask(client, [*history, sum_up])).choices[0].message.content
                history = [system, {"role": "user", "content": f"So far: {turn} {summary}"}]
            else:
                history.append(QUESTION)

    async def rollout(number: int) -> art.Trajectory:
        async with model.record() as trajectory, client_of(trajectory) as client:
            await agent(client)
        trajectory.reward = float(number)
        return trajectory

    group = [await rollout(number) for number in range(2)]
    for trajectory in group:
        whole = ["system", *["user", "choice"] * 3]
        assert [shape(trajectory), *map(shape, trajectory.additional_histories)] == [whole, whole]
        [compacted] = trajectory.additional_histories
        assert str(compacted.messages()[1]["content"]).startswith("So far: 2")
    result = await model.train([art.TrajectoryGroup(group)], learning_rate=1e-5)
    assert result.metrics["samples"] == 2 * 6
    assert result.metrics["kl_sampler"] < 1e-8


async def test_what_a_client_gives_up_is_counted_and_not_trained_on(
    model: art.TrainableModel[Any],
) -> None:
    parameters: Any = {"model": "x", "messages": [QUESTION], "max_tokens": 1500}
    longer = {"extra_body": {"ignore_eos": True}}
    async with model.record() as trajectory, client_of(trajectory) as client:
        stream = await client.chat.completions.create(**parameters, stream=True, **longer)
        await anext(aiter(stream))
        await stream.close()
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(**parameters, timeout=0.3, **longer)
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            await client.chat.completions.create(**parameters | {"max_tokens": -1})
        late = asyncio.create_task(client.chat.completions.create(**parameters, **longer))
        await ask(client, [QUESTION])
    assert trajectory.metrics["cancelled_requests"] == 3
    assert "3 requests were cancelled" in trajectory.logs[0]
    assert shape(trajectory) == ["user", "choice"]
    assert trajectory.additional_histories == []
    late.cancel()
    await asyncio.wait([late])


async def test_langgraph_react_agent(model: art.TrainableModel[Any]) -> None:
    async with model.record() as trajectory:
        llm = ChatOpenAI(
            model="any",  # for some names LangChain leaves the temperature out
            base_url=trajectory.base_url,
            api_key=SecretStr(trajectory.api_key),
            temperature=0,
            max_completion_tokens=60,
        )
        react = create_react_agent(llm, [search])
        state = await react.ainvoke({"messages": [("user", "Look it up.")]})
    answer = state["messages"][-1].content
    assert answer == "It is a fox."
    assert shape(trajectory) == ["user", "choice", "tool", "choice"]
    assert trajectory.additional_histories == []
    assert trajectory.tools == TOOLS
    assert trajectory.messages()[-1]["content"] == answer
    first, second = trajectory.samples()
    whole = first.prompt_ids + first.completion_ids
    assert second.prompt_ids[: len(whole)] == whole


async def test_curl_and_text_completions(model: art.TrainableModel[Any]) -> None:
    async with model.record(step=0) as trajectory:
        body = {"prompt": ["The fox", "A dog"], "max_tokens": 3, "n": 2}
        curl = await asyncio.create_subprocess_exec(
            *("curl", "--silent", "--noproxy", "*", f"{trajectory.base_url}/completions"),
            *("-H", "Content-Type: application/json", "-H", "@-", "-d", json.dumps(body)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        key = f"Authorization: Bearer {trajectory.api_key}".encode()
        out, _ = await curl.communicate(key)
    answer = json.loads(out)
    histories = [trajectory, *trajectory.additional_histories]
    assert [h.messages()[0]["content"] for h in histories] == ["The fox"] * 2 + ["A dog"] * 2
    assert [h.messages()[1]["content"] for h in histories] == [c["text"] for c in answer["choices"]]
    assert {sample.policy for sample in trajectory.samples()} == {"recording/agent@0"}


async def test_a_recorded_group_is_trained_on(model: art.TrainableModel[Any]) -> None:
    async def rollout(number: int) -> art.Trajectory:
        async with model.record() as trajectory, client_of(trajectory) as client:
            answer = await ask(client, [QUESTION])
            await ask(client, [QUESTION, said(answer.choices[0].message.content), QUESTION])
        trajectory.reward = float(number)
        return trajectory

    before = await model.get_step()
    groups = await art.gather_trajectory_groups([art.TrajectoryGroup(map(rollout, range(4)))])
    assert all(t.samples()[0].policy == f"recording/agent@{before}" for t in groups[0])
    result = await model.train(groups, learning_rate=1e-5)
    assert result.step == before + 1
    assert result.metrics["samples"] == 8
    assert result.metrics["grad_norm"] > 0
    assert result.metrics["kl_sampler"] < 1e-8
    assert result.metrics["canary"] < 1e-4


async def test_a_key_opens_its_own_session_until_it_ends(
    model: art.TrainableModel[Any], server: ServerProcess
) -> None:
    async with model.record() as one, model.record() as other:
        assert one.api_key != other.api_key
        async with server.http(one.api_key) as http:
            statuses = {
                path: (await http.get(path)).status_code
                for path in (
                    one.base_url.removeprefix(server.url) + "/models",
                    other.base_url.removeprefix(server.url) + "/models",
                    "/v1/models",
                    "/art/v1/server",
                    "/sessions/unknown/v1/models",
                    "/sessions/",
                )
            }
        assert list(statuses.values()) == [200, 401, 401, 401, 401, 401]
        async with server.http() as http:
            response = await http.get(one.base_url + "/models")
            assert response.status_code == 401
            assert "its own session only" in response.json()["error"]["message"]
    async with client_of(one) as client:
        with pytest.raises(openai.AuthenticationError, match="session that is open"):
            await ask(client, [QUESTION])


async def test_errors_of_the_block_and_of_the_server_are_told(
    model: art.TrainableModel[Any], server: ServerProcess
) -> None:
    seen: list[art.Trajectory] = []

    async def fails() -> None:
        async with model.record() as trajectory, client_of(trajectory) as client:
            seen.append(trajectory)
            await ask(client, [QUESTION])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fails()
    assert shape(seen[0]) == ["user", "choice"]

    async def loses() -> None:
        async with model.record() as trajectory, server.http() as http:
            session = trajectory.base_url.split("/")[-2]
            assert (await http.delete(f"/art/v1/sessions/{session}")).status_code == 200

    with pytest.raises(art.NotFoundError, match="recording is lost"):
        await loses()
    unknown = art.TrainableModel(name="nobody", project="recording", base_model="x")
    unknown.attach(model.backend())
    with pytest.raises(art.NotFoundError, match=r"recording/nobody is not registered"):
        async with unknown.record():
            pass
