"""Price curves: positive, growing with length, meeting what was measured."""

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balance.context.sharding import split_context
from equipoise.balance.groups.cost import GroupCosts
from equipoise.balance.partition import partition
from equipoise.balance.stage import price_layers
from equipoise.base.errors import SpecError
from equipoise.cost.curve import LoadCurve, break_even_curve, counted_curve
from equipoise.cost.work import count_work, pair_flop, useful_flop
from equipoise.spec.model.presets import ModelSpec, WindowSpec, preset
from equipoise.spec.pack import MicroBatch

MODEL = ModelSpec(layers=2, hidden=64, heads=4, kv_heads=2, ffn=96, vocab=300, head_width=16)


@st.composite
def curves(draw) -> LoadCurve:
    points = draw(st.lists(st.integers(1, 1 << 17), min_size=1, max_size=8, unique=True))
    steps = draw(st.lists(st.floats(1, 1e9), min_size=len(points), max_size=len(points)))
    return LoadCurve(
        fixed_ns=draw(st.floats(0, 1e9)),
        ns_per_token=draw(st.floats(0, 1e6)),
        doc_tokens=tuple(float(point) for point in sorted(points)),
        doc_ns=tuple(np.cumsum(steps).tolist()),
        peak_flop_per_s=1e12,
        measured=True,
    )


@given(curves(), st.lists(st.integers(1, 1 << 20), min_size=2, max_size=30))
def test_loads_are_positive_and_grow_with_length(curve: LoadCurve, lengths: list[int]) -> None:
    loads = curve.document_ns(np.array(sorted(lengths)))
    assert loads.dtype == np.int64
    assert (loads >= 1).all()
    assert (np.diff(loads) >= 0).all()


@given(curves())
def test_loads_meet_the_measured_points(curve: LoadCurve) -> None:
    lengths = np.array(curve.doc_tokens)
    expected = np.array(curve.doc_ns) + curve.ns_per_token * lengths
    found = curve.document_ns(lengths.astype(np.int64))
    assert np.abs(found - expected).max() <= 0.5 + 1e-9 * expected.max()


def test_beyond_the_ends_attention_grows_with_pairs_and_shrinks_with_the_length() -> None:
    curve = LoadCurve(0.0, 0.0, (64.0, 1024.0), (1e6, 1e8), 1e12, True)
    pairs = np.array([1024, 2048, 4096]) * np.array([1025, 2049, 4097])
    expected = np.rint(1e8 * pairs / pairs[0])
    assert np.abs(curve.document_ns(np.array([1024, 2048, 4096])) - expected).max() <= 1
    assert abs(int(curve.document_ns(np.array([32]))[0]) - 1e6 * (32 * 33 / (64 * 65)) ** 0.5) <= 1


@given(st.integers(1, 5000), st.lists(st.integers(1, 4999), max_size=5))
def test_slices_of_a_document_add_up_where_pairs_cost_alike(tokens: int, cuts: list[int]) -> None:
    curve = counted_curve(preset("7m"), flop_per_s=1e9)
    bounds = np.unique([0, *(cut for cut in cuts if cut < tokens), tokens])
    parts = curve.slice_ns(bounds[:-1], bounds[1:])
    whole = int(curve.document_ns(np.array([tokens]))[0])
    assert abs(int(parts.sum()) - whole) <= len(parts) + 1e-12 * whole


def test_a_slice_costs_what_a_document_of_as_many_pairs_costs_plus_its_tokens() -> None:
    curve = LoadCurve(0.0, 1000.0, (10.0, 100.0, 1000.0), (500.0, 9000.0, 400_000.0), 1e12, True)
    pairs = 400 * 401 // 2 - 200 * 201 // 2
    expected = float(curve.attention_ns(pairs)) + 200 * 1000
    assert curve.slice_ns(np.array([200]), np.array([400])).tolist() == [round(expected)]
    assert curve.attention_ns(0) == 0


def test_tokens_cost_the_experts_of_the_fullest_rank() -> None:
    model = preset("moe-3m")
    even, skewed = (counted_curve(model, expert_skew=skew) for skew in (1.0, 3.0))
    more = 6 * 2 * model.sparse_layers * model.top_k * model.expert_params / 1e12 * 1e9
    assert skewed.ns_per_token - even.ns_per_token == pytest.approx(more)
    assert skewed.doc_ns == even.doc_ns
    for dense in ("2m", "7m"):
        assert counted_curve(preset(dense), expert_skew=3.0) == counted_curve(preset(dense))
    for skew in (0.5, float("nan"), float("inf")):
        with pytest.raises(SpecError) as caught:
            counted_curve(model, expert_skew=skew)
        said = f"expert_skew is {skew}. Give a ratio from 1 (balanced)."
        assert str(caught.value) == said


@given(st.lists(st.integers(1, 1 << 17), min_size=1, max_size=12))
def test_a_counted_curve_is_flop(lengths: list[int]) -> None:
    curve = counted_curve(preset("7m"), flop_per_s=1e9)  # so that a FLOP is a nanosecond
    found = int(curve.document_ns(np.array(lengths)).sum())
    exact = count_work(np.array(lengths), preset("7m")).flop
    assert abs(found - exact) <= 1e-12 * exact + len(lengths)


@pytest.mark.parametrize(
    "window", [WindowSpec(1, 1.0), WindowSpec(7, 0.5), WindowSpec(8, 0.75, is_chunk=True)]
)
def test_a_counted_curve_counts_windows_pair_by_pair(window: WindowSpec) -> None:
    model = dataclasses.replace(MODEL, window=window)
    curve = counted_curve(model, flop_per_s=1e9)  # so that a FLOP is a nanosecond
    tokens = 40
    query, key = np.arange(tokens)[:, None], np.arange(tokens)
    causal = key <= query
    near = query // 8 == key // 8 if window.is_chunk else query - key < window.tokens
    mean = causal.sum(1) * (1 - window.share) + (causal & near).sum(1) * window.share
    for start, stop in [(0, 1), (0, 40), (3, 29), (20, 40), (39, 40)]:
        wanted = useful_flop(model, stop - start, 0)
        wanted += 3 * pair_flop(model) * float(mean[start:stop].sum())
        found = curve.slice_ns(np.array([start]), np.array([stop]))
        assert abs(int(found[0]) - wanted) <= 1
    whole = curve.document_ns(np.array([1, tokens]))
    assert np.abs(whole - curve.slice_ns(np.zeros(2), np.array([1, tokens]))).max() <= 1
    assert abs(int(whole[1]) - count_work(np.array([tokens]), model).flop) <= 2 * pair_flop(model)
    shares = curve.shared_attention_ns(np.array([tokens]), np.array([4]))
    attention = curve.slice_attention_ns(np.array([0]), np.array([tokens]))
    assert shares.tolist() == pytest.approx((attention / 4).tolist())


def test_parts_of_a_document_with_a_window_are_split_by_what_they_read() -> None:
    model = dataclasses.replace(MODEL, window=WindowSpec(16, 1.0))
    curve = counted_curve(model, flop_per_s=1e9)
    split = split_context([4096], ranks=2, strategy="contiguous", curve=curve)
    exact = curve.slice_ns(np.array([0, 2048]), np.array([2048, 4096]))
    assert split.load_ns.tolist() == exact.tolist()
    halves = [
        MicroBatch(np.array([[0, 2048 * at, 2048 * at + 2048]]), np.array([0])) for at in (0, 1)
    ]
    prices = price_layers(curve, model, halves).attention_ns
    assert prices[1] / prices[0] == pytest.approx(2048 * 16 / (2048 * 16 - 15 * 16 / 2))
    alone, shared = GroupCosts(curve).share_ns(np.array([4096]), np.array([1, 4])).tolist()
    assert alone == pytest.approx(4 * shared, rel=1e-6)


def test_the_rate_of_a_counted_curve_scales_every_load_alike() -> None:
    lengths = np.array([100, 5000])
    slow = counted_curve(MODEL, flop_per_s=1e6).document_ns(lengths)
    fast = counted_curve(MODEL, flop_per_s=1e7).document_ns(lengths)
    assert np.allclose(slow / fast, 10, rtol=1e-4)


def test_a_curve_is_plain_data() -> None:
    curve = counted_curve(MODEL)
    assert LoadCurve(**dataclasses.asdict(curve)) == curve


@given(st.lists(st.integers(1, 1 << 17), min_size=2, max_size=12))
def test_an_endless_break_even_length_counts_tokens_and_one_of_nothing_squares(lengths) -> None:
    doc_tokens = np.array(lengths)
    tokens = break_even_curve(float("inf")).document_ns(doc_tokens)
    assert (tokens == 1_000_000 * doc_tokens).all()
    squares = break_even_curve(1e-9).document_ns(doc_tokens)
    assert (squares == 1000 * doc_tokens * (doc_tokens + 1)).all()


def test_an_endless_length_packs_by_tokens_and_one_of_nothing_by_squares() -> None:
    lengths = np.array([6, 3, 3, 3, 3])
    by_tokens = partition(break_even_curve(1e12).document_ns(lengths), 2)
    assert sorted(np.bincount(by_tokens, lengths, 2).tolist()) == [9, 9]
    by_squares = partition(break_even_curve(1e-9).document_ns(lengths), 2)
    assert by_squares.tolist() == [0, 1, 1, 1, 0] or by_squares.tolist() == [0, 1, 1, 1, 1]
    loads = np.bincount(by_squares, lengths * (lengths + 1), 2)
    assert loads.max() == 48


@pytest.mark.parametrize("name", ["llama3-8b", "llama3-70b"])
def test_the_break_even_length_is_the_models(name: str) -> None:
    model = preset(name)
    with_head = model.matmul_params / (model.layers * model.heads * model.head_width)
    found = counted_curve(model).break_even_tokens
    assert abs(found + 1 - with_head) <= 1e-6 * with_head
    assert abs(break_even_curve(28_000).break_even_tokens - 27_999) < 1e-3
    assert break_even_curve(float("inf")).break_even_tokens == float("inf")


@pytest.mark.parametrize("length", [0.0, -5.0, float("nan")])
def test_a_break_even_length_must_be_above_0(length: float) -> None:
    with pytest.raises(
        SpecError,
        match=re.escape(
            f"The break-even length is {length:g} tokens. Give one above 0: published ones lie "
            f"near 30,000 to 200,000, and inf counts only tokens."
        ),
    ):
        break_even_curve(length)
