"""Tasks that a generator writes, the file that they are kept in, and Python functions as tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

import art_cloud as art
from art_cloud.rewards.auto_rl import make_model, make_tools
from art_cloud.rewards.scenarios import rouge_l

from ..rigs.openai_server import KEY, Answer, generate, openai_server

WORDS = ["fox", "dog", "cat", "hen", "cow", "pig", "owl", "bee", "ant", "emu"]


def task(number: int) -> str:
    """A hundred tasks, of which no two have more than half of their words in common."""
    return " ".join([WORDS[number % 10]] * 3 + [WORDS[number // 10 % 10]] * 3)


async def test_tasks_are_written_in_several_calls_and_some_are_held_out() -> None:
    with openai_server(generate(task)) as server:
        found = await art.generate_scenarios(
            "Feeds animals.",
            "a-generator",
            count=40,
            resources=["A list of animals"],
            parameters={"temperature": 1.2},
            base_url=server.url,
            api_key=KEY,
        )
    assert [one.task for one in found] == [task(n) for n in range(40)]
    assert {one.difficulty for one in found} == {1, 2, 3, 4, 5}
    assert sum(one.split == "test" for one in found) == 10
    assert len(server.bodies) == 3
    asked = [body["messages"][1]["content"] for body in server.bodies]
    assert all("Feeds animals." in text and "A list of animals" in text for text in asked)
    assert task(15) in asked[1]
    assert server.bodies[0]["temperature"] == 1.2


async def test_tasks_too_similar_to_others_are_dropped() -> None:
    options: dict[str, Any] = {"api_key": KEY}
    with openai_server(generate(lambda number: task(number // 2))) as server:
        options["base_url"] = server.url
        found = await art.generate_scenarios("x", "g", count=5, test_count=0, **options)
        assert [one.task for one in found] == [task(n) for n in range(5)]
    same = Answer(json.dumps({"scenarios": [{"task": "Feed the fox.", "difficulty": 1}]}))
    with openai_server(lambda body: same) as server:
        options["base_url"] = server.url
        with pytest.raises(art.AnswerError, match="wrote 1 tasks that differ, not 5"):
            await art.generate_scenarios("x", "g", count=5, **options)
        with pytest.raises(art.ConfigError, match="can't be held out"):
            await art.generate_scenarios("x", "g", count=5, test_count=5, **options)
    empty = Answer(json.dumps({"scenarios": [{"task": " ", "difficulty": 9}]}))
    with openai_server(generate(task), empty) as server:
        options["base_url"] = server.url
        assert len(await art.generate_scenarios("x", "g", count=4, **options)) == 4
        complaint = server.bodies[1]["messages"][-1]["content"]
    assert "A task is empty." in complaint
    assert "A difficulty is not" in complaint


@given(st.lists(st.sampled_from(WORDS)), st.lists(st.sampled_from(WORDS)))
def test_rouge_l_is_symmetric_and_of_one_for_equal_words(one: list[str], other: list[str]) -> None:
    a, b = " ".join(one), ", ".join(other).upper()
    assert rouge_l(a, b) == rouge_l(b, a)
    assert 0 <= rouge_l(a, b) <= 1
    assert (rouge_l(a, b) == 1) == (one == other)
    assert rouge_l("the cat sat", "the dog sat") == pytest.approx(2 / 3)


def test_the_file_can_be_edited(tmp_path: Path) -> None:
    path = tmp_path / "new" / "tasks.jsonl"
    written = [art.Scenario(task="Füttere den Fuchs.", difficulty=2, split="test")]
    art.save_scenarios(path, written)
    assert "Füttere" in path.read_text(encoding="utf-8")
    with path.open("a") as file:
        file.write('\n{"task": "Feed the cow."}\n')
    assert art.load_scenarios(path) == [*written, art.Scenario(task="Feed the cow.")]
    for line, message in (
        ("{", "line 1"),
        ('{"task": ""}', "line 1: task"),
        ('{"task": "x", "split": "validation"}', "line 1: split"),
        ("\n", "has no scenario"),
    ):
        path.write_text(line)
        with pytest.raises(art.ConfigError, match=message):
            art.load_scenarios(path)
    with pytest.raises(art.ConfigError, match="can't be read"):
        art.load_scenarios(tmp_path / "none.jsonl")


class Food(BaseModel):
    name: str
    grams: int


def feed(animal: Literal["fox", "cow"], food: Food, times: int = 1) -> dict[str, Any]:
    """Feed an animal."""
    return {"animal": animal, "grams": food.grams * times}


async def count(animal: str) -> str:
    if animal == "unicorn":
        raise LookupError("there are none")
    return "3"


async def test_functions_are_tools() -> None:
    async with art.FunctionTools([feed, count]).session() as tools:
        described: Any = tools.tools[0]
        function = described["function"]
        assert (function["name"], function["description"]) == ("feed", "Feed an animal.")
        assert function["parameters"]["required"] == ["animal", "food"]
        assert function["parameters"]["properties"]["animal"]["enum"] == ["fox", "cow"]
        food = {"name": "hay", "grams": 20}
        fed = await tools.call("feed", {"animal": "cow", "food": food, "times": 2})
        assert json.loads(fed.text) == {"animal": "cow", "grams": 40}
        assert await tools.call("count", {"animal": "cow"}) == ("3", False)
        assert await tools.call("count", {"animal": "unicorn"}) == (
            "LookupError: there are none",
            True,
        )
        wrong = await tools.call("feed", {"animal": "owl", "food": food})
        assert wrong.failed
        assert "animal" in wrong.text
        assert (await tools.call("fly", {})).text == "There is no tool fly. There are: feed, count."


def test_a_file_of_functions(tmp_path: Path) -> None:
    path = tmp_path / "tools.py"
    path.write_text(
        "from json import dumps\n\ndef shout(text: str) -> str:\n    return _up(text)\n\n"
        "def _up(text):\n    return text.upper()\n"
    )
    tools: Any = art.FunctionTools.load(path).tools
    assert [tool["function"]["name"] for tool in tools] == ["shout"]
    for content, message in (
        ("x = 1", "no public function"),
        ("import nothing_like_it", "can't be run: ModuleNotFoundError"),
        ("def f(x: type(open)): ...", "no JSON form"),
    ):
        path.write_text(content)
        with pytest.raises(art.ConfigError, match=message):
            art.FunctionTools.load(path)
    with pytest.raises(art.ConfigError, match="no Python file"):
        art.FunctionTools.load(tmp_path / "none.py")
    with pytest.raises(art.ConfigError, match="not both"):
        make_tools(path, "http://127.0.0.1/mcp")
    with pytest.raises(art.ConfigError, match="no command"):
        make_tools(None, "npx 'unfinished")


def test_a_model_is_named_after_what_it_does() -> None:
    assert str(make_model(None, "Answer: questions about mail!", "b").full_name) == (
        "auto/answer-questions-about-mail"
    )
    assert str(make_model("p/m", "x", "b").full_name) == "p/m"
    assert make_model(None, "回答", "b").name == "agent"
    with pytest.raises(art.ConfigError):
        make_model("no model", "x", "b")
