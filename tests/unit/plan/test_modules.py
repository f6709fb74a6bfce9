"""Modules that a program computes again, as a choice of the plan."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.base.errors import LayoutError, SpecError
from equipoise.cost.step.request import StepOptions
from equipoise.plan.bounds.group import group_bound_s
from equipoise.plan.bounds.kernels import Kernels
from equipoise.plan.bounds.roofline import memory_bound_bytes, peak_bound_s
from equipoise.plan.described import PlanRequest, read_inputs
from equipoise.plan.request import plan
from equipoise.plan.search.incumbent import SearchProgress
from equipoise.plan.search.mixed import ClassSearch
from equipoise.plan.search.search import Search
from equipoise.plan.search.vast import VastSearch
from equipoise.plan.space.lattice import Lattice
from equipoise.plan.space.listing import list_lattice, list_runnable
from equipoise.plan.space.packs import sort_batches
from equipoise.sim.machine import Machine
from equipoise.sim.mixed.replay import run_sites
from equipoise.sim.request import StepRequest, simulate
from equipoise.spec.cluster.link import find_link
from equipoise.spec.cluster.spec import ClusterSpec, find_cluster, node_class
from equipoise.spec.model.presets import PLANNED, ModelSpec
from equipoise.spec.model.sizes import LatentSpec
from equipoise.spec.program.file import program_names, read_program
from equipoise.spec.recompute import MODULE_SETS, planned_modules
from support.verbs import run

MODEL = dataclasses.replace(
    PLANNED["deepseek-v3"],
    layers=6,
    hidden=2048,
    heads=32,
    kv_heads=32,
    ffn=8192,
    vocab=32_000,
    latent=LatentSpec(query=512, key_value=256, rope=64),
    experts=16,
    top_k=4,
    expert_ffn=1024,
    shared_ffn=1024,
    dense_layers=2,
    expert_groups=1,
    kept_groups=1,
)
CORE = read_program("megatron-core")
BASE = StepOptions(4096, 32, stack=CORE.stack)
ALONE = {"layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"}


def small(usable_gib: float, device: str = "h100-sxm:8") -> ClusterSpec:
    """A cluster whose devices have little memory."""
    whole = find_cluster(device)
    one = whole.classes[0]
    size = int(usable_gib * 2**30) + one.device.reserved_bytes
    less = dataclasses.replace(one, device=dataclasses.replace(one.device, memory_bytes=size))
    return dataclasses.replace(whole, classes=(less,))


def listed(model: ModelSpec = MODEL, **fixed: int | str) -> Lattice:
    return list_runnable(CORE, model, 8, BASE, fixed=fixed)


def settings_in(lattice: Lattice) -> set[str]:
    return {lattice.choice(row).options.recompute for row in range(len(lattice))}


def prices(machine: Machine, lattice: Lattice) -> dict[str, tuple[float, float]]:
    """The fastest step of each setting that fits, and its fullest rank's bytes."""
    best: dict[str, tuple[float, float]] = {}
    for row in range(len(lattice)):
        choice = lattice.choice(row)
        try:
            price = run_sites(MODEL, machine, choice.layout, choice.options).price
        except (LayoutError, SpecError):
            continue
        name = choice.options.recompute
        if price.fits:
            best[name] = min(best.get(name, (np.inf, 0.0)), (price.step_s, price.needs_bytes))
    return best


def test_which_sets_a_plan_chooses_among() -> None:
    assert planned_modules(MODEL, CORE.modules) == (
        "mlp",
        "mla_up_proj",
        "layernorm",
        "moe_act",
        "shared_experts",
        "moe",
        "mla_up_proj+mlp",
        "layernorm+mla_up_proj+mlp",
        "layernorm+mla_up_proj+mlp+moe_act",
        "layernorm+mla_up_proj+mlp+moe_act+shared_experts",
        "layernorm+mla_up_proj+mlp+moe",
    )
    assert planned_modules(MODEL, read_program("hai-llm").modules) == (
        "mla_up_proj",
        "layernorm",
        "moe_act",
        "layernorm+mla_up_proj",
        "layernorm+mla_up_proj+moe_act",
    )
    assert planned_modules(PLANNED["llama3-8b"], CORE.modules) == ("mlp",)
    assert planned_modules(MODEL, ()) == ()
    for model in PLANNED.values():
        assert set(planned_modules(model, None)) <= set(MODULE_SETS)


@pytest.mark.parametrize("name", program_names())
def test_modules_are_offered_where_the_program_runs_them(name: str) -> None:
    program, fixed = read_program(name), {"tp": 1, "cp": 1, "pp": 1, "dp": 8, "micro_batch": 1}
    lattice = list_runnable(program, MODEL, 8, BASE, fixed=fixed | {"ep": 8})
    offered = {each for each in settings_in(lattice) if each in MODULE_SETS}
    assert offered == set(planned_modules(MODEL, program.modules))
    assert bool(offered) == bool(program.modules)


def test_a_set_that_is_given_need_not_be_on_the_ladder() -> None:
    assert settings_in(listed(tp=2, pp=2, recompute="core_attn+moe_act")) == {"core_attn+moe_act"}


FIXED = [
    {"tp": 2, "cp": 1, "pp": 2, "zero": 1, "etp": 1, "micro_batch": 1, "order": "pp-dp"},
    {"tp": 1, "cp": 1, "zero": 1, "etp": 1, "ep": 4, "micro_batch": 1, "schedule": "1f1b"},
]


@pytest.mark.parametrize(("fixed", "gib"), list(zip(FIXED, (3.3, 6.0), strict=True)), ids=str)
def test_the_answer_is_that_of_pricing_every_row(fixed: dict[str, int | str], gib: float) -> None:
    machine, lattice = Machine(small(gib)), listed(**fixed)
    known = prices(machine, lattice)
    truth = min(known.values())[0]
    space = lattice.keep(np.arange(len(lattice)))
    for search in (
        Search(MODEL, machine, space, gap=0.0),
        VastSearch(MODEL, machine, lattice, gap=0.0),
    ):
        noted: list[SearchProgress] = []
        found = search.run(watch=noted.append)
        assert found.progress.best_s == found.fitting[0].step_s == truth
        assert found.progress.gap == 0
        # Stopped at any moment, the gap that is printed would have been true.
        assert noted and all(each.bound_s <= truth <= each.best_s for each in noted)
    assert min(known, key=lambda name: known[name]) in MODULE_SETS


def test_stages_on_different_devices_are_searched_too() -> None:
    classes = (node_class("h100-sxm", 4), node_class("a100-80", 4))
    machine = Machine(ClusterSpec("grown", classes, find_link("ethernet-25")))
    fixed = {"tp": 2, "cp": 1, "pp": 2, "zero": 1, "etp": 1, "ep": 2, "micro_batch": 1}
    lattice = listed(**fixed, order="pp-dp", schedule="1f1b")
    known = prices(machine, lattice)
    assert known.keys() & set(MODULE_SETS)
    found = ClassSearch(MODEL, machine, lattice.keep(np.arange(len(lattice))), gap=0.0).run()
    assert found.progress.best_s == min(known.values())[0]


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**31), st.sampled_from(MODULE_SETS), st.sampled_from(["bf16", "fp8"]))
def test_no_bound_exceeds_a_price(at: int, setting: str, precision: str) -> None:
    base = dataclasses.replace(BASE, precision=precision)
    lattice = list_lattice(MODEL, 8, base, fixed={"recompute": setting})
    row = at % len(lattice)
    choice, one = lattice.choice(row), lattice.keep(np.array([row]))
    machine = Machine(find_cluster("h100-sxm:8"))
    try:
        price = run_sites(MODEL, machine, choice.layout, choice.options).price
    except (LayoutError, SpecError):
        return
    assert memory_bound_bytes(MODEL, one)[0] <= price.memory_bytes.max() * (1 + 1e-9)
    assert peak_bound_s(MODEL, machine, one)[0] <= price.step_s
    batches = [[base.context_tokens] * choice.options.micro_batch] * int(one.micro_batches[0])
    passes = Kernels(MODEL, machine).group_passes(choice, sort_batches(batches))
    rows = np.zeros(1, dtype=np.int64)
    bound = group_bound_s(MODEL, machine, one, rows, passes, {}, has_documents=False)
    assert bound[0] <= price.step_s


@pytest.mark.parametrize("setting", ["layernorm", "moe_act", "layernorm+moe_act", "moe"])
def test_a_bound_counts_what_modules_move_too(setting: str) -> None:
    """Norms and activations have no products; a bound knows most of what they take."""
    machine, bounds, times = Machine(find_cluster("h100-sxm:8")), [], []
    fixed = {"tp": 1, "cp": 1, "pp": 1, "dp": 8, "ep": 8, "etp": 1, "zero": 1, "micro_batch": 1}
    for recompute in ("none", setting):
        lattice = list_lattice(MODEL, 8, BASE, fixed=fixed | {"recompute": recompute})
        choice, one = lattice.choice(0), lattice.keep(np.array([0]))
        passes = Kernels(MODEL, machine).group_passes(choice, sort_batches([[4096]]))
        rows = np.zeros(1, dtype=np.int64)
        found = group_bound_s(MODEL, machine, one, rows, passes, None, has_documents=False)
        bounds.append(float(found[0]))
        times.append(run_sites(MODEL, machine, choice.layout, choice.options).price.step_s)
    more, counted = times[1] - times[0], bounds[1] - bounds[0]
    assert 0.4 * more < counted <= more


def test_more_modules_keep_less_and_take_longer() -> None:
    machine = Machine(find_cluster("h100-sxm:8"))
    fixed = {"tp": 1, "cp": 1, "pp": 2, "dp": 4, "ep": 4, "etp": 1, "zero": 1, "micro_batch": 1}
    known = prices(machine, listed(**fixed, order="pp-dp", schedule="1f1b"))
    ladder = ["none", "mlp", "mla_up_proj+mlp", "layernorm+mla_up_proj+mlp"]
    ladder.append("layernorm+mla_up_proj+mlp+moe_act")
    ladder.append("layernorm+mla_up_proj+mlp+moe_act+shared_experts")
    ladder.append("layernorm+mla_up_proj+mlp+moe")
    times, sizes = zip(*(known[name] for name in ladder), strict=True)
    assert list(times) == sorted(times) and list(sizes) == sorted(sizes, reverse=True)
    assert {*known} >= ALONE
    assert sizes[-1] > known["full"][1] and times[-1] < known["full"][0]


def test_what_a_plan_names_is_what_simulate_prices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = PlanRequest(
        *("qwen3-30b-a3b", "h100-sxm:16", 4096, 256),
        layout="tp=1,cp=1,pp=1,ep=8,etp=1,zero=1",
        micro_batch=2,
        program="megatron-core",
        seconds=20.0,
    )
    answer = plan(request)
    best = answer.best
    assert best.words["recompute"] in planned_modules(PLANNED["qwen3-30b-a3b"], CORE.modules)
    step = simulate(
        StepRequest(
            *("qwen3-30b-a3b", "h100-sxm:16", best.words["layout"], 4096, 256),
            micro_batch=int(best.words["micro-batch"]),
            recompute=best.words["recompute"],
            program="megatron-core",
        )
    )
    row = step.as_row()
    assert {name: row[name] for name in best.price} == best.price
    answer.lock.write(tmp_path / "plan.lock")
    code, out, _ = run(capsys, "explain", "plan", tmp_path / "plan.lock", "--quiet")
    assert code == 0 and f"recompute {best.words['recompute']}: " in out


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"program": "equipoise"},
            "program equipoise recomputes no modules, and --recompute is mla_up_proj+mlp. Give "
            "--recompute none, or another --program, as megatron-core.",
        ),
        (
            {"program": "torchtitan"},
            "program torchtitan recomputes no modules, and --recompute is mla_up_proj+mlp. Give "
            "--recompute none, or another --program, as megatron-core.",
        ),
        (
            {"model": "llama3-8b"},
            "recompute mla_up_proj+mlp: mla_up_proj needs latent attention, and the model has "
            "none. Give mlp.",
        ),
        (
            {"recompute": "mlp+mlp"},
            'recompute: "mlp+mlp" names mlp twice. Name it once.',
        ),
    ],
    ids=str,
)
def test_what_cannot_be_planned_is_refused(changed: dict[str, str], message: str) -> None:
    request = PlanRequest(
        *("deepseek-v3", "h100-sxm:1024", 4096, 8192),
        recompute="mlp+mla_up_proj",
        program="megatron-core",
    )
    with pytest.raises(SpecError, match=f"^{re.escape(message)}$"):
        read_inputs(dataclasses.replace(request, **changed))
