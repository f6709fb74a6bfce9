"""Mixed context sharding: even in tokens and in work at once, and no tile lost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balance.context import split_context
from equipoise.balance.context_line import grain_of, lay_out, lay_out_again
from equipoise.balance.context_split import ContextRequest, ContextSplit
from equipoise.balance.tiles import count_tile_pairs
from equipoise.cost.work import Mask
from equipoise.spec.workload import distribution_names, draw_lengths

LENGTHS = st.lists(st.one_of(st.integers(0, 60), st.integers(0, 5000)), min_size=1, max_size=15)
RANKS = st.integers(1, 16)


def mixed(lengths, ranks: int, **options) -> ContextSplit:
    return split_context(lengths, ranks, "mixed", **options)


def pack(name: str, seed: int, tokens: int = 131_072) -> np.ndarray:
    """Documents in order of their drawing, the last one cut where the pack is full."""
    lengths = draw_lengths(name, 4000, seed=seed)
    count = int(np.searchsorted(np.cumsum(lengths), tokens))
    return np.append(lengths[:count], tokens - lengths[:count].sum())


@given(LENGTHS, RANKS, st.sampled_from([0.02, 0.1, 0.5]))
def test_tokens_are_within_the_slack_and_one(lengths, ranks: int, slack: float) -> None:
    split = mixed(lengths, ranks, token_slack=slack)
    mean = sum(lengths) / ranks
    assert np.abs(split.tokens - mean).max() <= slack * mean + 1


@given(LENGTHS, st.integers(1, 6), st.sampled_from([8, 16]))
def test_where_blocks_are_tiles_no_tile_is_lost(lengths, ranks: int, tile: int) -> None:
    split = mixed(lengths, ranks, tile=tile, token_slack=1e6)
    whole = np.array(lengths, dtype=np.int64)
    whole = whole[whole > 0]
    tiles = count_tile_pairs(np.zeros_like(whole), whole, whole, tile=tile)
    assert split.tile_pairs.sum() == tiles.sum()


@given(LENGTHS, RANKS, st.randoms(use_true_random=False))
def test_the_order_of_documents_does_not_matter(lengths, ranks: int, random) -> None:
    shuffled = list(lengths)
    random.shuffle(shuffled)
    once, again = mixed(lengths, ranks), mixed(shuffled, ranks)
    assert once.pairs.tolist() == again.pairs.tolist()
    assert once.tokens.tolist() == again.tokens.tolist()
    assert once.travel_tokens.tolist() == again.travel_tokens.tolist()


@given(LENGTHS, RANKS)
def test_cuts_are_at_multiples_of_the_grain(lengths, ranks: int) -> None:
    grain = grain_of(ContextRequest(np.array(lengths), ranks))
    assert 128 % grain == 0
    for document, start, stop in np.concatenate(mixed(lengths, ranks).pieces).tolist():
        assert start % grain == 0
        assert stop % grain == 0 or stop == lengths[document]


@pytest.mark.parametrize(
    ("tokens", "ranks", "slack", "tile", "grain"),
    [
        (131_072, 16, 0.02, 128, 128),
        (65_536, 16, 0.02, 128, 64),
        (100, 8, 0.02, 128, 1),
        (10_000, 2, 0.005, 96, 24),
        (10_000, 2, 0.0001, 96, 1),
        (10_000, 2, 0.002, 5, 5),
    ],
)
def test_the_grain_is_a_part_of_the_tile_within_the_slack(
    tokens: int, ranks: int, slack: float, tile: int, grain: int
) -> None:
    request = ContextRequest(np.array([tokens]), ranks, tile, slack)
    assert grain_of(request) == grain


@pytest.mark.parametrize("name", distribution_names())
@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_packs_of_128k_tokens_come_out_even(name: str, ranks: int) -> None:
    splits = [mixed(pack(name, seed), ranks) for seed in range(10)]
    lost = [s.tile_ratio / mixed(pack(name, i), 1).tile_ratio for i, s in enumerate(splits)]
    assert np.mean(lost) <= {2: 1.002, 4: 1.004, 8: 1.015, 16: 1.03}[ranks]
    assert max(split.pair_skew for split in splits) <= 1.04
    assert np.mean([split.pair_skew for split in splits]) <= 1.02
    assert max(split.token_skew for split in splits) <= 1.02
    assert np.mean([split.travel_share for split in splits]) <= 0.40
    assert max(split.fragments for split in splits) <= 5 * ranks


@pytest.mark.parametrize("mask", [Mask(), Mask("full"), Mask("window", 4096)])
def test_other_masks_come_out_even(mask: Mask) -> None:
    split = mixed(pack("pretrain-128k", 1), 8, mask=mask)
    assert split.pair_skew <= 1.03
    assert split.token_skew <= 1.02


def test_many_equal_documents_stay_whole() -> None:
    split = mixed([1024] * 64, 8)
    assert split.fragments == 0
    assert split.travel_tokens.sum() == 0
    assert np.ptp(split.pairs) == 0


def test_one_document_is_even_to_within_a_tile() -> None:
    split = mixed([131_072], 8)
    assert split.pair_skew <= 1.003
    assert split.tile_ratio <= 1.003
    assert split.travel_share <= 0.76


@given(LENGTHS, st.data())
def test_laid_out_again_the_line_holds_what_is_left(lengths, data) -> None:
    request = ContextRequest(np.array(lengths), 4, tile=32)
    if not request.tokens:
        return
    line = lay_out(request, 32)
    count = len(line.row)
    line.first = data.draw(st.integers(0, count - 1))
    line.stop = data.draw(st.integers(line.first + 1, count))
    taken = data.draw(st.sets(st.integers(line.first, line.stop - 1)))
    for place in taken:
        line.owner[place] = line.taken[place] = 3
    blocks = sorted(zip(line.document.tolist(), line.row.tolist(), strict=True))
    tokens = int(line.tokens[line.first : line.stop][line.owner[line.first : line.stop] < 0].sum())
    lay_out_again(line)
    assert sorted(zip(line.document.tolist(), line.row.tolist(), strict=True)) == blocks
    assert (line.owner[line.first : line.stop] < 0).all()
    assert not line.taken
    assert line.tokens_before[line.stop] - line.tokens_before[line.first] == tokens
    for before, values in ((line.tokens_before, line.tokens), (line.work_before, line.work)):
        part = slice(line.first, line.stop)
        assert np.array_equal(np.diff(before[line.first : line.stop + 1]), values[part])
