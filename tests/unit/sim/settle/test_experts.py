"""Skews of experts by the number of ranks, in forecasts and plans."""

import dataclasses
from pathlib import Path

import pytest

from equipoise.base.errors import DataError, SpecError
from equipoise.cost.memory.device import rank_memory
from equipoise.cost.memory.share import StageShare
from equipoise.cost.step.request import ExpertForecast, StepOptions
from equipoise.observe.journal import Journal
from equipoise.sim.request import StepRequest, simulate
from equipoise.sim.settle.experts import forecast_experts
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import preset

MODEL = preset("qwen3-30b-a3b")
STEP = StepRequest("qwen3-30b-a3b", "h100-sxm:16", "dp=16,ep=16,zero=1", 4096, 32, recompute="full")


def forecast(policy: str = "fixed", loads: str = "W1", slots: int = 1) -> ExpertForecast:
    return forecast_experts(
        loads, MODEL, 16, policy=policy, slots=slots, rows_per_rank=4096 * MODEL.top_k
    )


def test_more_ranks_are_fuller_and_a_policy_evens_them() -> None:
    alone, exact = forecast(), forecast("exact")
    assert [ranks for ranks, _ in alone.owner_skews] == [1, 2, 4, 8, 16]
    skews = [skew for _, skew in alone.owner_skews]
    assert skews == sorted(skews) and skews[0] == 1.0 and skews[-1] > 2.0
    assert alone.planned_skews == alone.owner_skews == exact.owner_skews
    assert all(skew <= 1.016 for _, skew in exact.planned_skews)
    assert all(copied == 0 for _, copied in alone.copied) and exact.copied[-1][1] >= 1
    numbers = [ranks for ranks, _ in exact.slots]
    assert alone.slots == tuple((ranks, 0) for ranks in numbers)
    assert exact.slots == tuple((ranks, int(ranks > 1)) for ranks in numbers)
    # eplb may hold none of the experts that a rank owns, and as many others.
    assert forecast("eplb").slots[-1] == (16, MODEL.experts // 16 + 1)


def test_numbers_of_ranks_that_cannot_share_are_left_out() -> None:
    # 8 experts in runs of 2 are on 4 ranks, not on 6, 12 or 24.
    shares = forecast_experts("W1", preset("mixtral-8x7b"), 24, rows_per_rank=64).owner_skews
    assert [ranks for ranks, _ in shares] == [1, 2, 3, 4, 8]


def test_options_read_the_layout() -> None:
    options = StepOptions(4096, 32, experts=forecast("exact"))
    owner = dict(options.experts.owner_skews)
    assert options.skew_of(Layout(dp=16, ep=16)) < 1.02
    assert options.skew_of(Layout(dp=16, ep=8, etp=2)) == owner[8]
    assert options.copied_of(Layout(dp=16, ep=8, etp=2)) == 0.0
    assert options.skew_of(Layout(dp=16)) == 1.0 == StepOptions(4096, 32).skew_of(Layout())
    # Of numbers that it does not know, the next lower one.
    assert options.skew_of(Layout(dp=12, ep=12)) == options.skew_of(Layout(dp=8, ep=8))
    assert options.slots_of(Layout(dp=16, ep=16)) == 1 and options.slots_of(Layout(dp=16)) == 0


def test_a_step_pays_for_skew_or_for_copies_and_their_memory() -> None:
    even = simulate(STEP)
    asked = [dataclasses.replace(STEP, expert_loads="W1")]
    asked += [dataclasses.replace(asked[0], expert_policy="exact")]
    alone, exact = map(simulate, asked)
    assert even.step_s < exact.step_s < alone.step_s
    same = dataclasses.replace(STEP, expert_skew=alone.options.skew_of(Layout(dp=16, ep=16)))
    assert simulate(same).step_s == pytest.approx(alone.step_s)
    share = StageShare((0,), embeds=False, has_head=False, kept_micro_batches=1.0)
    space = [
        rank_memory(
            MODEL,
            Layout(dp=16, ep=16),
            dataclasses.replace(exact.options, experts=kept),
            share,
            4096,
        )["working space"]
        for kept in (
            dataclasses.replace(exact.options.experts, slots=((16, copies),)) for copies in (0, 2)
        )
    ]
    assert space[1] - space[0] == pytest.approx(2 * MODEL.expert_params * (2 + 4))


def test_loads_are_those_of_a_run(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal", 0) as journal:
        journal.write("instant", "start", step=0)
        for step in (1, 2, 3):
            hot = [128 * 100] + [100] * (MODEL.experts - 1)
            journal.write("scalar", "experts", step=step, loads=[hot, hot[::-1]])
    recorded = forecast(loads=str(tmp_path))
    shares = dict(recorded.owner_skews)
    # Half of all rows are of one expert, and the rest even.
    assert shares[16] == pytest.approx(16 * (0.5 + 0.5 / 16), rel=0.02)
    assert forecast("hecate", str(tmp_path)).planned_skews[-1][1] < shares[16]
    # Experts without weights compute nothing, however many choose them.
    idle = dataclasses.replace(MODEL, experts=64, identity_experts=64, balance="bias")
    hot = dict(forecast_experts(str(tmp_path), idle, 16, rows_per_rank=4096).owner_skews)
    # The first layer's hot expert has 2 of 3 of the rows with weights, the last one's has none.
    assert hot[16] == pytest.approx((16 * (2 / 3 + 1 / 3 / 16) + 1) / 2, rel=0.02)


def test_what_says_nothing_is_refused(tmp_path: Path) -> None:
    wrong = [
        {"expert_policy": "exact"},
        {"expert_slots": 2},
        {"expert_loads": "W1", "expert_skew": 1.5},
        {"expert_loads": "W1", "model": "llama3-8b", "layout": "dp=16"},
        {"expert_loads": "W1", "expert_policy": "exakt"},
        {"expert_loads": "W1", "expert_slots": 0},
        {"expert_loads": "W9"},
        {"expert_loads": str(tmp_path)},
    ]
    said = []
    for each in wrong:
        with pytest.raises((SpecError, DataError)) as caught:
            simulate(dataclasses.replace(STEP, **each))
        said.append(str(caught.value).replace(str(tmp_path), "runs/run"))
    assert said == [
        "expert_policy = exact needs expert_loads, what routers choose. Give both or neither.",
        "expert_slots = 2 needs expert_loads, what routers choose. Give both or neither.",
        "expert_skew = 1.5 and expert_loads = W1 both say how uneven experts are. Give one of "
        "them.",
        "expert_loads = W1 needs a model with experts, and this one has none. Leave expert_loads "
        "out.",
        "expert_policy is exakt, and not one of fixed, exact, hecate, eplb. Nearest: exact.",
        "expert_slots is 0. Give a whole number above 0.",
        "expert_loads is W9, which is neither a run's folder nor one of W0, W1, W2, W3, W4, W5, "
        "W6, W7.",
        "runs/run has no journal/rank-00000.jsonl: not a run. Give the folder that "
        "`equipoise train` wrote.",
    ]
