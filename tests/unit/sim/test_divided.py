"""Divided documents are priced as what they are: their own pairs, their keys' travel, their turns."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from machines import MODEL, h100, options

from equipoise.balance.pack import ALL_POLICIES, DIVIDES, make_packer, require_policy
from equipoise.balance.turns import align_turns, place_turn
from equipoise.base.errors import LayoutError
from equipoise.cost.curve import counted_curve
from equipoise.cost.step import StepOptions
from equipoise.cost.work import causal_pairs, useful_flop
from equipoise.schedule.attention_strategies import write_attention
from equipoise.sim.attention import AttentionCore, CoreTimes
from equipoise.sim.divided import DividedStep
from equipoise.sim.machine import Machine
from equipoise.sim.parts import StepParts
from equipoise.sim.step import run_step
from equipoise.spec.layout import Layout
from equipoise.spec.pack import PackedStep
from equipoise.spec.run import PackSpec

SMALL = dataclasses.replace(MODEL, layers=4)
CURVE = counted_curve(SMALL)

CUT_AT_WINDOWS = ("in-order", "fixed", "fixed-exact")

LENGTHS = st.lists(
    st.sampled_from([1, 7, 100, 1000, 1000, 4096, 9000, 16384]), min_size=9, max_size=40
)


def pack(policy: str, lengths: list[int], dp: int, context: int) -> PackedStep:
    sizes = np.minimum(np.array(lengths, dtype=np.int64), context)
    pieces = np.stack((np.arange(len(sizes)), np.zeros_like(sizes), sizes), axis=1)
    spec = PackSpec(policy=policy, context_tokens=context, step_tokens=int(sizes.sum()))
    return make_packer(spec, dp, CURVE).step(pieces)


def priced_as(packed: PackedStep) -> "DividedStep | list[list[list[int]]]":
    if packed.policy in DIVIDES:
        return DividedStep.of(packed)
    return [[batch.doc_tokens.tolist() for batch in rank] for rank in packed.ranks]


def even_share_s(sizes: np.ndarray, layout: Layout, asked: StepOptions, machine: Machine) -> float:
    """Kernels of whole documents, none faster anywhere, in equal parts on all devices."""
    alone = Layout(tp=layout.tp)
    core = AttentionCore(SMALL, alone, asked, machine, machine.context_links(alone))
    pairs = sizes * (sizes + 1.0) / 2.0
    every = np.zeros(len(sizes), dtype=np.int64)
    attention_s = sum(
        SMALL.layers
        * 1e-9
        * core.tiles_ns(np.append(pairs, 1e12), np.append(every, 0), backward=back)[:-1].sum()
        for back in (False, True)
    )
    parts = StepParts(
        SMALL, machine, alone, dataclasses.replace(asked, recompute="none"), core=_Nothing()
    )
    each = []
    for tokens in 2.0 ** np.arange(6, 18):
        found = parts.price(np.array([tokens]))
        layers = sum(float(layer.sum()) for layer in found.layers)
        each.append((layers + float(found.first.sum()) + float(found.last.sum())) / tokens)
    whole_s = attention_s + float(sizes.sum()) * min(each)
    return whole_s / (layout.dp * layout.cp * layout.pp)


class _Nothing:
    """A core that takes no time."""

    def price(self, doc_tokens: Sequence[int]) -> CoreTimes:
        return CoreTimes(float(doc_tokens[0]), 0.0, 0.0, 0.0, 0.0)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(ALL_POLICIES),
    LENGTHS,
    st.sampled_from(
        [(1, 4, 1, 1), (1, 8, 1, 1), (2, 4, 1, 1), (1, 2, 2, 1), (1, 2, 1, 2), (2, 2, 1, 4)]
    ),
    st.sampled_from([0, 1, 3]),
    st.sampled_from(["none", "attention", "selective", "full", "every-2"]),
    st.sampled_from([4096, 16384]),
)
def test_useful_work_is_that_of_the_documents(policy, lengths, degrees, zero, recompute, context):
    tp, dp, cp, pp = degrees
    layout = Layout(tp=tp, dp=dp, cp=cp, pp=pp, zero=zero if pp == 1 else 1)
    try:
        packed = pack(policy, lengths, dp, context)
    except LayoutError:
        assume(False)
    try:
        require_policy(policy, tensor=tp, context=cp, pipeline=pp)
    except LayoutError:
        return
    machine = h100(tp * dp * cp * pp)
    asked = options(context_tokens=context, step_sequences=dp, recompute=recompute, policy=policy)
    run = run_step(SMALL, machine, layout, asked, documents=priced_as(packed))
    sizes = np.minimum(np.array(lengths), context)
    if policy == "delayed" or policy in CUT_AT_WINDOWS:  # documents that wait, or are cut
        sizes = np.concatenate([batch.doc_tokens for batch in packed])
    work = useful_flop(SMALL, int(sizes.sum()), int(causal_pairs(sizes).sum()))
    assert run.price.useful_flop == work
    assert run.price.tokens == sizes.sum()
    # Kernels of sizes that were not measured are read between those that were.
    assert run.price.step_s >= 0.99 * even_share_s(sizes, layout, asked, machine)


@given(st.sampled_from(["divided", "gangs", "flexsp", "bytescale"]), LENGTHS, st.integers(2, 8))
def test_gangs_hold_all_pairs_and_receive_what_the_run_receives(policy, lengths, ranks) -> None:
    packed = pack(policy, lengths, ranks, 4096)
    sizes = np.minimum(np.array(lengths), 4096)
    aligned, step = align_turns(packed), DividedStep.of(packed)
    assert sorted(step.doc_tokens.tolist()) == sorted(sizes.tolist())
    pairs = sum(int(each.sum()) for gangs in step.turns for gang in gangs for each in gang.pairs)
    assert pairs == causal_pairs(sizes).sum()
    assert sum(batch.all_pairs for row in step.rank_slices for batch in row) == pairs
    for turn, gangs in enumerate(step.turns):
        home, doc_tokens = place_turn(aligned, turn)
        whole = write_attention("needed-kv", home, doc_tokens, heads=2, kv_heads=1)
        received = np.zeros(ranks, dtype=np.int64)
        for _, _, each in whole:
            for message in each.sends:
                received[message.peer] += message.tokens
        mine = np.zeros(ranks, dtype=np.int64)
        for gang in gangs:
            mine[list(gang.ranks)] = gang.received_tokens
            assert gang.received_tokens.sum() == gang.sent_tokens.sum()
        assert mine.tolist() == received.tolist()


@given(LENGTHS, st.integers(1, 3))
def test_slices_over_time_hold_all_pairs(lengths, ranks) -> None:
    step = DividedStep.of(pack("divided-in-time", lengths, ranks, 4096))
    sizes = np.minimum(np.array(lengths), 4096)
    assert sorted(step.doc_tokens.tolist()) == sorted(sizes.tolist())
    assert sum(batch.all_pairs for row in step.rows for batch in row) == causal_pairs(sizes).sum()
