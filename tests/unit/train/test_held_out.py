"""Who evaluates which documents: each piece once, ranks alike in number and even in work."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balance.packing.pack import rank_seconds, skew
from equipoise.cost.curve import counted_curve
from equipoise.data.held_out import bucket_of, cut_documents
from equipoise.spec.model.presets import preset
from equipoise.spec.run.spec import LayoutSpec, PackSpec, RunSpec
from equipoise.train.held_out import forward_curve, pack_held_out

CURVE = forward_curve(counted_curve(preset("2m")))
WINDOW = 64


def packed(lengths: np.ndarray, ranks: int, policy: str, zero: int = 1) -> list:
    pieces = cut_documents(np.arange(len(lengths)), lengths, WINDOW)
    bucket = bucket_of(lengths[pieces[:, 0]])
    buckets = tuple(pieces[bucket == number] for number in np.unique(bucket))
    pack = PackSpec(policy=policy, context_tokens=WINDOW, step_tokens=4 * WINDOW)
    spec = RunSpec(pack=pack, layout=LayoutSpec(dp=ranks, zero=zero))
    groups = pack_held_out(buckets, spec, ranks, CURVE)
    for number, step in groups:
        rows = np.concatenate([batch.pieces for batch in step])
        assert set(map(tuple, rows.tolist())) or not len(rows)
        assert (np.unique(bucket)[number] == bucket_of(lengths[rows[:, 0]])).all()
    return groups


@pytest.mark.parametrize("policy", ["in-order", "by-work", "divided", "delayed"])
@given(
    lengths=st.lists(st.integers(2, 300), min_size=1, max_size=25).map(np.array),
    ranks=st.integers(1, 4),
    zero=st.sampled_from([1, 3]),
)
@settings(max_examples=12)
def test_each_token_is_evaluated_once(policy: str, lengths, ranks: int, zero: int) -> None:
    seen = [np.zeros(tokens, dtype=int) for tokens in lengths]
    for _, step in packed(lengths, ranks, policy, zero):
        assert len(step.ranks) == ranks
        assert len({len(batches) for batches in step.ranks}) == 1
        for batch in step:
            for document, start, stop in batch.pieces.tolist():
                seen[document][start:stop] += 1
    assert all((each == 1).all() for each in seen)


def test_ranks_are_even_over_all_groups() -> None:
    lengths = np.random.default_rng(0).lognormal(3.5, 1.0, 300).astype(np.int64).clip(2, 500)
    groups = packed(lengths, 3, "by-work")
    loads = np.sum([rank_seconds(step, CURVE) for _, step in groups], axis=0)
    assert skew(loads.tolist()) < 1.02
    assert len(groups) > 5


def test_few_documents_of_many_lengths_are_shared_out() -> None:
    lengths = np.array([3, 5, 9, 17, 33, 34, 18, 10, 6, 2])
    groups = packed(lengths, 2, "by-work")
    loads = np.sum([rank_seconds(step, CURVE) for _, step in groups], axis=0)
    assert skew(loads.tolist()) < 1.1
    assert all(batch.tokens <= WINDOW * 1.25 for _, step in groups for batch in step)


def test_a_forward_is_a_third_of_linear_layers() -> None:
    curve = counted_curve(preset("2m"))
    assert CURVE.ns_per_token == pytest.approx(curve.ns_per_token / 3)
    assert dataclasses.replace(CURVE, ns_per_token=0.0).doc_ns[0] < curve.doc_ns[0] / 3 + 1e-9
