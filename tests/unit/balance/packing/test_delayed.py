"""Outlier queues: each token once, no delay over the promise, resumed in the middle of a queue."""

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balance.packing.delayed import DelayedPacker
from equipoise.base.errors import LayoutError
from equipoise.cost.curve import break_even_curve
from equipoise.data.stream import DocumentStream
from equipoise.spec.pack import PackedStep, Pieces
from equipoise.spec.run.spec import PackSpec

CURVE = break_even_curve(50)


@st.composite
def runs(draw) -> tuple[list[Pieces], PackSpec, int]:
    """Some steps of a stream, and how to pack them."""
    lengths = draw(st.lists(st.integers(1, 300), min_size=1, max_size=30))
    context = draw(st.integers(4, 128))
    ranks = draw(st.integers(1, 4))
    step_tokens = draw(st.integers(1, 3)) * ranks * context
    stream = DocumentStream(lengths, seed=draw(st.integers(0, 9)), context_tokens=context)
    steps = [stream.step(i * step_tokens, step_tokens) for i in range(draw(st.integers(1, 8)))]
    pack = PackSpec(
        policy="delayed",
        context_tokens=context,
        step_tokens=step_tokens,
        max_tokens=draw(st.integers(context, 2 * context)),
        queues=draw(st.integers(1, 3)),
        max_delay_steps=draw(st.integers(0, 5)),
    )
    return steps, pack, ranks


def rows(packed: list[PackedStep]) -> list[tuple[int, ...]]:
    return [tuple(row) for step in packed for batch in step for row in batch.pieces.tolist()]


@given(runs())
def test_every_piece_comes_out_exactly_once(run) -> None:
    steps, pack, ranks = run
    packer = DelayedPacker(pack, ranks, CURVE)
    packed = [packer.step(pieces) for pieces in steps] + packer.flush()
    assert packer.waiting == 0
    assert Counter(rows(packed)) == Counter(tuple(row) for step in steps for row in step.tolist())


@given(runs())
def test_no_micro_batch_is_over_the_cap_and_no_step_is_empty(run) -> None:
    steps, pack, ranks = run
    packer = DelayedPacker(pack, ranks, CURVE)
    for packed in [packer.step(pieces) for pieces in steps] + packer.flush():
        assert max(batch.tokens for batch in packed) <= pack.most_tokens
        assert sum(packed.rank_tokens) > 0
        assert {len(rank) for rank in packed.ranks} == {packed.micro_batches}


@given(runs())
def test_no_document_waits_longer_than_promised(run) -> None:
    steps, pack, ranks = run
    packer = DelayedPacker(pack, ranks, CURVE)
    arrived: dict[tuple[int, ...], list[int]] = {}
    for now, pieces in enumerate(steps):
        for row in pieces.tolist():
            arrived.setdefault(tuple(row), []).append(now)
        for row in rows([packer.step(pieces)]):
            assert now - arrived[row].pop(0) <= pack.max_delay_steps


@given(runs(), st.integers(0, 8))
def test_a_run_resumed_in_the_middle_of_a_queue_goes_on_the_same(run, stop: int) -> None:
    steps, pack, ranks = run
    straight, before = DelayedPacker(pack, ranks, CURVE), DelayedPacker(pack, ranks, CURVE)
    expected = [straight.step(pieces).digest for pieces in steps]
    stop = min(stop, len(steps))
    found = [before.step(pieces).digest for pieces in steps[:stop]]
    after = DelayedPacker(pack, ranks, CURVE)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    found += [after.step(pieces).digest for pieces in steps[stop:]]
    assert found == expected
    assert [step.digest for step in after.flush()] == [step.digest for step in straight.flush()]


@given(runs(), st.integers(1, 4), st.integers(1, 4))
def test_a_run_resumed_with_other_queues_and_ranks_loses_nothing(run, queues, ranks_after) -> None:
    steps, pack, ranks = run
    before = DelayedPacker(pack, ranks, CURVE)
    packed = [before.step(pieces) for pieces in steps]
    after = DelayedPacker(dataclasses.replace(pack, queues=queues), ranks_after, CURVE)
    after.load_state_dict(before.state_dict())
    packed += after.flush()
    assert Counter(rows(packed)) == Counter(tuple(row) for step in steps for row in step.tolist())


def whole(*lengths: int, first: int = 0) -> Pieces:
    return np.array([[first + index, 0, tokens] for index, tokens in enumerate(lengths)])


PACK = PackSpec(policy="delayed", context_tokens=100, step_tokens=200, queues=1, max_delay_steps=2)


def test_an_outlier_waits_for_one_more() -> None:
    packer = DelayedPacker(PACK, 2, CURVE)
    assert rows([packer.step(whole(90, 40, 40, 30))]) == [(1, 0, 40), (3, 0, 30), (2, 0, 40)]
    assert packer.waiting == 1
    packed = packer.step(whole(80, 30, 30, first=4))
    assert packer.waiting == 0
    long = [batch.pieces[0].tolist() for batch in packed]
    assert long == [[0, 0, 90], [4, 0, 80]]


def test_an_outlier_that_is_alone_goes_when_its_time_is_up() -> None:
    packer = DelayedPacker(PACK, 2, CURVE)
    held = [packer.step(whole(90, 40, 40, 30))] + [packer.step(whole(50 - 1, 49)) for _ in range(2)]
    assert [(0, 0, 90) in rows([step]) for step in held] == [False, False, True]


def test_a_document_of_exactly_the_cap_fits() -> None:
    pack = dataclasses.replace(PACK, max_tokens=100, max_delay_steps=0)
    packed = DelayedPacker(pack, 2, CURVE).step(whole(100, 100))
    assert packed.rank_tokens == [100, 100]


def test_a_step_of_outliers_alone_does_not_wait() -> None:
    packed = DelayedPacker(PACK, 2, CURVE).step(whole(90))
    assert sum(packed.rank_tokens) == 90


def test_a_document_over_the_cap_is_refused() -> None:
    with pytest.raises(LayoutError) as caught:
        DelayedPacker(dataclasses.replace(PACK, max_tokens=60), 2, CURVE).step(whole(61, 10))
    assert str(caught.value) == (
        "A document of 61 tokens is over the 60 tokens that one micro-batch may hold. Set "
        "pack.max_tokens = 61, or a smaller pack.context_tokens."
    )


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=30),
    st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 4), st.integers(0, 5)),
        min_size=2,
        max_size=5,
    ),
    st.integers(0, 9),
)
def test_every_piece_comes_out_exactly_once_whatever_the_ranks_of_each_session(
    lengths, sessions, seed: int
) -> None:
    stream = DocumentStream(lengths, seed=seed, context_tokens=64)
    state, packed, given_rows, position = None, [], [], 0
    for ranks, steps, queues, delay in sessions:
        pack = PackSpec(
            policy="delayed",
            context_tokens=64,
            step_tokens=256,
            queues=queues,
            max_delay_steps=delay,
        )
        packer = DelayedPacker(pack, ranks, CURVE)
        if state is not None:
            packer.load_state_dict(json.loads(json.dumps(state)))
        for _ in range(steps):
            pieces = stream.step(position, 256)
            position += 256
            given_rows += [tuple(row) for row in pieces.tolist()]
            packed.append(packer.step(pieces))
            assert max(batch.tokens for batch in packed[-1]) <= pack.most_tokens
        state = packer.state_dict()
    assert Counter(rows(packed + packer.flush())) == Counter(given_rows)


def test_a_document_that_waits_is_not_packed_over_a_smaller_cap() -> None:
    wide = PackSpec(policy="delayed", context_tokens=128, step_tokens=256, max_delay_steps=9)
    packer = DelayedPacker(wide, 2, CURVE)
    packer.step(np.array([[0, 0, 120], [1, 0, 30], [2, 0, 30]], dtype=np.int64))
    state = packer.state_dict()
    assert state["waiting"] == 1
    narrow = dataclasses.replace(wide, context_tokens=64)
    with pytest.raises(LayoutError) as caught:
        DelayedPacker(narrow, 2, CURVE).load_state_dict(state)
    assert str(caught.value) == (
        "A document of 120 tokens waits in the queues of the checkpoint, and a micro-batch of "
        "this run holds 80. Set pack.max_tokens = 120, or train into another folder with --out."
    )
    DelayedPacker(dataclasses.replace(narrow, max_tokens=120), 2, CURVE).load_state_dict(state)
