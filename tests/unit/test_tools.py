"""Hermes tool calls: whole, in pieces, and malformed."""

import json
from itertools import pairwise

import pytest
from art_server.inference.openai.tool_calls import ToolCall, ToolCallParser
from hypothesis import given
from hypothesis import strategies as st

SEARCH = '<tool_call>\n{"name": "search", "arguments": {"query": "fox"}}\n</tool_call>'
CALL = ToolCall("search", '{"query": "fox"}')


def parse(*pieces):
    parser = ToolCallParser()
    said, calls = "", []
    for piece in pieces:
        text, more = parser.feed(piece)
        said += text
        calls += more
    return said + parser.finish(), calls


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        ("", "", []),
        ("just text \n", "just text \n", []),
        (SEARCH, "", [CALL]),
        (f"I look.\n{SEARCH}\n{SEARCH}\n", "I look.", [CALL, CALL]),
        (f"{SEARCH}\nand so on", "\nand so on", [CALL]),
        ('<tool_call>{"name": "now"}</tool_call>', "", [ToolCall("now", "{}")]),
        ("a < b <tool", "a < b <tool", []),
    ],
)
def test_text_and_calls_are_told_apart(text, said, calls):
    assert parse(text) == (said, calls)


@pytest.mark.parametrize(
    "inside",
    ["", "no json", "[]", '{"arguments": {}}', '{"name": 1}', '{"name": "f", "arguments": "x"}'],
)
def test_a_malformed_call_stays_text(inside):
    text = f" say <tool_call>{inside}</tool_call> on "
    assert parse(text) == (text, [])
    assert parse(text + SEARCH)[1] == [CALL]


def test_a_call_without_an_end_stays_text():
    unfinished = SEARCH.removesuffix("</tool_call>")
    assert parse(unfinished) == (unfinished, [])


@given(
    parts=st.lists(
        st.sampled_from([SEARCH, "<tool_call>", "</tool_call>", "<tool", " ", "\n", "word", "é"])
    ),
    cuts=st.lists(st.integers(0, 200)),
)
def test_pieces_of_any_size_give_the_same(parts, cuts):
    text = "".join(parts)
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(edges)]
    assert parse(*pieces) == parse(text)


@given(arguments=st.dictionaries(st.text(), st.integers() | st.text() | st.none(), max_size=4))
def test_arguments_come_back(arguments):
    inside = json.dumps({"name": "f", "arguments": arguments})
    if "</tool_call>" not in inside:
        [call] = parse(f"<tool_call>{inside}</tool_call>")[1]
        assert json.loads(call.arguments) == arguments
