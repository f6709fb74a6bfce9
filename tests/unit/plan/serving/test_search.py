"""The search over replicas: every choice listed once, and the best is that of trying all."""

import random

import pytest

from equipoise.base.errors import EquipoiseError
from equipoise.plan.search.deadline import Deadline
from equipoise.plan.serving.request import ServingPlanRequest, plan_serving
from equipoise.plan.serving.space import ServingChoice, list_layouts, list_parts
from equipoise.sim.machine import Machine
from equipoise.sim.serve.answer import Objective
from equipoise.sim.serve.request import ServingRequest, simulate_serving
from equipoise.spec.cluster.spec import find_cluster
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import preset
from equipoise.spec.request_trace import TracedRequest


def draw_trace(requests: int, rate: float, seed: int = 0) -> tuple[TracedRequest, ...]:
    draw = random.Random(seed)
    at_s, rows = 0.0, []
    for _ in range(requests):
        at_s += draw.expovariate(rate)
        output = 1 + draw.randrange(60)
        rows.append(
            TracedRequest(at_s, "ab"[draw.randrange(2)], 1 + draw.randrange(900), output, 80)
        )
    return tuple(rows)


def test_every_layout_once() -> None:
    machine = Machine(find_cluster("h100-sxm:4"))
    layouts = list_layouts(preset("mixtral-8x7b"), machine, 4, {})
    assert len(set(layouts)) == len(layouts)
    degrees = {(each.tp, each.cp, each.pp, each.dp) for each in layouts}
    assert len(degrees) == 10, "ordered products of four factors that are 4"
    assert all(each.world == 4 and each.ep <= each.tp * each.cp for each in layouts)
    assert {each.ep for each in layouts if each.tp == 4} == {1, 2, 4}
    assert {each.tp for each in list_layouts(preset("llama3-8b"), machine, 4, {"tp": 2})} == {2}
    assert list_layouts(preset("smollm2-135m"), machine, 4, {"tp": 2}) == []


TRACE = draw_trace(40, 25.0)
GOALS = {"": Objective(0.1, 0.02), "b": Objective(0.04, 0.012)}


@pytest.mark.long
@pytest.mark.parametrize("objectives", [{}, GOALS], ids=["latency", "objectives"])
def test_the_best_is_that_of_simulating_every_choice(objectives: dict[str, Objective]) -> None:
    model, devices = preset("llama3-8b"), 4
    machine = Machine(find_cluster("h100-sxm:4"))
    choices = [ServingChoice(each) for each in list_layouts(model, machine, devices, {})]
    for part in list_parts(devices):
        choices += [
            ServingChoice(one, two)
            for one in list_layouts(model, machine, part, {})
            for two in list_layouts(model, machine, devices - part, {})
        ]

    def standing(choice: ServingChoice) -> tuple[float, float]:
        row = simulate_serving(
            ServingRequest(
                TRACE,
                model,
                "h100-sxm:4",
                choice.layout,
                decode_layout=choice.decode_layout,
                objectives=objectives,
            )
        ).as_row()
        return -row["good_share"] if objectives else -1.0, row["latency_s"]["mean"]

    ranked = sorted(choices, key=standing)
    answer = plan_serving(ServingPlanRequest(TRACE, model, "h100-sxm:4", objectives=objectives))
    assert answer.listed == len(choices) == 32 and answer.is_whole
    assert answer.left_out + answer.simulated + answer.unfit == answer.listed
    assert answer.left_out > 0
    mine = [each.choice for each in (answer.best, *answer.runners_up)]
    assert [standing(each) for each in mine[:4]] == [standing(each) for each in ranked[:4]]
    kinds = {True: False, False: False}
    for each in mine:
        kinds[each.is_apart] = True
    assert all(kinds.values()), "the best of both kinds is there"
    for kind in kinds:
        first = next(each for each in mine if each.is_apart == kind)
        assert standing(first) == standing(next(each for each in ranked if each.is_apart == kind))
    assert answer.gap == pytest.approx(0.0, abs=1e-9)


def test_a_row_is_what_simulate_says_and_its_parts_add_up() -> None:
    answer = plan_serving(ServingPlanRequest(TRACE, "llama3-8b", "h100-sxm:2", objectives=GOALS))
    for each in (answer.best, *answer.runners_up):
        words = each.choice.words()
        again = simulate_serving(
            ServingRequest(
                TRACE,
                "llama3-8b",
                "h100-sxm:2",
                words["layout"],
                decode_layout=words.get("decode-layout"),
                objectives=GOALS,
            )
        )
        row = each.as_row()
        assert again.as_row() == row["price"]
        assert sum(row["parts"].values()) == pytest.approx(row["latency_s"])
        assert row["latency_s"] == pytest.approx(row["price"]["latency_s"]["mean"])
        assert all(seconds >= -1e-9 for seconds in row["parts"].values())
        assert (row["parts"]["sending"] > 0) == each.choice.is_apart


def test_what_does_not_fit_is_counted_and_ends_nothing() -> None:
    answer = plan_serving(ServingPlanRequest(TRACE[:5], "llama3-70b", "h100-sxm:4"))
    assert answer.unfit and answer.simulated
    assert answer.unfit + answer.left_out + answer.simulated == answer.listed


def test_degrees_that_are_given_are_those_of_every_replica() -> None:
    request = ServingPlanRequest(TRACE[:5], "llama3-8b", "h100-sxm:4", layout="tp=2,cp=1")
    answer = plan_serving(request)
    for each in (answer.best, *answer.runners_up):
        layouts = [each.choice.layout, each.choice.decode_layout or Layout(tp=2)]
        assert all((layout.tp, layout.cp) == (2, 1) for layout in layouts)


def test_without_time_for_all_the_answer_says_so() -> None:
    from equipoise.data.progress import SilentProgress
    from equipoise.plan.serving.search import ServingSearch
    from equipoise.schedule.batching.fair.table import FAIR_POLICIES
    from equipoise.sim.serve.request import open_site

    ticks = iter(range(10_000))
    site = open_site("llama3-8b", "h100-sxm:4", "bf16", requests=len(TRACE))
    search = ServingSearch(site, TRACE, {}, FAIR_POLICIES["fifo"], {})
    late = Deadline(5, clock=lambda: next(ticks))
    outcome = search.run(late, SilentProgress())
    assert not outcome.is_whole and not outcome.best


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (
            ServingPlanRequest(TRACE, "llama3-70b", "h100-sxm:1"),
            "None of 1 layouts can be served. The first of them: Weights of 131.4 GiB and "
            "activations of 1.6 GiB a device leave no room for keys and values in 70.8 GiB, nine "
            "tenths of h100-sxm. Give a higher tp or pp, or a larger device.",
        ),
        (
            ServingPlanRequest(TRACE, "smollm2-135m", "h100-sxm:2", layout="tp=2"),
            "No layout of 2 devices with tp=2 divides this model's heads, layers and experts. Fix "
            "fewer degrees, or give another number of devices.",
        ),
        (
            ServingPlanRequest(TRACE, "llama3-8b", "h100-sxm:2", layout="zero=3"),
            'layout: "zero=3" begins with no known name. Nearest: ep. Give tp, cp, pp, ep, dp as '
            "name=number, with commas between.",
        ),
        (
            ServingPlanRequest(TRACE, "llama3-8b", "h100-sxm:2", seconds=0.0),
            "seconds is 0. Give a time above 0.",
        ),
        (
            ServingPlanRequest((), "llama3-8b", "h100-sxm:2"),
            "There are no requests. Give at least one.",
        ),
        (
            ServingPlanRequest(TRACE, "mixtral-8x7b", "h100-sxm:2", expert_skew=1e300),
            "expert_skew is 1e+300. Give a ratio from 1 (balanced) to 1,000,000.",
        ),
        (
            ServingPlanRequest(TRACE, "llama3-8b", "h100-sxm:2", expert_skew=2.0),
            "expert_skew changes nothing for a model without experts. Leave it out.",
        ),
    ],
)
def test_refusals(request_: ServingPlanRequest, message: str) -> None:
    with pytest.raises(EquipoiseError) as refusal:
        plan_serving(request_)
    assert str(refusal.value) == message
