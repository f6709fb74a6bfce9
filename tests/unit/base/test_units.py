"""Numbers as people read them."""

import pytest

from equipoise.base.nearest import nearest
from equipoise.base.units import format_bytes, format_count, format_seconds


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (2**60, "1024.0 PiB")]
)
def test_bytes(value: int, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(9999, "9,999"), (10_000, "10.0k"), (2.5e9, "2.5B"), (1e12, "1.0T")]
)
def test_counts(value: float, text: str) -> None:
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.5, "500.0 ms"), (59.0, "59.00 s"), (7260.0, "2 h 1 min")]
)
def test_seconds(value: float, text: str) -> None:
    assert format_seconds(value) == text


def test_nearest_takes_the_first_of_equals() -> None:
    assert nearest("xx", ["ab", "cd"]) == "ab"
