"""Rollouts to Langfuse by its own SDK, against a receiver of what it sends."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from openai.types.chat.chat_completion import Choice

import art_cloud as art
from art_cloud.trackers.tracker import ROLLOUTS

from ..rigs.langfuse_receiver import PUBLIC_KEY, SECRET_KEY, LangfuseReceiver
from ..rigs.server_process import ServerProcess
from ..rigs.synthetic import as_groups, batch
from ..unit.stand_in import serve


@pytest.fixture(scope="module")
def receiver() -> Iterator[LangfuseReceiver]:
    """One for the module: the SDK keeps one client for a public key, as long as the process."""
    receiver = LangfuseReceiver()
    with serve(receiver.app()) as receiver.url:
        yield receiver


@pytest.fixture
def langfuse(
    receiver: LangfuseReceiver, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LangfuseReceiver]:
    monkeypatch.setenv("LANGFUSE_BASE_URL", receiver.url)
    monkeypatch.setenv("LANGFUSE_PUBLIC_KEY", PUBLIC_KEY)
    monkeypatch.setenv("LANGFUSE_SECRET_KEY", SECRET_KEY)
    receiver.spans.clear()
    receiver.scores.clear()
    yield receiver
    receiver.status = 200


@pytest.fixture
async def tracked(
    server: ServerProcess, model: art.TrainableModel[Any], langfuse: LangfuseReceiver
) -> AsyncIterator[art.TrainableModel[Any]]:
    """The test's model as a program of its own has it; closed, all that it sent is there."""
    async with server.backend() as backend:
        tracked = model.model_copy(update={"report_metrics": ["langfuse"]})
        await tracked.register(backend)
        yield tracked


@pytest.mark.filterwarnings("ignore:.*not finite")
async def test_rollouts_are_traces_with_their_rewards(
    tracked: art.TrainableModel[Any], langfuse: LangfuseReceiver
) -> None:
    """A few of each group, each once though it is trained on and logged."""
    groups = as_groups(batch(tracked.full_name, 0, groups=4))
    for group in groups:
        for number, trajectory in enumerate(group):
            trajectory.metrics |= {"turns": number, "cost": float("inf")}
    result = await tracked.train(groups)
    await tracked.log(groups, split="train", metrics=result.metrics, step=result.step)
    await tracked.backend().close()
    rollouts = [span for span in langfuse.spans if span["name"] == "rollout"]
    answers = [span for span in langfuse.spans if span["name"] == "answer"]
    assert len({span["trace"] for span in rollouts}) == len(rollouts) == ROLLOUTS
    for span in rollouts:
        assert span["langfuse.trace.name"] == f"{tracked.name} train"
        assert span["langfuse.trace.tags"] == ["train"]
        assert json.loads(span["langfuse.observation.input"]) == [{"role": "user", "content": "."}]
        assert json.loads(span["langfuse.observation.output"])["content"] == "."
    parents = {span["id"]: span["trace"] for span in rollouts}
    assert {parents[span["parent"]] for span in answers} == set(parents.values())
    usage = {"input": 20, "output": 12}
    for span in answers:
        assert span["langfuse.observation.model.name"] == f"{tracked.full_name}@0"
        assert json.loads(span["langfuse.observation.usage_details"]) == usage
    scores = {(score["traceId"], score["name"]): score["value"] for score in langfuse.scores}
    assert len(scores) == len(langfuse.scores) == 2 * ROLLOUTS
    assert {trace for trace, _ in scores} == set(parents.values())
    assert Counter(v for (_, name), v in scores.items() if name == "reward") == {0: 4, 1: 4}
    assert Counter(v for (_, name), v in scores.items() if name == "turns") == {0: 4, 1: 4}


async def test_sub_agents_are_in_the_trace_and_a_model_is_one_session(
    server: ServerProcess, tracked: art.TrainableModel[Any], langfuse: LangfuseReceiver
) -> None:
    asked: Any = [{"role": "user", "content": "Why?"}]
    said = Choice.model_validate(
        {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "So."}}
    )
    trajectory = art.Trajectory(
        messages_and_choices=[*asked, said, *asked],
        additional_histories=[art.History(messages_and_choices=[*asked, said])],
        metadata={"task": 3},
    )
    await tracked.log([trajectory])
    await tracked.backend().close()
    async with server.backend() as backend:
        again = tracked.model_copy()
        await again.register(backend)
        await again.log([art.Trajectory(messages_and_choices=[*asked, said])])
    one, other = [span for span in langfuse.spans if span["name"] == "rollout"]
    assert one["session.id"] == other["session.id"]
    assert one["langfuse.observation.metadata.task"] == "3"
    assert len(json.loads(one["langfuse.observation.input"])) == 3
    assert "langfuse.observation.output" not in one
    answers = [span for span in langfuse.spans if span["name"] == "answer"]
    assert Counter(span["trace"] for span in answers) == {one["trace"]: 2, other["trace"]: 1}


async def test_training_goes_on_without_langfuse(
    tracked: art.TrainableModel[Any],
    langfuse: LangfuseReceiver,
    capfd: pytest.CaptureFixture[str],
) -> None:
    await tracked.log([art.Trajectory(messages_and_choices=[{"role": "user", "content": "1"}])])
    langfuse.status = 503
    for seed in range(2):
        await tracked.train(as_groups(batch(tracked.full_name, seed)))
    assert await tracked.get_step() == 2
    await tracked.backend().close()
    err = capfd.readouterr().err
    assert err.count("Training goes on") == 1
    assert SECRET_KEY not in err


async def test_what_is_missing_is_said_before_anything_starts(
    backend: art.Backend, model: art.TrainableModel[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANGFUSE_PUBLIC_KEY", PUBLIC_KEY)
    monkeypatch.delenv("LANGFUSE_SECRET_KEY", raising=False)
    tracked = model.model_copy(update={"report_metrics": ["langfuse"]})
    with pytest.raises(art.ConfigError, match="and LANGFUSE_SECRET_KEY is not set"):
        await tracked.register(backend)
