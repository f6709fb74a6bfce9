"""Items on the ranks that encode them: properties, an oracle, and real photographs."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balance.modality.deal import deal_items
from equipoise.base.errors import LayoutError
from equipoise.data.modality.image import fit_image
from equipoise.spec.modality.encoder import EncoderSpec
from equipoise.spec.modality.sections import VisionSpec

# Height and width of the 28 photographs and drawings that scikit-image 0.26 ships.
PHOTOGRAPHS = [
    *((512, 512),) * 7,
    (172, 448),
    *((303, 384), (400, 600), (370, 371), (660, 550), (300, 451), (200, 200), (200, 200)),
    *((300, 400), (872, 1000), (328, 400), (500, 500), (102, 102), (500, 741), (500, 741)),
    *((15, 10), (25, 14), (191, 384), (400, 400), (1411, 1411), (427, 640)),
]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 10**12), max_size=40), st.integers(1, 9))
def test_every_item_has_one_rank_and_no_rank_more_than_in_turn(work: list[int], ranks: int) -> None:
    dealt = deal_items(np.array(work, dtype=np.int64), ranks)
    assert len(dealt.owner) == len(work)
    assert ((dealt.owner >= 0) & (dealt.owner < ranks)).all()
    loads = [
        sum(w for w, at in zip(work, dealt.owner, strict=True) if at == r) for r in range(ranks)
    ]
    assert dealt.work.tolist() == loads
    assert dealt.work.sum() == dealt.work_in_turn.sum() == sum(work)
    assert dealt.bound <= dealt.work.max() <= dealt.work_in_turn.max()
    assert dealt.skew >= 1.0 or not sum(work)
    again = deal_items(np.array(work, dtype=np.int64), ranks)
    assert again.owner.tolist() == dealt.owner.tolist()


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(2, 3))
def test_it_is_near_the_best_of_all_deals(work: list[int], ranks: int) -> None:
    def fullest(owners: tuple[int, ...]) -> int:
        return max(
            sum(w for w, o in zip(work, owners, strict=True) if o == r) for r in range(ranks)
        )

    best = min(map(fullest, itertools.product(range(ranks), repeat=len(work))))
    dealt = deal_items(np.array(work), ranks)
    assert best <= dealt.work.max() <= best * 4 / 3
    assert dealt.bound <= best


def test_photographs_are_even_by_patches() -> None:
    vision = VisionSpec(layers=1)
    patches = np.array([np.prod(fit_image(*size, vision)) for size in PHOTOGRAPHS])
    assert (len(patches), patches.min(), patches.max()) == (28, 24, 4900)
    dealt = deal_items(patches, 4)
    assert dealt.skew == pytest.approx(1.0066, abs=1e-4)
    orders = np.random.default_rng(0)
    in_turn = [deal_items(orders.permutation(patches), 4).skew_in_turn for _ in range(200)]
    assert min(in_turn) < 1.46 < max(in_turn)  # the published figure is of one order
    assert np.mean(in_turn) > 1.2


def test_a_forward_pass_multiplies_as_often_as_is_counted() -> None:
    spec = EncoderSpec("image", layers=3, hidden=8, heads=2, values=12, merge=(2, 2))
    products = 16 * 12 * 8  # embedding
    products += 3 * 16 * (4 * 8 * 8 + 2 * 8 * 32)  # projections and feed-forwards
    products += 3 * 2 * 16 * 16 * 8  # scores and their sums
    products += 4 * (32 * 32 + 32 * 20)  # joined patches, projected
    assert spec.multiplications(np.array([16]), 20).tolist() == [products]


def test_no_rank_is_refused() -> None:
    with pytest.raises(LayoutError) as refused:
        deal_items(np.array([1]), 0)
    assert str(refused.value) == "0 ranks cannot encode anything. Give at least 1."
