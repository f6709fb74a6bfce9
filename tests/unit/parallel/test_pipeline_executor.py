"""The executor of pipelines, all ranks in one process: any schedule equals one rank."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.base.errors import CheckError, LayoutError
from equipoise.parallel.pipeline.executor import Executor, StageBatch
from equipoise.parallel.pipeline.pipeline import play_pipeline
from equipoise.parallel.pipeline.program import compile_rank
from equipoise.schedule.pipeline.instruction import Op
from equipoise.schedule.pipeline.messages import list_messages
from equipoise.schedule.pipeline.prices import make_prices
from equipoise.schedule.pipeline.strategies import write_pipeline
from equipoise.spec.catalog import LOSSY, SCHEDULES
from equipoise.spec.run.spec import Recompute
from support.decoders import (
    LENGTHS,
    MODEL,
    TIED,
    batches_of,
    gradient_errors,
    labels_in,
    layers_of_paths,
    one_rank,
    parts_of,
    schedule_of,
    uneven_edges,
    whole_model,
)
from support.pipelines import WHOLE, steps, write_if_legal

RECOMPUTE: dict[int, Recompute] = {1: "every-2", 2: "selective", 3: "full", 4: "attention"}
SMALL = dataclasses.replace(MODEL, layers=3)


def play(model, schedule, batches, *, edges=None, recompute="none", alone=None, **more):
    """Worst error of any gradient on any rank, the loss, and every rank's gradients."""
    if edges is None:
        edges = uneven_edges(model.layers, schedule.stages)
    parts = parts_of(model, edges, schedule, recompute=recompute)
    lossy = schedule.is_lossy
    runs = play_pipeline(
        parts, schedule, batches, divisor=labels_in(batches), allow_lossy=lossy, **more
    )
    layers = layers_of_paths(schedule, edges) if lossy else None
    loss, wanted = alone if alone and not lossy else one_rank(model, batches, layers)
    errors = {}
    for part in parts:
        errors |= gradient_errors(part, wanted)
    assert errors.keys() == wanted.keys()
    assert sum(run.loss for run in runs) == pytest.approx(loss, rel=1e-12)
    return max(errors.values()), runs, parts


IN_TURN = [
    (strategy, ranks) for at, strategy in enumerate(SCHEDULES) for ranks in ((1, 4), (2, 3))[at % 2]
]
"""Two numbers of ranks for each strategy."""


@pytest.mark.long
@pytest.mark.parametrize(("strategy", "ranks"), IN_TURN)
def test_every_strategy_equals_one_rank(strategy: str, ranks: int) -> None:
    model = TIED if ranks % 2 else MODEL
    batches = batches_of(LENGTHS)
    schedule = schedule_of(strategy, ranks, batches)
    alone = whole_model(model, LENGTHS)
    assert play(model, schedule, batches, recompute=RECOMPUTE[ranks], alone=alone)[0] <= 1e-12


@given(steps(most_chunks=2), st.sampled_from(WHOLE), st.data())
@settings(max_examples=20)
def test_any_schedule_equals_one_rank(step, strategy: str, data: st.DataObject) -> None:
    ranks, prices = step
    schedule = write_if_legal(strategy, prices, ranks=ranks)
    if schedule is None:
        return
    document = st.lists(st.integers(0, 6), max_size=3)
    lengths = data.draw(
        st.lists(document, min_size=schedule.micro_batches, max_size=schedule.micro_batches)
    )
    lengths[0] = [*lengths[0], 2]  # a label somewhere
    inner = st.integers(0, SMALL.layers)
    cuts = data.draw(st.lists(inner, min_size=schedule.stages - 1, max_size=schedule.stages - 1))
    edges = (0, *sorted(cuts), SMALL.layers)
    model = dataclasses.replace(SMALL, tied=data.draw(st.booleans()))
    sent = np.zeros((ranks, ranks), dtype=np.int64)
    batches = batches_of(lengths)
    error, runs, _ = play(model, schedule, batches, edges=edges, sent_bytes=sent)
    assert error <= 1e-12
    width = 8 * model.hidden
    expected = np.zeros_like(sent)
    for m in list_messages(schedule):
        expected[m.source, m.target] += width * len(batches[m.micro_batch].tokens_t)
    first, last = schedule.rank_of[[0, -1]]
    if model.tied and first != last:
        expected[[first, last], [last, first]] += width * model.vocab
    assert (sent == expected).all()
    for rank, run in enumerate(runs):
        rows = np.stack([run.timeline.op, run.timeline.stage, run.timeline.micro_batch], axis=1)
        assert (rows == schedule.orders[rank]).all()


def test_a_rerun_has_the_same_bits() -> None:
    batches = batches_of(LENGTHS)
    schedule = schedule_of("zb-v", 3, batches)
    one, other = (play(TIED, schedule, batches)[2] for _ in range(2))
    for left, right in zip(one, other, strict=True):
        for p, q in zip(left.parameters(), right.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)


def test_copies_of_a_tied_table_have_the_same_bits() -> None:
    batches = batches_of(LENGTHS)
    first, _, last = play(TIED, schedule_of("1f1b", 3, batches), batches)[2]
    assert torch.equal(first.embed.weight.grad, last.embed.weight.grad)


def test_gradients_of_several_runs_add_up() -> None:
    batches = batches_of(LENGTHS)
    halves, parts = (batches[:5], batches[5:]), None
    for half in halves:
        schedule = schedule_of("zb-h1", 2, half)
        parts = parts or parts_of(MODEL, (0, 4, 6), schedule)
        play_pipeline(parts, schedule, half, divisor=labels_in(batches))
    wanted = one_rank(MODEL, batches)[1]
    assert max(max(gradient_errors(part, wanted).values()) for part in parts) <= 1e-12


def test_weights_have_no_gradient_before_their_half() -> None:
    """And nothing is kept at the end."""
    batches = batches_of(LENGTHS[:3])
    prices = make_prices(1, 1, 1, stages=1, micro_batches=3)
    written = write_pipeline("1f1b", prices, ranks=1)
    rows = [(op, 0, m) for m in range(3) for op in (Op.FORWARD, Op.BACKWARD_INPUT)]
    rows += [(Op.BACKWARD_WEIGHT, 0, m) for m in range(3)]
    schedule = dataclasses.replace(written, orders=(np.array(rows),))
    (part,) = parts_of(SMALL, (0, 3), schedule)
    executor = Executor(part, compile_rank(schedule, 0), batches, divisor=1.0, dtype=torch.float64)
    weights = [p for name, p in part.named_parameters() if "attention." in name]
    for place, _ in enumerate(executor.steps()):
        assert all((p.grad is None) == (place <= 6) for p in weights), place
    assert not executor._inputs
    assert not executor._kept
    assert not executor._later


@pytest.mark.parametrize("strategy", LOSSY)
def test_layers_that_are_left_out_have_no_part(strategy: str) -> None:
    batches = batches_of(LENGTHS[:1])
    schedule = schedule_of(strategy, 4, batches)
    parts = parts_of(MODEL, edges := uneven_edges(6, 4), schedule)
    play_pipeline(parts, schedule, batches, divisor=1.0, allow_lossy=True)
    visited = {at for path in layers_of_paths(schedule, edges) for at in path}
    for part in parts:
        for name, p in part.named_parameters():
            if name.startswith("layers."):
                assert (p.grad is not None) == (int(name.split(".")[1]) in visited), name


def refused(batches, *, parts=None, schedule=None, kind=LayoutError, **more) -> str:
    schedule = schedule or schedule_of("1f1b", 2, batches)
    parts = parts or parts_of(SMALL, (0, 1, 3), schedule)
    with pytest.raises(kind) as told:
        play_pipeline(parts, schedule, batches, divisor=1.0, **more)
    return str(told.value)


def test_what_does_not_go_together_is_told() -> None:
    batches = batches_of(LENGTHS[:4])
    two = schedule_of("1f1b", 2, batches)
    parts = parts_of(SMALL, (0, 1, 3), two)
    assert refused(batches, parts=parts[:1]) == (
        "The schedule is for 2 ranks, but the pipeline has 1. Write it for the ranks of the "
        "pipeline."
    )
    assert refused(batches, schedule=schedule_of("interleaved", 2, batches), parts=parts) == (
        "The schedule has 4 stages, but the decoder is cut into 2. Price and schedule the stages "
        "of the decoder."
    )
    assert refused(batches[:3], schedule=two) == (
        "The schedule has 4 micro-batches, but 3 were given. Give every rank all of them, in the "
        "order in which they are priced."
    )
    assert refused(batches, parts=parts[::-1]) == (
        "Rank 0 of the schedule holds stages 0, but its part has 1. Cut the decoder by the "
        "schedule's rank_of."
    )
    short = StageBatch(batches[0].tokens_t, batches[0].labels_t[:-1], (12,))
    assert refused([short, *batches[1:]]) == (
        "Micro-batch 0 has 12 tokens and 11 labels, but its documents have 12 tokens. All three "
        "must be equal."
    )
    turned = dataclasses.replace(two, paths=two.paths[:, ::-1])
    assert refused(batches, schedule=turned) == (
        "Micro-batch 0 goes from stage 1 to stage 0 of 2. Give every path the first stage, which "
        "embeds, and the last, which has the loss."
    )
    lossy = schedule_of("skip-partial", 4, batches)
    assert refused(
        batches, schedule=lossy, parts=parts_of(MODEL, uneven_edges(6, 4), lossy), kind=CheckError
    ) == (
        "skip-partial: Micro-batch 0 takes the path 0 2 3 through 4 stages, which trains another "
        "model. Pass allow_lossy=True if that is meant."
    )


def test_a_schedule_that_waits_for_ever_is_told_before_it_runs() -> None:
    batches = batches_of(LENGTHS[:2])
    schedule = schedule_of("1f1b", 2, batches)
    backwards_first = np.concatenate((schedule.orders[0][2:], schedule.orders[0][:2]))
    assert refused(
        batches,
        schedule=dataclasses.replace(schedule, orders=(backwards_first, schedule.orders[1])),
        kind=CheckError,
    ) == (
        "1f1b: Rank 0 has the input gradient of micro-batch 0 on stage 0 at place 0, before its "
        "forward at place 2."
    )


def test_instructions_of_a_rank_follow_each_other() -> None:
    batches = batches_of(LENGTHS)
    for run in play(MODEL, schedule_of("zb-h1", 2, batches), batches)[1]:
        assert (run.timeline.begin_ns <= run.timeline.end_ns).all()
        assert all(
            end <= begin
            for (_, end), (begin, _) in pairwise(
                zip(run.timeline.begin_ns.tolist(), run.timeline.end_ns.tolist(), strict=True)
            )
        )
