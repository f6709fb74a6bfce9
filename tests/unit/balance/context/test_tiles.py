"""Tiles of a piece: the mask written out, tile by tile."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balance.tiles import count_tile_pairs
from equipoise.cost.work import Mask, slice_pairs

MASKS = st.one_of(
    st.just(Mask()), st.just(Mask("full")), st.integers(1, 40).map(lambda w: Mask("window", w))
)


@st.composite
def slices(draw) -> tuple[int, int, int]:
    tokens = draw(st.integers(1, 40))
    start = draw(st.integers(0, tokens - 1))
    return start, draw(st.integers(start + 1, tokens)), tokens


def is_read(query: int, key: int, mask: Mask) -> bool:
    if mask.kind == "full":
        return True
    return key <= query and (mask.kind == "causal" or query - key < mask.window_tokens)


def written_out(start: int, stop: int, tokens: int, tile: int, mask: Mask) -> int:
    touched = {
        ((query - start) // tile, key // tile)
        for query in range(start, stop)
        for key in range(tokens)
        if is_read(query, key, mask)
    }
    return len(touched) * tile**2


@given(st.lists(slices(), min_size=1, max_size=6), st.integers(1, 9), MASKS)
def test_tiles_are_those_of_the_mask_written_out(pieces, tile: int, mask: Mask) -> None:
    starts, stops, tokens = np.array(pieces).T
    found = count_tile_pairs(starts, stops, tokens, tile=tile, mask=mask)
    assert found.tolist() == [written_out(*piece, tile, mask) for piece in pieces]
    assert (found >= slice_pairs(starts, stops, tokens, mask)).all()


@given(st.integers(1, 300), st.integers(1, 9), st.data())
def test_a_cut_at_a_multiple_of_the_tile_costs_no_tile(tokens: int, tile: int, data) -> None:
    inner = st.integers(0, tokens // tile).map(lambda at: at * tile)
    cuts = sorted({0, tokens, *data.draw(st.lists(inner, max_size=8))})
    starts, stops = np.array(cuts[:-1]), np.array(cuts[1:])
    whole = count_tile_pairs(np.array([0]), np.array([tokens]), np.array([tokens]), tile=tile)
    parts = count_tile_pairs(starts, stops, np.full(len(starts), tokens), tile=tile)
    assert parts.sum() == whole[0]


@pytest.mark.parametrize(("start", "tiles"), [(0, 3), (128, 2), (129, 3)])
def test_a_cut_elsewhere_costs_tiles(start: int, tiles: int) -> None:
    found = count_tile_pairs(np.array([start]), np.array([256]), np.array([256]))
    assert found.tolist() == [{0: 3, 128: 2, 129: 2}[start] * 128**2]
