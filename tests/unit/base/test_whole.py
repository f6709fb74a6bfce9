"""Whole numbers that somebody typed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.base.whole import whole_number


@given(st.text() | st.text("0123456789-+_ .", max_size=30))
def test_whatever_the_text(text: str) -> None:
    number = whole_number(text)
    assert number is None or 0 <= number < 2**63
    assert (number is None) == (not (text.isascii() and text.isdigit() and len(text) <= 18))


@pytest.mark.parametrize("text", ["", "9" * 5000, "\u00b2", "\u0663", "1_000", "+1", " 1", "1\n"])
def test_what_is_not_one(text: str) -> None:
    assert whole_number(text) is None
