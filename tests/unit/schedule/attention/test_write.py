"""Shares of heads, and examples."""

import doctest
import importlib
import pkgutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

import equipoise.schedule
import equipoise.spec.mask
from equipoise.schedule.attention.write import head_blocks, kv_heads_of


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_head_blocks_are_groups_or_parts_of_one(kv_heads: int, ratio: int, data) -> None:
    heads = kv_heads * ratio
    first = data.draw(st.integers(0, heads))
    stop = data.draw(st.integers(first, heads))
    blocks = head_blocks(first, stop, heads, kv_heads)
    assert [head for low, high in blocks for head in range(low, high)] == list(range(first, stop))
    assert len(blocks) <= 3
    for low, high in blocks:
        assert low // ratio == (high - 1) // ratio or low % ratio == high % ratio == 0
    g0, g1 = kv_heads_of(first, stop, heads, kv_heads)
    assert list(range(g0, g1)) == sorted({head // ratio for head in range(first, stop)})


NAMES = [f"equipoise.schedule.{m.name}" for m in pkgutil.iter_modules(equipoise.schedule.__path__)]


@pytest.mark.parametrize("name", NAMES)
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_examples_of_masks() -> None:
    assert doctest.testmod(equipoise.spec.mask).failed == 0
