"""Streamed text is the text: no half characters, nothing past a stop string, nothing lost."""

from functools import partial

import pytest
from art_server.inference.transformers.detokenize import TextStream
from art_server.tiny_model import make_tokenizer
from hypothesis import given
from hypothesis import strategies as st

TOKENIZER = make_tokenizer()
DECODE = partial(TOKENIZER.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
ids = st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=40)


def stream(token_ids, stops=()):
    """The pieces, the last one from `finish`, and how many tokens were taken."""
    text = TextStream(DECODE, stops)
    pieces = []
    for taken, token_id in enumerate(token_ids, start=1):
        pieces.append(text.push(token_id))
        if text.stopped:
            return pieces, taken
    return [*pieces, text.finish()], len(token_ids)


@given(ids)
def test_pieces_join_to_the_text(token_ids):
    assert "".join(stream(token_ids)[0]) == DECODE(token_ids)


@given(st.text(max_size=30))
def test_characters_stay_whole(text):
    token_ids = TOKENIZER.encode(text, add_special_tokens=False)
    pieces, _ = stream(token_ids)
    assert "".join(pieces) == DECODE(token_ids)
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@given(ids, st.lists(st.text("ab \n.", min_size=1, max_size=3), min_size=1, max_size=3))
def test_nothing_follows_a_stop_string(token_ids, stops):
    pieces, taken = stream(token_ids, stops)
    text = DECODE(token_ids)
    ends = [text.find(stop) for stop in stops if stop in text]
    assert "".join(pieces) == text[: min(ends, default=len(text))]
    if ends:
        before = DECODE(token_ids[: taken - 1])
        assert not any(stop in before for stop in stops)


@pytest.mark.parametrize("whole", [True, False])
def test_a_stop_string_across_tokens_is_found(whole):
    token_ids = TOKENIZER.encode("x = 10; END of it", add_special_tokens=False)
    text = TextStream(DECODE, ["; END"])
    given_ids = [token_ids] if whole else [[token_id] for token_id in token_ids]
    assert "".join(text.push(*some) for some in given_ids if not text.stopped) == "x = 10"
    assert text.stopped
    assert text.finish() == ""
