"""The bound on a prompt's text: no text that is longer has few enough tokens."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest
from art_server.inference.openai.prompt_length import LONG, PromptLength, is_long, longest_token
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from art_cloud.shared.errors import ContextLengthError


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model)


def with_rules(tokenizer: PreTrainedTokenizerBase, **rules: object) -> PreTrainedTokenizerFast:
    """The tiny model's tokenizer with other rules, or another special token."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    for name, rule in rules.items():
        if name == "token":
            backend.add_special_tokens([rule])
        else:
            setattr(backend, name, rule)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=200) | st.text("the quick brown <|im_start|>", max_size=200))
def test_no_token_stands_for_more(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    longest = longest_token(tokenizer)
    assert longest is not None
    assert len(tokenizer.encode(text)) >= len(text.encode()) / longest


def test_the_bound_is_as_tight_as_the_longest_token(tokenizer: PreTrainedTokenizerBase) -> None:
    token = max(tokenizer.get_vocab(), key=len)
    assert longest_token(tokenizer) == len(token)
    text = tokenizer.convert_tokens_to_string([token]) * 100
    length = PromptLength.of(tokenizer, len(tokenizer.encode(text)))
    length.check(text)
    assert length.text_bytes is not None
    with pytest.raises(ContextLengthError, match="Shorten it"):
        length.check("x" * (length.text_bytes + 1))
    with pytest.raises(ContextLengthError):
        length.check("\U0001f600" * (length.text_bytes // 4 + 1))


def test_normal_form_c_makes_a_text_shorter_and_the_bound_longer(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    composing = with_rules(tokenizer, normalizer=normalizers.NFC())
    plain, composed = longest_token(tokenizer), longest_token(composing)
    assert plain is not None
    assert composed == 3 * plain
    worst = max(
        len(unicodedata.normalize("NFD", chr(code)).encode())
        / len(unicodedata.normalize("NFC", chr(code)).encode())
        for code in range(0x110000)
        if not 0xD800 <= code < 0xE000
    )
    assert worst <= 3


def test_where_a_token_may_stand_for_any_text_there_is_no_bound(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    greedy = AddedToken("<|tool|>", rstrip=True, special=True)
    for rules in (
        {"normalizer": normalizers.Strip()},
        {"normalizer": normalizers.Replace("  ", " ")},
        {"pre_tokenizer": pre_tokenizers.WhitespaceSplit()},
        {"token": greedy},
    ):
        assert longest_token(with_rules(tokenizer, **rules)) is None
    words = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    words.decoder = decoders.WordPiece()
    unbounded = PreTrainedTokenizerFast(tokenizer_object=words)
    PromptLength.of(unbounded, 10).check("x" * 1_000_000)


def test_long_is_a_matter_of_characters_and_values() -> None:
    assert not is_long({"prompt": "x" * (LONG - 100), "n": 1})
    assert is_long({"prompt": "x" * LONG})
    assert is_long({"prompt": [[1] * 40_000, [2] * 40_000]})
    assert not is_long({"prompt": [1] * 1000})
    deep: object = []
    for _ in range(10_000):
        deep = [deep]
    assert not is_long(deep)
