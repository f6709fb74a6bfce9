"""Pipelines on real ranks over gloo: equal to one rank, alone and with the other axes."""

import pytest

from equipoise.base.errors import CheckError
from equipoise.comm.local import run_ranks
from equipoise.spec.catalog import SCHEDULES
from equipoise.spec.run.spec import Recompute
from support.decoders import LENGTHS
from support.ranks import pipeline_ranks
from support.ranks.pipeline_ranks import Case

FIVE = LENGTHS[:5]
"""Micro-batches for four ranks that two ranks a stage share: one is empty, one a single token."""
SETTINGS: tuple[Recompute, ...] = ("none", "full", "attention", "selective", "every-2")


def check(ranks: int, cases: list[Case]) -> None:
    for rank, answers in enumerate(run_ranks(ranks, pipeline_ranks.run_cases, cases)):
        for case, told in zip(cases, answers, strict=True):
            assert told.loss_error <= 1e-12, case
            assert told.gradient_error <= 1e-10, (case, told.worst)
            assert told.is_bitwise, case
            assert told.is_ordered, case
            assert told.expected in (None, told.sent), (rank, case)


def test_every_strategy_equals_one_rank_on_two_ranks() -> None:
    check(
        2,
        [
            Case(strategy, LENGTHS, pp=2, is_tied=bool(at % 2), recompute=SETTINGS[at % 5])
            for at, strategy in enumerate(SCHEDULES)
        ],
    )


@pytest.mark.parametrize("ranks", [3, 4])
def test_strategies_on_more_ranks(ranks: int) -> None:
    names = ["1f1b", "interleaved", "zb-h2", "zb-v", "auto", "skip-reordered"]
    if ranks == 3:
        names = names[::2]
    check(ranks, [Case(name, LENGTHS, pp=ranks, is_tied=ranks == 3) for name in names])


def test_replicas_of_a_pipeline() -> None:
    """Replicas have other micro-batches, and not as many; they meet once."""
    seven = LENGTHS[:7]
    check(
        4,
        [
            Case("1f1b", seven, pp=2, dp=2, is_tied=True),
            Case("zb-h1", seven, pp=2, dp=2, zero=0),
            Case("zb-v", seven, pp=2, dp=2, is_tied=True, recompute="selective"),
            Case("gpipe", seven, pp=2, dp=2, runs=2),
        ],
    )


def test_context_parallelism_inside_stages() -> None:
    check(
        4,
        [
            Case("1f1b", FIVE, pp=2, cp=2, is_tied=True),
            Case("zb-h1", FIVE, pp=2, cp=2),
            Case("v-half", FIVE, pp=2, cp=2, recompute="attention"),
        ],
    )


def test_tensor_parallelism_inside_stages() -> None:
    """Ranks that share weights each have their rows of what travels."""
    model_is_tied = Case("zb-h1", FIVE, pp=2, tp=2, is_tied=True)
    check(4, [Case("1f1b", FIVE, pp=2, tp=2), model_is_tied])


def test_bf16_travels_in_two_bytes_and_sums_in_four() -> None:
    wanted = pipeline_ranks.bf16_reference()
    for loss, dtypes in run_ranks(4, pipeline_ranks.compute_in_bf16):
        assert loss == pytest.approx(wanted, rel=2e-3)
        assert set(dtypes.values()) == {"torch.float32"}


@pytest.mark.parametrize("what", ["schedule", "tokens", "edges"])
def test_ranks_that_disagree_are_told_before_one_waits(what: str) -> None:
    with pytest.raises(CheckError) as told:
        run_ranks(2, pipeline_ranks.disagree, what, timeout_s=60)
    assert str(told.value) in {
        f"Ranks [{1 - rank}] of the pipeline differ from rank {rank} in their schedule, stage "
        "edges or micro-batches. Give every rank the same pack, prices and version of equipoise."
        for rank in range(2)
    }
