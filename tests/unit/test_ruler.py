"""RULER against real HTTP servers whose answers are scripted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import art_cloud as art
from art_cloud.rewards.judging import Judgement

from ..rigs.judged import ask, conversation, group_of, quality, rewards
from ..rigs.openai_server import (
    KEY,
    Answer,
    OpenAIServer,
    Reply,
    judge_by,
    openai_server,
    read_judge_prompt,
    scores,
)

TOOLS: Any = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]


@pytest.fixture
def judge() -> Iterator[OpenAIServer]:
    with openai_server(judge_by(quality)) as server:
        yield server


async def test_each_trajectory_gets_its_own_score_reason_and_share_of_the_cost(
    judge: OpenAIServer,
) -> None:
    group = group_of(0.1, 0.9, 0.5, 0.3, metadata={"task": 7}, metrics={"m": 1}, logs=["before"])
    before = group.model_dump_json()
    scored = await ask(judge, group, price=(2.0, 10.0))
    assert group.model_dump_json() == before
    assert [t.reward for t in scored] == [0.1, 0.9, 0.5, 0.3]
    for trajectory in scored:
        assert trajectory.metrics == {
            "independent_reward": 0.25,
            "ruler_score": trajectory.reward,
            "ruler_prompt_tokens": 250,
            "ruler_completion_tokens": 25,
            "ruler_cost": pytest.approx((1000 * 2 + 100 * 10) / 1e6 / 4),
        }
        assert trajectory.logs == [f"RULER explanation: It earns {trajectory.reward}."]
    assert scored.metadata == {"task": 7}
    assert scored.metrics == {"m": 1, "ruler_failed": 0}
    assert scored.logs == ["before"]


async def test_ruler_scores_messages_in_their_order(
    judge: OpenAIServer, capsys: pytest.CaptureFixture[str]
) -> None:
    found = await art.ruler(
        [conversation(0.2), conversation(0.8)],
        "a-judge",
        {"temperature": 0.5, "api_base": judge.url, "api_key": KEY},
        "- Be strict.",
        tools=TOOLS,
        debug=True,
    )
    assert [(one.trajectory_id, one.score) for one in found] == [("1", 0.2), ("2", 0.8)]
    [body] = judge.bodies
    assert body["temperature"] == 0.5
    assert "- Be strict." in body["messages"][0]["content"]
    assert body["messages"][1]["content"].count("look_up") == 1
    assert "trajectory 2: 0.800. It earns 0.8." in capsys.readouterr().err


async def test_a_model_brings_its_own_endpoint(judge: OpenAIServer) -> None:
    model = art.Model(name="j", project="p", inference_base_url=judge.url, inference_api_key=KEY)
    scored = await art.ruler_score_group(group_of(0.1, 0.7), model)
    assert [t.reward for t in scored] == [0.1, 0.7]
    assert judge.bodies[0]["model"] == "j"
    with pytest.raises(art.ConfigError, match="its own endpoint"):
        await art.ruler([conversation(1)], model, base_url=judge.url)
    await model.close()


async def test_it_fits_into_a_gathering(judge: OpenAIServer) -> None:
    async def rollout(answer: float) -> art.Trajectory:
        return art.Trajectory(messages_and_choices=conversation(answer))

    groups = await art.gather_trajectory_groups(
        (art.TrajectoryGroup(rollout(a / 10) for a in range(task, task + 3)) for task in range(6)),
        after_each=lambda group: ask(judge, group, max_concurrency=2),
    )
    assert [[t.reward for t in group] for group in groups] == [
        [task / 10, (task + 1) / 10, (task + 2) / 10] for task in range(6)
    ]


async def test_no_more_requests_at_once_than_allowed() -> None:
    def slow(body: dict[str, Any]) -> Answer:
        answer = judge_by(quality)(body)
        answer.delay = 0.02
        return answer

    with openai_server(slow) as judge:
        await asyncio.gather(*(ask(judge, group_of(0.1, 0.2), max_concurrency=2) for _ in range(8)))
        assert judge.most_running == 2


async def test_shared_messages_are_sent_once_and_equal_trajectories_judged_once(
    judge: OpenAIServer,
) -> None:
    assert await rewards(judge, 0.5, 0.1, 0.5, 0.5, 0.1) == [0.5, 0.1, 0.5, 0.5, 0.1]
    [body] = judge.bodies
    assert json.dumps(body).count("How good are you?") == 1
    assert len(read_judge_prompt(body)) == 2
    assert await rewards(judge, 0.4, 0.4) == [0.4, 0.4]
    assert await rewards(judge, 0.4) == [0.4]
    assert await rewards(judge) == []
    assert len(judge.bodies) == 3


async def test_the_judge_sees_tools_and_additional_histories(judge: OpenAIServer) -> None:
    worker: Any = {"role": "system", "content": "You are a sub-agent that looks things up. " * 9}
    found: Any = [{"role": "assistant", "content": f"I found {n}."} for n in range(2)]
    group = art.TrajectoryGroup(
        [
            art.Trajectory(
                messages_and_choices=conversation(n / 2),
                tools=TOOLS,
                additional_histories=[art.History(messages_and_choices=[worker, found[n]])],
            )
            for n in range(2)
        ]
    )
    assert [t.reward for t in await ask(judge, group)] == [0.0, 0.5]
    shown = sorted(read_judge_prompt(judge.bodies[0]), key=quality)
    assert [one.conversations for one in shown] == [
        [[{"tools": TOOLS}, *conversation(n / 2)], [worker, found[n]]] for n in range(2)
    ]
    text = judge.bodies[0]["messages"][1]["content"]
    assert text.count("look_up") == text.count(json.dumps(worker)) == 1


def changed(change: Callable[[dict[str, Any]], object], **more: Any) -> Reply:
    """An answer that was good before `change`."""

    def reply(body: dict[str, Any]) -> Answer:
        content = json.loads(judge_by(quality)(body).content or "")
        change(content)
        return Answer(json.dumps(content), **more)

    return reply


BAD: dict[str, tuple[Answer | Reply, str]] = {
    "prose": (Answer("The first one is best."), "not JSON"),
    "cut off": (Answer('{"scores": [{"traj', finish_reason="length"), "cut off"),
    "refused": (Answer(None, refusal="I can't compare agents."), "I can't compare agents"),
    "nothing": (Answer(""), "not JSON"),
    "missing": (changed(lambda c: c["scores"].pop()), "Without a score"),
    "doubled": (changed(lambda c: c["scores"].append(c["scores"][0])), "more than once"),
    "unknown": (
        changed(lambda c: c["scores"].append({**c["scores"][0], "trajectory_id": "ghost"})),
        "Not an id of a trajectory: ghost",
    ),
    "too high": (changed(lambda c: c["scores"][0].update(score=7)), "Not between 0 and 1"),
    "not a number": (changed(lambda c: c["scores"][0].update(score=float("nan"))), "0"),
    "a string": (changed(lambda c: c["scores"][0].update(score="0.5")), "scores.0.score"),
    "another form": (changed(lambda c: c.update(note="!")), "note"),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_answer_is_sent_back_once_with_what_is_wrong(name: str) -> None:
    bad, problem = BAD[name]
    with openai_server(judge_by(quality), bad) as judge:
        scored = await ask(judge, group_of(0.3, 0.6))
        assert [t.reward for t in scored] == [0.3, 0.6]
        assert [t.metrics["ruler_prompt_tokens"] for t in scored] == [1000, 1000]
        first, second = (body["messages"] for body in judge.bodies)
        assert second[:2] == first
        assert [message["role"] for message in second[2:]] == ["assistant", "user"]
        assert problem in second[3]["content"]
        judge.script = [bad, bad]
        with pytest.raises(art.AnswerError, match="a second one") as failure:
            await ask(judge, group_of(0.3, 0.6))
        assert problem in str(failure.value)


async def test_an_endpoint_that_takes_no_schema_is_asked_without_one() -> None:
    def fenced(body: dict[str, Any]) -> Answer:
        thought = '<think>{"scores": []}? No, {that} is wrong.</think>'
        return Answer(f"{thought}Here it is:\n```json\n{judge_by(quality)(body).content}\n```")

    with openai_server(fenced) as judge:
        judge.takes_schema = False
        assert await rewards(judge, 0.1, 0.6) == [0.1, 0.6]
        assert await rewards(judge, 0.2, 0.7) == [0.2, 0.7]
        assert ["response_format" in body for body in judge.bodies] == [True, False, False]
    with openai_server(judge_by(quality)) as judge:
        await rewards(judge, 0.1, 0.6)
        [body] = judge.bodies
        schema = body["response_format"]["json_schema"]["schema"]
        assert schema["additionalProperties"] is False
        assert schema == Judgement.model_json_schema()


async def test_rate_limits_and_overload_are_waited_for() -> None:
    limited = Answer(status=429, headers={"Retry-After": "1.2"})
    with openai_server(judge_by(quality), limited, Answer(status=500)) as judge:
        assert await rewards(judge, 0.1, 0.6) == [0.1, 0.6]
        assert len(judge.bodies) == 3
        assert judge.times[1] - judge.times[0] >= 1.2


async def test_a_judge_that_fails_is_named_and_its_key_is_not() -> None:
    down = Answer(status=500, headers={"x-should-retry": "false"})
    busy = Answer(status=429, headers={"x-should-retry": "false"})
    with openai_server(judge_by(quality), down, busy) as judge:
        with pytest.raises(art.ServerUnavailableError, match=r"a-judge at http://127.* 500"):
            await ask(judge, group_of(0.1, 0.6))
        with pytest.raises(art.ServerUnavailableError, match=r"429.*max_concurrency"):
            await ask(judge, group_of(0.1, 0.6))
        judge.script = [Answer("no such model", status=404)]
        with pytest.raises(art.NotFoundError, match=r"no a-judge at .* no such model"):
            await ask(judge, group_of(0.1, 0.6))
        judge.script = [Answer("too long", status=400), Answer("too long", status=400)]
        with pytest.raises(art.InvalidRequestError, match="too long"):
            await ask(judge, group_of(0.1, 0.6))
        with pytest.raises(art.AuthError, match="refuses the key") as refused:
            await ask(judge, group_of(0.1, 0.6), api_key="sk-another")
        assert "sk-another" not in str(refused.value)


async def test_a_slow_answer_is_given_up_and_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = Answer("late", delay=0.5)
    limit = {"timeout": 0.2}
    with openai_server(judge_by(quality), late) as judge:
        scored = await ask(judge, group_of(0.1, 0.6), extra_litellm_params=limit)
        assert [t.reward for t in scored] == [0.1, 0.6]
        judge.script = [late]
        monkeypatch.setattr("art_cloud.model.RETRIES", 0)
        with pytest.raises(art.ServerUnavailableError, match=r"can't be reached.* timed out"):
            await ask(judge, group_of(0.1, 0.6), extra_litellm_params=limit)


async def test_swallowed_failures_leave_the_group_marked_with_its_own_rewards() -> None:
    with openai_server(lambda body: Answer("no")) as judge:
        failed = await ask(judge, group_of(0.1, 0.6, logs=["before"]), swallow_exceptions=True)
        assert [t.reward for t in failed] == [0.25, 0.25]
        assert failed.metrics == {"ruler_failed": 1}
        assert failed.logs[0] == "before"
        assert "AnswerError: a-judge" in failed.logs[1]
        for trajectory in failed:
            assert "ruler_score" not in trajectory.metrics
            assert trajectory.metrics["ruler_prompt_tokens"] == 1000
        with pytest.raises(art.AuthError):
            await ask(judge, group_of(0.1), swallow_exceptions=True, api_key="sk-another")


async def test_rewards_by_hand_are_kept_and_can_be_combined(judge: OpenAIServer) -> None:
    def both(trajectory: art.Trajectory, score: float) -> float:
        return trajectory.reward + 2 * score

    scored = await ask(judge, group_of(0.1, 0.6), combine=both)
    assert [t.reward for t in scored] == [0.25 + 0.2, 0.25 + 1.2]
    again = await ask(judge, scored, combine=both)
    assert [t.reward for t in again] == [t.reward for t in scored]
    assert [t.metrics["independent_reward"] for t in again] == [0.25, 0.25]


async def test_what_the_endpoint_says_of_the_cost_comes_first() -> None:
    def priced(body: dict[str, Any]) -> Answer:
        answer = judge_by(quality)(body)
        answer.cost = 0.5
        return answer

    with openai_server(priced) as judge:
        scored = await ask(judge, group_of(0.1, 0.6), price=(1.0, 1.0))
        assert [t.metrics["ruler_cost"] for t in scored] == [0.25, 0.25]


async def test_long_groups_are_put_on_one_scale() -> None:
    """Each call has a scale of its own: what is linear in quality within it, is so over all."""
    calls = iter(range(1000))

    def moody(body: dict[str, Any]) -> Answer:
        number = next(calls)
        slope, base = (0.4, 0.3) if number == 0 else (0.3 + 0.05 * number, 0.05 * number)
        return Answer(scores({s.id: base + slope * quality(s) for s in read_judge_prompt(body)}))

    answers = [(7 * n % 41) / 40 for n in range(41)]
    with openai_server(moody) as judge:
        found = await rewards(judge, *answers, max_per_call=12, max_concurrency=1)
        sizes = [len(read_judge_prompt(body)) for body in judge.bodies]
    assert sizes[0] == 12
    assert max(sizes) <= 12
    assert sum(sizes) == 41 + 3 * (len(sizes) - 1)
    low, high = found[answers.index(0.0)], found[answers.index(1.0)]
    assert found == pytest.approx([low + (high - low) * answer for answer in answers])
    assert 0 <= low < high <= 1


async def test_anchors_that_are_all_alike_only_move_a_scale() -> None:
    with openai_server(lambda body: Answer(scores(dict.fromkeys(ids(body), 0.5)))) as judge:
        assert await rewards(judge, *range(10), max_per_call=4) == [0.5] * 10


def ids(body: dict[str, Any]) -> list[str]:
    return [shown.id for shown in read_judge_prompt(body)]


async def test_linked_scores_outside_of_0_to_1_are_squeezed_in_their_order() -> None:
    first = iter([True])

    def judgement(body: dict[str, Any]) -> Answer:
        shown = {s.id: quality(s) for s in read_judge_prompt(body)}
        low, high = min(shown.values()), max(shown.values())
        if next(first, False):  # takes the whole scale, though it has not seen the worst
            return Answer(scores({id: (q - low) / (high - low) for id, q in shown.items()}))
        return Answer(scores({id: 0.1 + 0.8 * q for id, q in shown.items()}))

    answers = [n / 20 for n in range(20)]
    with openai_server(judgement) as judge:
        found = await rewards(judge, *answers, max_per_call=8, max_concurrency=1)
        seen = {quality(shown) for shown in read_judge_prompt(judge.bodies[0])}
    assert 0.0 not in seen
    assert found[0] == pytest.approx(0)
    assert found[-1] == pytest.approx(1)
    assert found == sorted(found)
    assert len(set(found)) == 20


async def test_what_is_no_message_is_refused(judge: OpenAIServer) -> None:
    for wrong in ("hello", {"role": "user", "content": object()}):
        with pytest.raises(art.ConfigError, match=r"neither a message|can't be shown"):
            await art.ruler([[wrong]], "j", base_url=judge.url, api_key=KEY)  # type: ignore[list-item]
    assert judge.bodies == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_per_call": 3}, "max_per_call is 3"),
        ({"max_concurrency": 0}, "max_concurrency is 0"),
        ({"api_key": None}, "api_key"),
        ({"extra_litellm_params": {"cache": True}}, "cache: can't be set"),
        ({"extra_litellm_params": {"n": 2}}, "n: can't be set"),
    ],
)
async def test_what_cannot_be_meant_is_refused(
    judge: OpenAIServer,
    options: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)  # never sent to an endpoint that is not its own
    with pytest.raises(art.ConfigError, match=message):
        await ask(judge, group_of(0.1, 0.6), **options)
    assert judge.bodies == []


async def test_the_environment_names_the_default_endpoint(
    judge: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(art.ConfigError, match="OPENAI_API_KEY"):
        await art.ruler([conversation(1)])
    with pytest.raises(art.ConfigError, match="none of OpenAI's models"):
        await art.ruler([conversation(1)], "anthropic/claude-opus-5", api_key="k")
    monkeypatch.setenv("OPENAI_BASE_URL", judge.url)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    [score] = await art.ruler([conversation(1)], "vendor/judge")
    assert score.score == 1
    assert judge.bodies[0]["model"] == "vendor/judge"
