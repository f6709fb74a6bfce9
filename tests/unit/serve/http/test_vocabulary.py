"""Tokens as bytes, for both kinds of tokenizers."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.serve.http.vocabulary import Vocabulary
from support.serving.engine import byte_level
from unit.serve.test_text import pieces

CORES = {"byte level": byte_level(), "pieces": pieces()}


@pytest.mark.parametrize("kind", CORES)
@settings(max_examples=20)
@given(text=st.text(max_size=40))
def test_bytes_of_a_texts_tokens_are_the_text(kind: str, text: str) -> None:
    core: tokenizers.Tokenizer = CORES[kind]
    vocabulary = Vocabulary(core)
    ids = core.encode(text, add_special_tokens=False).ids
    data = b"".join(map(vocabulary.text_bytes, ids))
    if kind == "byte level":
        assert data == text.encode()
    else:  # a word begins with a blank there, which the decoder takes away again
        assert data.decode("utf-8", "replace").removeprefix(" ") == core.decode(ids)


def test_half_a_character_is_named_by_its_bytes() -> None:
    vocabulary = Vocabulary(byte_level())
    first, *_ = byte_level().encode("🙂").ids
    assert vocabulary.name(first) == "bytes:\\xf0"
    assert vocabulary.bytes(first) == b"\xf0"


def test_a_special_token_has_a_name_and_adds_no_text() -> None:
    vocabulary = Vocabulary(byte_level())
    assert vocabulary.name(0) == "<|end|>"
    assert vocabulary.text_bytes(0) == b""


def test_a_token_that_the_tokenizer_lacks_is_nothing() -> None:
    assert Vocabulary(byte_level()).name(100_000) == ""


@settings(max_examples=40)
@given(
    text=st.text(min_size=1, max_size=60) | st.sampled_from([" " * 50, "the " * 9, "<|end|>" * 3])
)
def test_no_text_has_fewer_tokens_than_its_longest_one_allows(text: str) -> None:
    longest = Vocabulary(byte_level()).longest_bytes
    assert longest == 7, "<|end|>"
    assert len(byte_level().encode(text).ids) >= len(text.encode()) / longest


def test_where_a_token_may_stand_for_any_length_none_is_the_longest() -> None:
    assert Vocabulary(pieces()).longest_bytes is None
    for change in (
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"pre_tokenizer": {"type": "Whitespace"}},
    ):
        written = json.loads(byte_level().to_str()) | change
        core = tokenizers.Tokenizer.from_str(json.dumps(written))
        assert Vocabulary(core).longest_bytes is None
    core = tokenizers.Tokenizer.from_str(byte_level().to_str())
    core.add_tokens([tokenizers.AddedToken("<x>", lstrip=True)])
    assert Vocabulary(core).longest_bytes is None
