"""Plans that also choose what balances experts: the fastest of all policies and slots."""

import dataclasses

import pytest

from equipoise.base.errors import SpecError
from equipoise.base.units import format_seconds
from equipoise.plan.request import PlanRequest, plan
from equipoise.sim.request import StepRequest, simulate
from equipoise.spec.plan import read_plan
from support.verbs import run

MODEL = "layers=4,hidden=1024,heads=8,vocab=8000,experts=16,top_k=2,expert_ffn=4096"
OPEN = PlanRequest(
    *(MODEL, "h100-sxm:8", 4096, 64),
    layout="tp=1,cp=1,pp=1,ep=8",
    micro_batch=1,
    expert_loads="W1",
    expert_policy="any",
    expert_slots=2,
)


@pytest.mark.long
def test_the_fastest_of_all_policies_and_slots_is_chosen(tmp_path) -> None:
    answer = plan(dataclasses.replace(OPEN, seconds=42.0))
    words, best_s = answer.best.words, answer.best.price["step_s"]
    settings = [("fixed", 1), *((p, n) for p in ("exact", "hecate", "eplb") for n in (1, 2))]
    alone = {
        setting: plan(
            dataclasses.replace(OPEN, expert_policy=setting[0], expert_slots=setting[1])
        ).best.price["step_s"]
        for setting in settings
    }
    assert best_s == min(alone.values()) < alone["fixed", 1]
    chosen = words["expert-policy"], int(words.get("expert-slots", 1))
    assert alone[chosen] == best_s
    named = f"{chosen[0]} with {chosen[1]} slot{'s' * (chosen[1] > 1)}"
    assert answer.lock.remarks[0] == f"Of 7 ways to balance experts, {named} is the fastest."
    assert len([each for each in answer.lock.remarks if each.startswith("With ")]) == 6
    assert answer.bound_s <= best_s and "--expert-policy any" in answer.lock.command
    step = simulate(
        StepRequest(
            *(MODEL, "h100-sxm:8", words["layout"], 4096, 64),
            micro_batch=int(words["micro-batch"]),
            recompute=words["recompute"],
            expert_loads="W1",
            expert_policy=chosen[0],
            expert_slots=chosen[1],
        )
    )
    assert step.step_s == best_s
    answer.lock.write(tmp_path / "plan.lock")
    assert read_plan(tmp_path / "plan.lock").best.words == words


def test_a_layout_that_shares_no_experts_needs_no_policy() -> None:
    request = dataclasses.replace(OPEN, layout="tp=1,cp=1,pp=1,ep=1,zero=1", recompute="none")
    answer = plan(dataclasses.replace(request, expert_slots=1, seconds=16.0))
    assert answer.best.words["expert-policy"] == "fixed"
    assert answer.lock.remarks[:2] == (
        "The fastest layout shares no experts, so none need balance.",
        "With exact with 1 slot: dp=8,zero=1, "
        f"{format_seconds(answer.best.price['step_s'])} a step, +0.0%.",
    )


def test_a_policy_that_is_open_needs_loads_slots_and_experts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for changed, said in (
        (
            {"expert_loads": None},
            "expert_policy = any needs expert_loads, what routers choose. Give both or neither.",
        ),
        ({"expert_slots": 0}, "expert_slots is 0. Give a whole number above 0."),
        (
            {"model": "llama3-8b"},
            "expert_loads = W1 needs a model with experts, and this one has none. Leave "
            "expert_loads out.",
        ),
    ):
        with pytest.raises(SpecError) as caught:
            plan(dataclasses.replace(OPEN, **changed))
        assert str(caught.value) == said
    flags = ["--model", MODEL, "--cluster", "h100-sxm:8", "--layout", "dp=8,ep=8"]
    flags += ["--context-tokens", "4096", "--step-sequences", "64", "--expert-loads", "W1"]
    code, _, err = run(capsys, "simulate", *flags, "--expert-policy", "any")
    assert code == 2
    assert err.splitlines()[-1] == (
        "expert_policy is any, and not one of fixed, exact, hecate, eplb. Nearest: exact."
    )
