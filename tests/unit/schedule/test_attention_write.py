"""Runs and tiles, against pairs one by one."""

import doctest
import importlib
import pkgutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import equipoise.schedule
from equipoise.schedule.attention_write import (
    head_blocks,
    join_runs,
    keys_read,
    kv_heads_of,
    tiles_between,
)

TOKENS = st.sets(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=20)


def runs_of(tokens: set[tuple[int, int]]) -> np.ndarray:
    return join_runs(np.array([(d, t, t + 1) for d, t in tokens]).reshape(-1, 3))


def tokens_of(runs: np.ndarray) -> set[tuple[int, int]]:
    return {(d, t) for d, start, stop in runs.tolist() for t in range(start, stop)}


@given(TOKENS)
def test_joined_runs_hold_the_same_tokens_apart(tokens) -> None:
    runs = runs_of(tokens)
    assert tokens_of(runs) == tokens
    ends = {(d, stop) for d, _, stop in runs.tolist()}
    assert not ends & {(d, start) for d, start, _ in runs.tolist()}
    assert runs.tolist() == sorted(runs.tolist())


@given(TOKENS, TOKENS)
def test_tiles_are_the_causal_pairs_between_runs(queries, keys) -> None:
    tiles = tiles_between(runs_of(queries), runs_of(keys), [(0, 1)])
    found = [
        (d, query, key)
        for d, q0, q1, k0, k1, is_causal, *_ in tiles.tolist()
        for query in range(q0, q1)
        for key in range(k0, query + 1 if is_causal else k1)
    ]
    assert len(found) == len(set(found))
    assert set(found) == {
        (d, query, key) for d, query in queries for e, key in keys if d == e and key <= query
    }


@given(TOKENS, TOKENS)
def test_keys_read_are_those_of_some_pair(queries, keys) -> None:
    read = tokens_of(keys_read(runs_of(queries), runs_of(keys)))
    assert read == {(d, k) for d, k in keys if any(d == e and k <= q for e, q in queries)}


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
