"""Within micro-batches no step waits for its device, but for the sizes of experts' messages.

Seen on a CPU twin, by the names of what would wait; see ``support.ranks.waits_ranks``.
"""

import dataclasses
from collections import Counter
from itertools import chain

import pytest

from equipoise.comm.local import run_ranks
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.spec import LayoutSpec, PackSpec, TrainSpec
from equipoise.train.check.case import Case
from support.ranks import waits_ranks
from support.ranks.waits_ranks import Seen

DENSE = ModelSpec(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=320, head_width=8)
SPARSE = dataclasses.replace(DENSE, experts=4, top_k=2, expert_ffn=32, balance="auxiliary")

AT_THE_ENDS = {
    "wait train/health/agree.py",  # whether all ranks have one plan, before the first micro-batch
    " train/health/agree.py",  # the same after the last one
    " parallel/pipeline/pipeline.py",  # whether all ranks have one schedule
    " train/pipeline.py",  # losses
    " train/step.py",
    " comm/group.py",  # whether the norm is finite on every rank
    "wait comm/group.py",
    "reduce train/step.py",  # the norm
    "optimizer parallel/expert/loads.py",  # what routers chose
}
"""Phase and file of what waits a fixed number of times in a step, after its micro-batches."""
ON_A_CPU_ALONE = ("nn/loss.py", "fault/fingerprint.py")
"""Devices read the second every ``fault.fingerprint_steps``, with one wait for all tensors."""


def case_of(
    ranks: int, model: ModelSpec, policy: str = "by-work", window: int = 256, **layout: object
) -> Case:
    train = TrainSpec(precision="bf16", recompute="selective")
    pack = PackSpec(policy=policy, context_tokens=window, step_tokens=2048)
    return Case(ranks, model, LayoutSpec(**layout), pack, train)


def waits(*cases: Case) -> list[list[Seen]]:
    """What each rank sees of each case."""
    return run_ranks(cases[0].ranks, waits_ranks.steps_wait, [*cases])


def split(seen: Seen) -> tuple[Counter[str], Counter[str]]:
    """Waits that would stop the launching of a micro-batch, and those at the ends of a step."""
    within, after = Counter[str](), Counter[str]()
    for place, count in seen.waits.items():
        where = place.split(":")[0]
        if not where.endswith(ON_A_CPU_ALONE):
            (after if where in AT_THE_ENDS else within)[place] += count
    return within, after


RUNS: list[tuple[int, str, dict[str, object]]] = [
    (1, "by-work", {"dp": 1}),
    (2, "by-work", {"dp": 2, "zero": 3}),
    (2, "by-work", {"dp": 1, "cp": 2, "strategy": "ring"}),
    (2, "by-work", {"dp": 1, "cp": 2, "strategy": "ulysses"}),
    (2, "divided", {"dp": 2}),
    (2, "by-work", {"dp": 1, "tp": 2}),
    (2, "by-work", {"dp": 1, "pp": 2, "schedule": "1f1b"}),
]


def shallow_deep_and_many(at: int) -> list[Case]:
    """Few layers, twice as many, and more micro-batches."""
    ranks, policy, layout = RUNS[at]
    stages = layout.get("pp", 1)  # each has a layer, and then two
    shallow, deeper = (dataclasses.replace(DENSE, layers=n * stages) for n in (1, 2))
    pairs = ((shallow, 512), (deeper, 512), (shallow, 256))
    return [case_of(ranks, model, policy, window, **layout) for model, window in pairs]


@pytest.fixture(scope="module")
def seen() -> list[list[list[Seen]]]:
    """What each rank sees of each run; runs on two ranks share the two."""
    alone, *shared = map(shallow_deep_and_many, range(len(RUNS)))
    both = waits(*(case for cases in shared for case in cases))
    by_run = [[rank[at : at + 3] for rank in both] for at in range(0, 3 * len(shared), 3)]
    return [waits(*alone), *by_run]


@pytest.mark.parametrize("at", range(len(RUNS)))
def test_nothing_waits_within_micro_batches(seen: list[list[list[Seen]]], at: int) -> None:
    layout = RUNS[at][2]
    for one, two, other in seen[at]:
        ends = [split(each) for each in (one, two, other)]
        assert not any(within for within, _ in ends)
        assert ends[0] == ends[1] == ends[2]
        assert one.made == two.made  # once for a pack, whatever the number of layers
        assert sum(other.operators.values()) > sum(one.operators.values())
        if "pp" not in layout:
            assert one.operators["forward"] and one.operators["backward"]


def test_experts_on_one_rank_wait_for_nothing() -> None:
    ((seen,),) = waits(case_of(1, SPARSE, dp=1))
    assert not split(seen)[0]


def test_experts_on_several_ranks_wait_once_in_a_layers_forward() -> None:
    """And once where the layer is recomputed; also in the micro-batch that sums gradients."""
    cases = [case_of(2, SPARSE, dp=2, ep=2), case_of(2, SPARSE, dp=2, etp=2)]
    for seen in chain.from_iterable(waits(*cases)):
        within, _ = split(seen)
        place = "parallel/expert/exchange.py: tolist"
        assert set(within) == {f"{phase} {place}" for phase in ("forward", "backward", "reduce")}
        assert within[f"forward {place}"] == within[f"backward {place}"]
        assert within[f"reduce {place}"] == 2 * SPARSE.layers
