"""The LangGraph agent, against a scripted model: what it looks up, and what it is worth."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from ..openai_server import KEY, Answer, openai_server

SCRIPT = Path(__file__).parents[2] / "examples" / "langgraph_agent" / "train.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("langgraph_agent", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["langgraph_agent"] = module
    spec.loader.exec_module(module)
    return module


async def ask(example: ModuleType, *script: Answer) -> tuple[list[tuple[str, str]], str, int]:
    """What the agent looked up about shop 0, what it answered, and how often it asked."""
    endless = Answer(calls=[("price", '{"item": "tea"}')])
    with openai_server(lambda body: endless, *script) as model:
        llm = ChatOpenAI(model="any", base_url=model.url, api_key=SecretStr(KEY))
        calls, text = await example.answer(example.Shop(0), llm)
        return calls, text, len(model.bodies)


async def test_it_looks_up_and_answers(example: ModuleType) -> None:
    shop = example.Shop(0)
    name, item = shop.call
    number = str(shop.number(name, item))
    look = Answer(calls=[(name, f'{{"item": "{item}"}}')])
    assert await ask(example, look, Answer(f"{number}.\n")) == ([shop.call], number, 2)
    wrong = Answer(calls=[("nothing", "{}")])
    calls, text, _ = await ask(example, wrong, look, Answer("I don't know"))
    assert calls == [("nothing", "None"), shop.call]
    assert text == "I don't know"


async def test_one_that_never_answers_is_stopped(example: ModuleType) -> None:
    calls, text, asked = await ask(example)
    assert (calls, text) == ([], "")
    assert asked <= 4


def test_questions_and_lessons(example: ModuleType) -> None:
    shops = [example.Shop(seed) for seed in range(200)]
    assert len({shop.call for shop in shops}) == 6
    assert all(shop.call[1] in shop.question for shop in shops)
    right = 0
    for shop in shops:
        lesson = example.warm_up(shop.seed).messages()
        function = lesson[2]["tool_calls"][0]["function"]
        right += function["name"] == shop.call[0] and shop.call[1] in function["arguments"]
        assert lesson[3]["content"] == lesson[4]["content"]
    assert right / 200 < 0.35, "the warm-up teaches which tool to call"
