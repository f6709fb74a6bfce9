"""Cases of balanced experts: every policy, kind and axis is there, exact, and copies something."""

import numpy as np

from equipoise.balance.expert.policies import plan_experts
from equipoise.balance.expert.request import ExpertRequest
from equipoise.balance.expert.workload import WORKLOADS
from equipoise.spec.catalog import SCHEDULES
from equipoise.spec.model.presets import ModelSpec, preset
from equipoise.train.check.balanced import (
    balanced_cases,
    beside_axes,
    earlier_loads,
    with_experts,
)
from equipoise.train.check.case import scaled_down
from equipoise.train.check.prove import run_cases

POLICIES = ("exact", "hecate", "eplb", "tutel", "auto")
PLANNED = [name for name, traits in SCHEDULES.items() if traits.planned == "always"]
MODEL = ModelSpec(layers=1, hidden=16, heads=2, kv_heads=1, ffn=24, vocab=61, head_width=8)


def _kind(schedule: str) -> tuple[bool, bool, bool]:
    traits = SCHEDULES[schedule]
    return traits.splits_backward, traits.is_interleaved, traits.in_v


def test_every_policy_and_kind_is_in_some_case() -> None:
    cases = balanced_cases(4, scaled_down(with_experts(preset("2m"))))
    kinds = {(case.experts.policy, case.router) for case in cases}
    every = {(policy, kind) for policy in (*POLICIES, "speculative") for kind in WORKLOADS}
    assert kinds == every | {("fixed", kind) for kind in ("W1", "W4", "W5")}
    assert {case.layout.zero for case in cases} == {0, 1, 2, 3}
    policies = {case.experts.policy for case in balanced_cases(3, with_experts(MODEL))}
    assert policies == {*POLICIES, "fixed"} - {"eplb"}  # 2 heads
    assert not balanced_cases(1, MODEL)
    parted = {case.experts.policy for case in cases if case.layout.parts > 1}
    assert parted == {"fixed", *POLICIES, "speculative"}
    short = [case for case in cases if case.model.shortcut]
    assert {case.experts.policy for case in short} == {"fixed", *POLICIES, "speculative"} - {"eplb"}
    shapes = {
        axis
        for axis in ("cp", "tp", "pp", "etp", "parts")
        for case in short
        if getattr(case.layout, axis) > 1
    }
    assert shapes == {"cp", "tp", "pp", "etp", "parts"}
    assert {case.train.recompute for case in short} == {"none", "full", "attention", "selective"}
    idle = [case for case in cases if case.model.identity_experts]
    assert {case.experts.policy for case in idle} == {"fixed", *POLICIES}
    assert [case.layout.cp for case in idle] == [1, 4, 1] * 2
    assert any(case.lora.rank for case in cases) and any(case.train.freeze for case in cases)


def test_every_policy_is_beside_every_axis() -> None:
    cases = beside_axes(4, scaled_down(with_experts(preset("2m"))))
    for policy in POLICIES:
        layouts = [case.layout for case in cases if case.experts.policy == policy]
        for axis in ("dp", "cp", "tp", "pp", "ep", "replicas"):
            assert any(getattr(layout, axis) > 1 for layout in layouts), (policy, axis)
        schedules = {layout.schedule for layout in layouts if layout.pp > 1}
        assert schedules >= {"1f1b", "interleaved"}
        assert {_kind(name) for name in schedules} == {_kind(name) for name in PLANNED}
        assert {layout.zero for layout in layouts} == {0, 1, 2, 3}
    split = [case for case in cases if case.layout.etp > 1]
    assert {case.experts.policy for case in split} == {"tutel"}
    assert {"cp", "tp", "pp", "ep"} == {
        axis for axis in ("cp", "tp", "pp", "ep") for c in split if getattr(c.layout, axis) > 1
    }


def test_policies_that_plan_from_earlier_loads_have_some_to_copy_by() -> None:
    (case, *_) = [each for each in balanced_cases(2, with_experts(MODEL)) if each.router == "W1"]
    loads = earlier_loads(case)
    assert loads is not None and loads.shape == (1, 16)
    rows = np.full((2, 16), 6)
    assert plan_experts("eplb", ExpertRequest(rows)).copies == 0
    assert plan_experts("eplb", ExpertRequest(rows, seen=loads[0])).copies > 0


def test_cases_are_exact_and_say_what_they_are() -> None:
    chosen = [case for case in balanced_cases(2, with_experts(MODEL)) if case.router == "W2"]
    verdicts = run_cases(chosen, over_gloo=False)
    assert str(verdicts[0].case) == (
        '2 ranks (zero = 2, policy = "by-work", ep = 2, exact experts, W2)'
    )
    for verdict in verdicts:
        assert verdict.is_exact and verdict.is_repeated
        assert verdict.error <= 1e-10
