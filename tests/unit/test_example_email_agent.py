"""The mailbox of examples/email_agent, its tools, and what the reward is made of."""

from __future__ import annotations

from typing import Any

import pytest

import art_cloud as art

from ..rigs.example_modules import load
from ..rigs.openai_server import KEY, Answer, openai_server

inbox = load("email_agent/inbox.py")


@pytest.fixture
def desk() -> Any:
    return inbox.Desk(inbox.Mailbox(7))


def query(desk: Any) -> str:
    return f"{desk.mailbox.wanted.sender} {desk.mailbox.wanted.subject}"


def test_the_same_seed_gives_the_same_mailbox() -> None:
    one, same, other = (inbox.Mailbox(seed) for seed in (1, 1, 2))
    assert (one.question, one.wanted, one.hour) == (same.question, same.wanted, same.hour)
    assert one.search("party") == same.search("party") != other.search("party")


def test_a_question_names_the_person_and_not_the_word_of_the_mail() -> None:
    for seed in range(100):
        mailbox = inbox.Mailbox(seed)
        assert mailbox.wanted.sender in mailbox.question
        assert mailbox.wanted.subject not in mailbox.question
        assert mailbox.wanted.body.endswith(f" {mailbox.hour}.")


def test_person_and_word_put_the_mail_first() -> None:
    for seed in range(100):
        mailbox = inbox.Mailbox(seed)
        hits = mailbox.search(f"{mailbox.wanted.sender} {mailbox.wanted.subject}")
        assert hits[0] == mailbox.wanted
        assert len(hits) == inbox.HITS


@pytest.mark.parametrize("words", ["", "?!", "zebra", '"', "NEAR(", "body:"])
def test_a_search_takes_any_text(desk: Any, words: str) -> None:
    assert desk.act("search", {"query": words}).text == "No hit."


async def test_the_straight_way_earns_everything(desk: Any) -> None:
    wanted = desk.mailbox.wanted
    found = await desk.call("search", {"query": query(desk)})
    assert found.text.splitlines()[0] == f"1 {wanted.sender}: {wanted.subject}"
    assert (await desk.call("read", {"hit": 1})).text == f"{wanted.sender}: {wanted.body}"
    await desk.call("answer", {"text": f" {desk.mailbox.hour} ", "hit": 1})
    assert all(desk.done(turns=3).values())
    assert [name for name, done in desk.done(turns=4).items() if not done] == ["quick"]


def test_partial_credit(desk: Any) -> None:
    assert not any(desk.done(turns=1).values())
    desk.act("search", {"query": query(desk)})
    desk.act("read", {"hit": 2})
    assert desk.done(turns=2)["found"]
    assert not desk.done(turns=2)["read"]
    desk.act("answer", {"text": desk.mailbox.hour, "hit": 2})
    done = desk.done(turns=3)
    assert done["right"]
    assert not done["source"]
    assert not done["quick"]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("read", {"hit": 1}),  # nothing was searched for yet
        ("read", {"hit": "1"}),
        ("search", {"words": "party"}),
        ("answer", {"text": "3"}),
        ("send", {}),
    ],
)
def test_a_wrong_call_is_told_so(desk: Any, name: str, arguments: dict[str, Any]) -> None:
    assert desk.act(name, arguments).failed
    assert not any(desk.done(turns=1).values())


async def test_the_answer_is_the_last_call(desk: Any) -> None:
    script = [
        Answer(calls=[("search", f'{{"query": "{query(desk)}"}}')]),
        Answer(calls=[("read", '{"hit": 1}')]),
        Answer(calls=[("answer", f'{{"text": "{desk.mailbox.hour}", "hit": 1}}')]),
    ]
    with openai_server(lambda body: Answer("One more word."), *script) as policy:
        model = art.Model(
            name="m", project="p", inference_base_url=policy.url, inference_api_key=KEY
        )
        trajectory = await art.run_agent(model, desk.mailbox.question, desk, until="answer")
        await model.close()
    assert len(policy.bodies) == 3
    assert (trajectory.metrics["turns"], trajectory.metrics["answered"]) == (3, 1)
    assert all(desk.done(turns=3).values())
