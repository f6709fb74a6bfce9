"""Sentences beside a plan: published recipes at their price, and who runs a schedule."""

from types import SimpleNamespace

import pytest

from equipoise.base.errors import SpecError
from equipoise.cost.step.request import StepOptions
from equipoise.plan.answer.final import Finalist, is_common, price_finalists, settings_of
from equipoise.plan.answer.remarks import (
    gap_remark,
    price_published,
    programs_with,
    remarks_of,
    schedule_remark,
    with_published,
)
from equipoise.plan.search.deadline import NEVER
from equipoise.plan.search.incumbent import Outcome, SearchProgress
from equipoise.plan.search.search import SPLIT, Search
from equipoise.plan.search.vast import LOOK
from equipoise.plan.space.choice import Choice
from equipoise.plan.space.columns import WHOLE_LAYERS
from equipoise.plan.space.listing import list_lattice, list_runnable
from equipoise.sim.machine import Machine
from equipoise.sim.step import price_step
from equipoise.spec.catalog import SCHEDULES
from equipoise.spec.cluster.spec import find_cluster
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import PLANNED
from equipoise.spec.program.file import program_names, read_program


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "zb-h1", "interleaved"])
def test_programs_are_those_that_do_not_refuse_a_schedule(schedule: str) -> None:
    layout = Layout(pp=2)
    runs = []
    for name in program_names():
        program = read_program(name)
        try:
            program.require(layout, schedule, "full", "", "bf16")
        except SpecError as error:
            assert "schedule" in str(error) or "stages" in str(error) or "recompute" in str(error)
            if "recompute" in str(error):
                runs += [name] if schedule in (program.schedules or [schedule]) else []
        else:
            runs.append(name)
    assert programs_with(schedule) == runs


def test_a_schedule_that_few_run_is_marked() -> None:
    def finalist(schedule: str, pp: int = 2) -> Finalist:
        options = StepOptions(4096, 16, schedule=schedule, virtual=2)
        return SimpleNamespace(choice=Choice(Layout(pp=pp), options))

    assert schedule_remark(finalist("interleaved")) is None
    assert schedule_remark(finalist("zb-v", pp=1)) is None
    assert schedule_remark(finalist("zb-v")) == (
        "Few programs run zb-v: of those shipped equipoise, torchtitan, torchtitan-async, "
        "torchtitan-eager. --program NAME searches what NAME runs; --schedule interleaved leaves "
        "others out."
    )
    assert {name for name in SCHEDULES if SCHEDULES[name].megatron is not None} == {
        "1f1b",
        "interleaved",
    }


def test_a_published_recipe_is_priced_and_is_never_faster_than_the_plan() -> None:
    model, machine = PLANNED["gpt-oss-120b"], Machine(find_cluster("h100-sxm:64"))
    program = read_program("megatron-core")
    base = StepOptions(4096, 512, stack=program.stack)
    fixed = {"tp": 1, "cp": 1, "zero": 1, "micro_batch": 1, "ep": 8, "etp": 1, "order": "pp-dp"}
    lattice = list_runnable(program, model, 64, base, fixed=fixed | {"schedule": "1f1b"})
    every = lattice.keep(lattice.find({"recompute": [WHOLE_LAYERS.index("full")]}))
    search = Search(model, machine, every)
    finalists = price_finalists(search, search.run())
    published = price_published(search, lattice, "gpt-oss-120b", NEVER)
    ((recipe, theirs),) = published
    price = price_step(model, machine, theirs.choice.layout, theirs.choice.options)
    assert theirs.run.price.step_s == price.step_s and price.fits
    assert (theirs.choice.layout.pp, theirs.choice.layout.ep) == (4, 8)
    chosen = with_published(finalists, published)
    assert chosen[0].run.price.step_s <= price.step_s
    assert with_published(finalists, []) == finalists
    (said,) = remarks_of(search, lattice, published, chosen, named=False)
    assert said.startswith("As published: pp=4,dp=16,ep=8,zero=1 1f1b recompute layernorm+moe_act")
    assert "published 5,630" in said and recipe.source in said
    assert with_published([theirs], published) == [theirs]


def test_runners_up_differ_in_what_a_user_chooses() -> None:
    model, machine = PLANNED["llama3-8b"], Machine(find_cluster("h100-sxm:8"))
    fixed = {"cp": 2, "zero": 1, "recompute": "none", "micro_batch": 1, "pp": 2}
    lattice = list_lattice(model, 8, StepOptions(8192, 32), fixed=fixed)
    search = Search(model, machine, lattice.keep(lattice.find({})))
    finalists = price_finalists(search, search.run())
    settings = [settings_of(each.choice) for each in finalists]
    assert len(set(settings)) == len(settings) > 1
    assert any(is_common(each.choice) for each in finalists)


def _stopped(loosest: tuple[int, int] | None) -> Outcome:
    return Outcome((), SearchProgress(1, 2.0, 1.0), 9, 0, 0, 0.0, loosest)


def test_a_stopped_search_says_what_its_bound_leaves_out() -> None:
    assert gap_remark(_stopped((LOOK, 2_622)), 1.0) == (
        "How much of the gap is real is not known: time ended with 2,622 groups of choices bounded "
        "by their useful FLOP at the devices' peak alone. More --seconds raise the bound."
    )
    said = gap_remark(_stopped((SPLIT, 7)), 0.2)
    assert said is not None and "with 7 choices bounded by their pipeline's ranks, without" in said


def test_a_small_gap_and_a_search_that_ended_need_no_words() -> None:
    assert gap_remark(_stopped((LOOK, 1)), 0.049) is None
    assert gap_remark(_stopped(None), 3.0) is None
    assert gap_remark(_stopped((LOOK, 1)), None) is None
