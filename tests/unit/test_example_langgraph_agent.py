"""The LangGraph agent, against a scripted model: what it looks up, and what it is worth."""

from __future__ import annotations

from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from ..rigs.example_modules import load
from ..rigs.openai_server import KEY, Answer, openai_server

example = load("langgraph_agent/train.py")


async def ask(*script: Answer) -> tuple[list[tuple[str, str]], str, int]:
    """What the agent looked up about shop 0, what it answered, and how often it asked."""
    endless = Answer(calls=[("price", '{"item": "tea"}')])
    with openai_server(lambda body: endless, *script) as model:
        llm = ChatOpenAI(model="any", base_url=model.url, api_key=SecretStr(KEY))
        calls, text = await example.answer(example.Shop(0), llm)
        return calls, text, len(model.bodies)


async def test_it_looks_up_and_answers() -> None:
    shop = example.Shop(0)
    name, item = shop.call
    number = str(shop.number(name, item))
    look = Answer(calls=[(name, f'{{"item": "{item}"}}')])
    assert await ask(look, Answer(f"{number}.\n")) == ([shop.call], number, 2)
    wrong = Answer(calls=[("nothing", "{}")])
    calls, text, _ = await ask(wrong, look, Answer("I don't know"))
    assert calls == [("nothing", "None"), shop.call]
    assert text == "I don't know"


async def test_one_that_never_answers_is_stopped() -> None:
    calls, text, asked = await ask()
    assert (calls, text) == ([], "")
    assert asked <= 4


def test_questions_and_lessons() -> None:
    shops = [example.Shop(seed) for seed in range(200)]
    assert len({shop.call for shop in shops}) == 6
    assert all(shop.call[1] in shop.question for shop in shops)
    right = 0
    for shop in shops:
        lesson = example.warm_up(shop.seed).messages()
        function = lesson[2]["tool_calls"][0]["function"]
        right += function["name"] == shop.call[0] and shop.call[1] in function["arguments"]
        assert lesson[3]["content"] == lesson[4]["content"]
    assert 0.45 < right / 200 < 0.7  # half of them, and what chance gives
