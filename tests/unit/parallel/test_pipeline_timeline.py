"""Measured timelines: joined, priced, and written to journals."""

import json

import numpy as np

from equipoise.observe.journal import Journal
from equipoise.parallel.pipeline.timeline import join_timelines, measured_prices, write_spans
from equipoise.schedule.pipeline.prices import make_prices
from equipoise.schedule.pipeline.replay import PipelineTimeline, replay_pipeline
from equipoise.schedule.pipeline.strategies import write_pipeline

PRICES = make_prices([[3], [5]], [[4], [2]], [[6], [1]], stages=2, micro_batches=3)


def rows_of(timeline: PipelineTimeline, rank: int, shift: int = 0) -> PipelineTimeline:
    mine = timeline.rank == rank
    columns = [timeline.rank, timeline.op, timeline.stage, timeline.micro_batch]
    times = [timeline.begin_ns + shift, timeline.end_ns + shift]
    return PipelineTimeline(timeline.name, timeline.ranks, *(x[mine] for x in columns + times))


def test_timelines_of_ranks_begin_at_0_together() -> None:
    whole = replay_pipeline(write_pipeline("zb-h1", PRICES, ranks=2), PRICES)
    joined = join_timelines([rows_of(whole, rank, shift=10**18) for rank in range(2)])
    for name in ("rank", "op", "stage", "micro_batch", "begin_ns", "end_ns"):
        assert (getattr(joined, name) == getattr(whole, name)).all()
    assert joined.makespan_ns == whole.makespan_ns
    empty = join_timelines([rows_of(whole, 5)])
    assert (empty.makespan_ns, len(empty.rank)) == (0, 0)


def test_prices_of_a_replay_are_its_own() -> None:
    for strategy in ("zb-h1", "1f1b"):
        timeline = replay_pipeline(write_pipeline(strategy, PRICES, ranks=2), PRICES)
        found = measured_prices([timeline, timeline], PRICES)
        assert (found.of_ops() == PRICES.of_ops()).all(), strategy
    other = make_prices(9, 1, 1, stages=2, micro_batches=3)
    halves = measured_prices([timeline], other)
    assert (halves.forward_ns == PRICES.forward_ns).all()
    assert (halves.input_ns + halves.weight_ns == PRICES.input_ns + PRICES.weight_ns).all()
    assert (halves.hop_ns == other.hop_ns).all()
    assert np.array_equal(halves.input_ns, [[5] * 3, [2] * 3])


def test_spans_say_what_when_and_where(tmp_path) -> None:
    timeline = replay_pipeline(write_pipeline("zb-h1", PRICES, ranks=2), PRICES)
    with Journal(tmp_path, 1) as journal:
        write_spans(journal, rows_of(timeline, 1, shift=2 * 10**9), step=4)
    spans = [json.loads(line) for line in journal.path.read_text().splitlines()]
    assert [span["name"] for span in spans[:3]] == ["forward", "backward-input", "forward"]
    assert {span["name"] for span in spans} == {"forward", "backward-input", "backward-weight"}
    first = spans[0]
    assert (first["step"], first["stage"], first["micro_batch"]) == (4, 1, 0)
    assert (round((first["t"] - 2) * 1e9), round(first["duration_s"] * 1e9)) == (3, 5)
