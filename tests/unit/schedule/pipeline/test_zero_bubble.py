"""Bubble rates of a published table, from its profiled times.

Zero Bubble Pipeline Parallelism, arXiv:2401.10241, tables 5 and 6: GPT-3-like models on A100,
times of one micro-batch on one stage in ms. The rates are the authors' own replay.
"""

import pytest

from equipoise.schedule.pipeline.bound import bound_pipeline
from equipoise.schedule.pipeline.prices import PipelinePrices, make_prices
from equipoise.schedule.pipeline.replay import PipelineTimeline, count_in_flight, replay_pipeline
from equipoise.schedule.pipeline.strategies import write_pipeline

CHUNKS = {"1.5B": 3, "6.2B": 4, "14.6B": 3, "28.3B": 2}
"""Stages a rank of interleaved 1F1B: one layer each, the two missing ones counted."""

# model, ranks, micro-batches, T_F, T_B, T_W, T_comm; 1F1B, 1F1B-I, ZB-H1, ZB-H2
TABLE = """
1.5B   8  24 18.522 18.086  9.337 0.601 0.2431 0.1055 0.1585 0.1083
1.5B   8  32 18.513 18.086  9.331 0.626 0.1985 0.0818 0.1242 0.0837
1.5B   8  64 18.546 18.097  9.321 0.762 0.1240 0.0443 0.0674 0.0444
6.2B   8  24 29.718 29.444 19.927 0.527 0.2347 0.0808 0.1323 0.0698
6.2B   8  32 29.802 29.428 19.530 0.577 0.1898 0.0628 0.1045 0.0559
6.2B   8  64 29.935 29.621 19.388 0.535 0.1091 0.0320 0.0554 0.0294
14.6B 16  48 11.347 11.248  8.132 0.377 0.2552 0.1104 0.1397 0.0672
14.6B 16  64 11.307 11.254  8.101 0.379 0.2082 0.0852 0.1088 0.0516
14.6B 16 128 11.325 11.308  8.109 0.378 0.1251 0.0445 0.0576 0.0266
28.3B 32  96 10.419 10.207  7.715 0.408 0.2646 0.1493 0.1421 0.0641
28.3B 32 128 10.408 10.204  7.703 0.408 0.2168 0.1164 0.1106 0.0490
28.3B 32 256 10.402 10.248  7.698 0.460 0.1352 0.0624 0.0594 0.0257
"""
ROWS = [line.split() for line in TABLE.split("\n") if line]


def replay(row: list[str], strategy: str, chunks: int = 1) -> tuple[PipelineTimeline, int]:
    """The replay, and the most that a rank holds."""
    ranks, micro_batches = int(row[1]), int(row[2])
    prices = prices_of(row, chunks)
    assert prices.micro_batches == micro_batches
    schedule = write_pipeline(strategy, prices, ranks=ranks)
    return replay_pipeline(schedule, prices), int(count_in_flight(schedule).peak.max())


def prices_of(row: list[str], chunks: int = 1) -> PipelinePrices:
    forward, backward, weight, hop = (1e6 * float(each) for each in row[3:7])
    return make_prices(
        forward / chunks,
        backward / chunks,
        weight / chunks,
        hop_ns=hop,
        stages=int(row[1]) * chunks,
        micro_batches=int(row[2]),
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[2]}")
class TestPublishedRates:
    def test_1f1b(self, row: list[str]) -> None:
        timeline, held = replay(row, "1f1b")
        assert timeline.bubble_rate == pytest.approx(float(row[7]), abs=6e-5)
        assert held == int(row[1])

    def test_zb_h1(self, row: list[str]) -> None:
        timeline, held = replay(row, "zb-h1")
        assert timeline.bubble_rate == pytest.approx(float(row[9]), abs=6e-5)
        assert held == int(row[1])

    def test_zb_h2_by_the_span_of_a_rank(self, row: list[str]) -> None:
        timeline, held = replay(row, "zb-h2")
        assert timeline.span_bubble_rate == pytest.approx(float(row[10]), abs=6e-5)
        assert held == 2 * int(row[1]) - 1

    def test_interleaved(self, row: list[str]) -> None:
        """The published rate leaves out the hops of one ride over all ranks."""
        timeline, _ = replay(row, "interleaved", CHUNKS[row[0]])
        ride_ns = int(row[1]) * 1e6 * float(row[6])
        rate = 1 - timeline.busy_ns.mean() / (timeline.makespan_ns - ride_ns)
        assert rate == pytest.approx(float(row[8]), abs=6e-5)
        assert timeline.bubble_rate == pytest.approx(float(row[8]), rel=0.043)

    def test_auto_in_twice_the_memory_is_as_fast_as_any_schedule(self, row: list[str]) -> None:
        prices, ranks = prices_of(row), int(row[1])
        schedule = write_pipeline("auto", prices, ranks=ranks, most_held=2 * ranks)
        bound = bound_pipeline(prices, schedule.rank_of)
        assert replay_pipeline(schedule, prices).makespan_ns <= 1.0005 * bound
