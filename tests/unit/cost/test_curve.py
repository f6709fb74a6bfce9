"""Price curves: positive, growing with length, meeting what was measured."""

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from equipoise.cost.curve import LoadCurve, counted_curve
from equipoise.cost.work import count_work
from equipoise.spec.model import ModelSpec, preset

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


def test_beyond_the_last_point_attention_grows_with_the_square() -> None:
    curve = LoadCurve(0.0, 0.0, (64.0, 1024.0), (1e6, 1e8), 1e12, True)
    assert curve.document_ns(np.array([2048, 4096])).tolist() == [400_000_000, 1_600_000_000]
    assert curve.document_ns(np.array([32])).tolist() == [500_000]


def test_a_micro_batch_is_its_documents_and_a_fixed_part() -> None:
    curve = LoadCurve(7e9, 1e9, (1.0,), (1e9,), 1e12, True)
    assert curve.micro_batch_s(np.array([1, 1])) == 7 + 2 * (1 + 1)
    assert curve.micro_batch_s(np.zeros(0, dtype=np.int64)) == 7


@given(st.lists(st.integers(1, 1 << 17), min_size=1, max_size=12))
def test_a_counted_curve_is_flop(lengths: list[int]) -> None:
    curve = counted_curve(preset("7m"), flop_per_s=1e9)  # so that a FLOP is a nanosecond
    found = int(curve.document_ns(np.array(lengths)).sum())
    exact = count_work(np.array(lengths), preset("7m")).flop
    assert abs(found - exact) <= 2e-3 * exact + len(lengths)


def test_the_rate_of_a_counted_curve_scales_every_load_alike() -> None:
    lengths = np.array([100, 5000])
    slow = counted_curve(MODEL, flop_per_s=1e6).document_ns(lengths)
    fast = counted_curve(MODEL, flop_per_s=1e7).document_ns(lengths)
    assert np.allclose(slow / fast, 10, rtol=1e-4)


def test_a_curve_is_plain_data() -> None:
    curve = counted_curve(MODEL)
    assert LoadCurve(**dataclasses.asdict(curve)) == curve
