"""Divided documents are priced as what they are: own pairs, keys that travel, turns."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from equipoise.balance.packing.pack import make_packer
from equipoise.balance.packing.turns import align_turns, place_turn, require_policy
from equipoise.base.errors import LayoutError
from equipoise.cost.curve import counted_curve
from equipoise.cost.step.request import StepOptions
from equipoise.cost.work import causal_pairs, useful_flop
from equipoise.schedule.attention.price import Links
from equipoise.schedule.attention.strategies import write_attention
from equipoise.sim.attention import AttentionCore, CoreTimes
from equipoise.sim.divided import DividedStep, batch_s, gangs_of, keys_bytes, longest_chain
from equipoise.sim.gangs import GangCore, TurnGang
from equipoise.sim.machine import Machine
from equipoise.sim.parts import StepParts
from equipoise.sim.step import run_step
from equipoise.spec.catalog import POLICIES
from equipoise.spec.layout import Layout
from equipoise.spec.pack import MicroBatch, PackedStep
from equipoise.spec.run.spec import PackSpec
from support.machines import MODEL, h100, options

SMALL = dataclasses.replace(MODEL, layers=4)
CURVE = counted_curve(SMALL)

CUT_AT_WINDOWS = ("in-order", "fixed", "fixed-exact")

LENGTHS = st.lists(
    st.sampled_from([1, 7, 100, 1000, 1000, 4096, 9000, 16384]), min_size=16, max_size=40
)


def pack(policy: str, lengths: list[int], dp: int, context: int) -> PackedStep:
    sizes = np.minimum(np.array(lengths, dtype=np.int64), context)
    pieces = np.stack((np.arange(len(sizes)), np.zeros_like(sizes), sizes), axis=1)
    spec = PackSpec(policy=policy, context_tokens=context, step_tokens=int(sizes.sum()))
    return make_packer(spec, dp, CURVE).step(pieces)


def priced_as(packed: PackedStep) -> "DividedStep | list[list[list[int]]]":
    if POLICIES[packed.policy].divides:
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


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(list(POLICIES)),
    LENGTHS,
    st.sampled_from(
        [(1, 4, 1, 1), (1, 16, 1, 1), (2, 4, 1, 1), (1, 2, 2, 1), (1, 2, 1, 2), (2, 2, 1, 4)]
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
        require_policy(policy, context=cp, pipeline=pp)
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


def test_a_step_is_the_longest_chain_of_gangs() -> None:
    def part(document: int, start: int, stop: int) -> MicroBatch:
        return MicroBatch(np.array([[document, start, stop]]), np.array([0]))

    def whole(document: int, tokens: int) -> MicroBatch:
        return MicroBatch(np.array([[document, 0, tokens]]), np.array([0]))

    # Rank 1 waits for rank 0's long first document, rank 2 then for rank 1.
    packed = PackedStep(
        "gangs",
        (
            (whole(0, 16384), part(1, 0, 2048)),
            (whole(2, 512), part(1, 2048, 4096), part(3, 0, 2048)),
            (whole(4, 512), part(3, 2048, 4096)),
        ),
    )
    step, machine, layout = DividedStep.of(packed), h100(3), Layout(dp=3)
    parts = StepParts(SMALL, machine, layout, options(step_sequences=3))
    chain = longest_chain(parts, step, layout)
    turns = [{gang.ranks: gang for gang in gangs} for gangs in step.turns]
    expected = [turns[0][0,], turns[1][0, 1], turns[2][1, 2]]
    assert chain.batches == tuple(parts.price_gang(gang) for gang in expected)
    assert max(chain.tokens) == 16384
    # Ranks that meet in every turn wait for its slowest.
    together = longest_chain(parts, step, dataclasses.replace(layout, zero=3))
    assert len(together.batches) == 3
    assert sum(map(batch_s, together.batches)) >= sum(map(batch_s, chain.batches))


def gang_of(ranks: int, tokens: int) -> TurnGang:
    packed = pack("divided", [tokens], ranks, tokens)
    (gang,) = gangs_of(align_turns(packed), 0)
    assert len(gang.ranks) == ranks
    return gang


def core_of(gang: TurnGang, machine: Machine) -> GangCore:
    layout = Layout(dp=machine.cluster.devices)
    core = AttentionCore(SMALL, layout, options(), machine, machine.context_links(layout))
    links = machine.data_links(layout)
    return core.gang(gang, Links(links.near, links.far, links.node_of[: len(gang.ranks)]))


@pytest.mark.parametrize("ranks", [2, 8, 16, 96])
def test_a_gang_too_wide_to_replay_takes_about_what_it_would(ranks: int) -> None:
    gang, machine = gang_of(ranks, 4096 * ranks), h100(max(8, ranks))
    replayed = core_of(gang, machine)
    assert replayed.schedule is not None
    summed = dataclasses.replace(replayed, schedule=None)
    starts = np.zeros(ranks)
    for is_backward in (False, True):
        compute = replayed.compute_s()[is_backward]
        exact, about = (each.ends_s(starts, is_backward=is_backward) for each in (replayed, summed))
        assert (exact >= compute * (1 - 1e-9)).all() and (about >= compute * (1 - 1e-9)).all()
        assert 0.6 <= about.max() / exact.max() <= 1.6


def test_a_very_wide_gang_computes_all_pairs() -> None:
    gang, machine = gang_of(128, 1 << 19), h100(128)
    core = core_of(gang, machine)
    assert core.schedule is None
    assert (core.ends_s(np.zeros(128)) >= core.compute_s()[0]).all()
    assert gang.received_tokens.sum() == gang.sent_tokens.sum() > 0


def test_keys_travel_over_the_links_between_their_ranks() -> None:
    machine = h100(16)
    links = machine.data_links(Layout(dp=16))
    assert links.far.bytes_per_s < links.near.bytes_per_s
    assert links.node_of == (0,) * 8 + (1,) * 8
    # Eight tensor-parallel ranks fill a node, so their data-parallel peers are elsewhere.
    apart = machine.data_links(Layout(tp=8, dp=2))
    assert apart.is_far(0, 1)
    gang = gang_of(8, 1 << 16)
    near, far = (
        dataclasses.replace(core_of(gang, machine), links=Links(links.near, links.far, nodes))
        for nodes in ((0,) * 8, (0, 0, 0, 0, 1, 1, 1, 1))
    )
    for is_backward in (False, True):
        ends = [each.ends_s(np.zeros(8), is_backward=is_backward).max() for each in (near, far)]
        assert ends[0] < ends[1]


def test_documents_divided_over_time_run_in_units() -> None:
    packed = pack("divided-in-time", [4096, *[256] * 16], 1, 4096)
    step = DividedStep.of(packed)
    assert any(stop - first > 1 for first, stop in step.units[0])
    asked = options(step_sequences=2)
    run = run_step(SMALL, h100(2), Layout(pp=2), asked, documents=step)
    assert run.slowest.schedule.units.tolist() == [list(unit) for unit in step.units[0]]


def test_keys_of_others_are_kept() -> None:
    packed = pack("divided", [4096, *[256] * 16], 2, 4096)
    step, layout = DividedStep.of(packed), Layout(dp=2)
    most = max(int(gang.received_tokens.max()) for gangs in step.turns for gang in gangs)
    found = [
        keys_bytes(SMALL, layout, options(recompute=how), step, [list(range(SMALL.layers))])[0]
        for how in ("none", "full")
    ]
    token_bytes = 2 * SMALL.kv_heads * SMALL.head_width * 2
    assert found == [SMALL.layers * most * token_bytes, most * token_bytes]


@pytest.mark.parametrize(
    ("policy", "layout", "message"),
    [
        (
            "divided",
            Layout(cp=2, dp=2),
            'pack.policy = "divided" divides documents over ranks itself, and layout.cp = 2 '
            'would divide them again. Set layout.cp = 1, or pack.policy = "by-work".',
        ),
        (
            "divided",
            Layout(pp=2, dp=2),
            'pack.policy = "divided" divides documents over all ranks at once, and '
            "layout.pp = 2 has ranks that compute one after another. Set layout.pp = "
            '1, or pack.policy = "divided-in-time" or "by-work".',
        ),
        (
            "divided-in-time",
            Layout(dp=2, tp=2),
            'pack.policy = "divided-in-time" lets parts of one document attend to each other from '
            "different micro-batches, which only a pipeline of whole micro-batches runs; "
            "layout.pp = 1 and layout.cp = 1. Set layout.pp = 2 and "
            'layout.cp = 1, or pack.policy = "divided", "by-work" or "delayed".',
        ),
    ],
)
def test_layouts_that_no_ranks_train_have_no_price(policy, layout, message) -> None:
    step = DividedStep.of(pack(policy, [4096, *[256] * 16], 2, 4096))
    with pytest.raises(LayoutError) as refused:
        run_step(SMALL, h100(4), layout, options(step_sequences=2), documents=step)
    assert str(refused.value) == message
