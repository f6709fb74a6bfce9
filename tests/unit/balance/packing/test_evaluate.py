"""Scores of packs: what is counted is what was packed, whatever shares it."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balance.context.share import share_micro_batch
from equipoise.balance.packing.evaluate import Setting, run_policy, score_policy
from equipoise.cost.curve import break_even_curve
from equipoise.data.stream import DocumentStream
from equipoise.spec.catalog import POLICIES
from equipoise.spec.pack import MicroBatch, Pieces
from equipoise.spec.run.spec import PackSpec

CURVE = break_even_curve(100)
QUICK = [name for name, traits in POLICIES.items() if not traits.is_slow]


def whole(*lengths: int) -> Pieces:
    return np.array([[index, 0, tokens] for index, tokens in enumerate(lengths)])


def make_setting(lengths: list[int], bins: int, **changed: object) -> Setting:
    context = 256
    stream = DocumentStream(lengths, seed=0, context_tokens=context)
    setting = Setting(
        steps=[stream.step(step * bins * context, bins * context) for step in range(3)],
        pack=PackSpec(context_tokens=context, step_tokens=bins * context),
        bins=bins,
        curve=CURVE,
        is_pipeline=True,
        kv_bytes_per_token=10,
    )
    return dataclasses.replace(setting, **changed)


@st.composite
def settings_of_a_pack(draw) -> Setting:
    lengths = draw(st.lists(st.integers(1, 600), min_size=8, max_size=40))
    return make_setting(
        lengths,
        draw(st.integers(1, 4)),
        context_ranks=draw(st.integers(1, 3)),
        is_pipeline=draw(st.booleans()),
    )


@pytest.mark.parametrize("policy", QUICK)
@settings(max_examples=8)
@given(setting=settings_of_a_pack())
def test_every_token_of_every_step_is_on_one_context_rank(policy: str, setting: Setting) -> None:
    records, _ = run_policy(policy, setting)
    tokens = [
        (document, at)
        for record in records
        for share in record.shares
        for document, start, stop in share.pieces.tolist()
        for at in range(start, stop)
    ]
    given_ = [
        (document, at)
        for pieces in setting.steps
        for document, start, stop in pieces.tolist()
        for at in range(start, stop)
    ]
    assert sorted(tokens) == sorted(given_)
    assert all(len(batch) == setting.context_ranks for r in records for batch in r.micro_batches)


@pytest.mark.parametrize("policy", QUICK)
@settings(max_examples=8)
@given(setting=settings_of_a_pack())
def test_a_score_keeps_what_it_promises(policy: str, setting: Setting) -> None:
    score, _ = score_policy(policy, setting)
    assert score.skew >= 1 - 1e-9
    assert score.gap >= -1e-3  # a curve's rounding to whole units, no more
    assert 0 < score.max_tokens_ratio <= 1 + setting.context_ranks / 256
    assert score.delay_max <= (setting.pack.max_delay_steps if policy == "delayed" else 0)
    assert score.documents == sum(len(pieces) for pieces in setting.steps)
    assert score.fragments >= 0
    if setting.context_ranks == 1 and policy not in ("divided", "gangs", "bytescale"):
        assert score.travel_bytes == 0


def test_divided_travels_what_its_parts_miss() -> None:
    setting = make_setting([1], 2, steps=[whole(256, 8)], is_pipeline=False)
    score, [record] = score_policy("divided", setting)
    parts = {tuple(row) for share in record.shares for row in share.pieces.tolist() if row[0] == 0}
    assert parts == {(0, 0, 171), (0, 171, 256)}
    # The rank with the end of it reads all 256 and holds 85.
    assert score.travel_bytes == 10 * 171
    assert score.fragments == 1
    ends_ns = CURVE.slice_ns(np.array([171]), np.array([256])) + CURVE.document_ns(np.array([8]))
    assert score.step_s == pytest.approx(1e-9 * (int(ends_ns[0]) + 1e5 * 0.1 * (171 + 100)))
    assert score.whole_step_s == pytest.approx(1e-9 * CURVE.document_ns(np.array([256]))[0])


def test_in_order_by_hand() -> None:
    setting = make_setting([1], 2, steps=[whole(200, 100, 212)], is_pipeline=False)
    score, _ = score_policy("in-order", setting)
    loads = [CURVE.document_ns(np.array(lengths)).sum() for lengths in ((200, 56), (44, 212))]
    assert score.skew == pytest.approx(2 * max(loads) / sum(loads))
    assert score.fragments == 1
    assert score.bin_seconds == pytest.approx([1e-9 * load for load in sorted(loads)[::-1]])


def test_delay_is_counted_in_steps_and_by_token() -> None:
    setting = make_setting(
        [1],
        2,
        steps=[whole(200, 100, 100), np.array([[3, 0, 200], [4, 0, 60], [5, 0, 60]])],
        pack=PackSpec(context_tokens=256, step_tokens=512, queues=1, max_delay_steps=5),
    )
    score, _ = score_policy("delayed", setting)
    assert (score.delay_mean, score.delay_max) == (200 / 720, 1)


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), max_size=8), st.integers(1, 5))
def test_shares_of_a_micro_batch_hold_its_tokens_and_its_pairs(rows, ranks: int) -> None:
    pieces = np.array(
        [[i, before, before + tokens] for i, (tokens, before) in enumerate(rows)]
    ).reshape(-1, 3)
    batch = MicroBatch(pieces, np.zeros(len(rows), dtype=np.int64))
    shares = share_micro_batch(batch, ranks, CURVE)
    assert len(shares) == ranks
    tokens = [
        (document, at)
        for share in shares
        for document, start, stop in share.pieces.tolist()
        for at in range(start, stop)
    ]
    expected = [(d, at) for d, start, stop in pieces.tolist() for at in range(start, stop)]
    assert sorted(tokens) == expected
    for share in shares:
        froms = share.begins
        assert (froms == 0).all()
