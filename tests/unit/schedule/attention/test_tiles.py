"""Runs and tiles, against tokens and pairs one by one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from equipoise.schedule.attention.mask import reads_of
from equipoise.schedule.attention.runs import cut_runs, join_runs, meet_runs
from equipoise.schedule.attention.tiles import runs_read, tiles_between
from equipoise.spec.mask import Mask
from support.placements import masks_for, pairs_of, written_out

DOC_TOKENS = np.array([10, 10, 10])
TOKENS = st.sets(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=30)
RUNS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(1, 4)), max_size=8)
MASKS = st.tuples(*[masks_for(10)] * 3)


def runs_of(tokens: set[tuple[int, int]]) -> np.ndarray:
    return join_runs(np.array([(d, t, t + 1) for d, t in tokens]).reshape(-1, 3))


def tokens_of(runs: np.ndarray) -> set[tuple[int, int]]:
    return {(d, t) for d, start, stop in runs.tolist() for t in range(start, stop)}


@given(RUNS)
def test_joined_runs_hold_the_same_tokens_apart(rows) -> None:
    runs = np.array([(d, start, start + size) for d, start, size in rows]).reshape(-1, 3)
    joined = join_runs(runs)
    assert tokens_of(joined) == tokens_of(runs)
    ends = {(d, stop) for d, _, stop in joined.tolist()}
    assert not ends & {(d, start) for d, start, _ in joined.tolist()}
    assert joined.tolist() == sorted(joined.tolist())
    assert len(tokens_of(joined)) == (joined[:, 2] - joined[:, 1]).sum()


@given(RUNS, TOKENS)
def test_runs_meet_where_they_share_a_token(rows, tokens) -> None:
    runs = np.array([(d, start, start + size) for d, start, size in rows]).reshape(-1, 3)
    others = runs_of(tokens)
    one, other = meet_runs(runs, others)
    assert list(zip(one.tolist(), other.tolist(), strict=True)) == [
        (i, j)
        for i, run in enumerate(runs)
        for j, against in enumerate(others)
        if tokens_of(run[None]) & tokens_of(against[None])
    ]


def pairs_between(queries, keys, masks) -> set[tuple[int, int, int]]:
    allowed = [written_out(mask, 10) for mask in masks]
    return {(d, q, k) for d, q in queries for e, k in keys if d == e and allowed[d][q, k]}


@given(TOKENS, TOKENS, MASKS)
def test_tiles_are_the_masks_pairs_between_runs(queries, keys, masks) -> None:
    reads = reads_of(masks, DOC_TOKENS)
    tiles = tiles_between(runs_of(queries), runs_of(keys), [(0, 1)], reads)
    found = [(d, query, key) for d, query, key, _ in pairs_of(tiles)]
    assert len(found) == len(set(found))
    assert set(found) == pairs_between(queries, keys, masks)


@given(TOKENS, TOKENS, MASKS)
def test_no_row_of_a_tile_is_without_a_key(queries, keys, masks) -> None:
    """Of such a row aten's flash operator returns a log-sum-exp of 0."""
    reads = reads_of(masks, DOC_TOKENS)
    tiles = tiles_between(runs_of(queries), runs_of(keys), [(0, 1)], reads)
    for tile in tiles:
        queries_of_tile = {query for _, query, _, _ in pairs_of(tile[None])}
        assert queries_of_tile == set(range(tile[1], tile[2]))
        assert tile[5] == 0 or tile[2] - tile[1] == tile[4] - tile[3]


@given(TOKENS, TOKENS, MASKS)
def test_keys_read_are_those_of_some_pair(queries, keys, masks) -> None:
    read = runs_read(runs_of(queries), reads_of(masks, DOC_TOKENS))
    read = tokens_of(cut_runs(runs_of(keys), read))
    assert read == {(d, k) for d, _, k in pairs_between(queries, keys, masks)}


def count_tiles(tokens: int, mask: Mask) -> int:
    run = np.array([[0, 0, tokens]])
    return len(tiles_between(run, run, [(0, 1)], reads_of([mask], np.array([tokens]))))


def test_few_tiles_do() -> None:
    assert count_tiles(4096, Mask()) == count_tiles(4096, Mask("full")) == 1
    assert count_tiles(4096, Mask("window", 4096)) == 1
    assert count_tiles(4096, Mask("window", 512)) == 8 + 7  # squares, and lower edges between
    assert count_tiles(4096, Mask("prefix", 0, 96, (1000,) * 4)) == 5 + 1
