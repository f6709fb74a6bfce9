"""The search of a lattice against pricing every choice of it."""

import dataclasses
import functools

import numpy as np
import pytest

from equipoise.base.errors import EquipoiseError
from equipoise.cost.step.request import StepOptions
from equipoise.plan.search import vast
from equipoise.plan.search.deadline import TimeOver
from equipoise.plan.search.incumbent import SearchProgress
from equipoise.plan.search.survey import VastEstimates
from equipoise.plan.search.vast import VastSearch, least_peak_s
from equipoise.plan.space.listing import list_lattice
from equipoise.sim.machine import Machine
from equipoise.sim.step import price_step
from equipoise.spec.cluster.spec import ClusterSpec, find_cluster
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import WindowSpec
from equipoise.spec.words import read_model
from support.drawn_batches import packer_of

DENSE = read_model("layers=8,hidden=2048,heads=16,kv_heads=4,vocab=32000")
SPARSE = read_model(
    "layers=6,hidden=1024,heads=16,vocab=32000,experts=8,top_k=2,expert_ffn=2048,dense_layers=1"
)
WINDOWED = dataclasses.replace(DENSE, window=WindowSpec(1024, 0.5))
BASE = StepOptions(4096, 16)


def cluster(usable_gib: float, devices: int = 8) -> ClusterSpec:
    whole = find_cluster(f"h100-sxm:{devices}")
    one = whole.classes[0]
    size = int(usable_gib * 2**30) + one.device.reserved_bytes
    small = dataclasses.replace(one, device=dataclasses.replace(one.device, memory_bytes=size))
    return dataclasses.replace(whole, classes=(small,))


@functools.cache
def prices(at: int) -> dict[int, tuple[float, bool]]:
    """Seconds of every choice of a case, and whether it fits."""
    model, gib, fixed = CASES[at]
    machine, lattice = Machine(cluster(gib)), list_lattice(model, 8, BASE, fixed=fixed)
    known = {}
    for row in range(len(lattice)):
        choice = lattice.choice(row)
        try:
            price = price_step(model, machine, choice.layout, choice.options)
        except EquipoiseError:
            continue
        known[row] = price.step_s, price.fits
    return known


CASES = [
    (DENSE, 12.0, {"micro_batch": 2, "zero": 1, "recompute": "none"}),
    (WINDOWED, 12.0, {"cp": 2, "pp": 1, "micro_batch": 1, "zero": 3, "recompute": "full"}),
    (SPARSE, 9.0, {"tp": 2, "micro_batch": 1, "zero": 1, "schedule": "1f1b", "order": "pp-dp"}),
]


@pytest.mark.long
@pytest.mark.parametrize("at", range(len(CASES)))
def test_the_answer_is_that_of_pricing_every_row(at: int) -> None:
    model, gib, fixed = CASES[at]
    machine, lattice = Machine(cluster(gib)), list_lattice(model, 8, BASE, fixed=fixed)
    known = prices(at)
    truth = min(step_s for step_s, fits in known.values() if fits)
    noted: list[SearchProgress] = []
    found = VastSearch(model, machine, lattice, gap=0.0).run(watch=noted.append)
    assert found.progress.best_s == found.fitting[0].step_s == truth
    assert max(each.bound_s for each in noted) <= truth * (1 + 1e-12)
    assert found.progress.gap == 0 and found.listed == len(lattice)
    near = VastSearch(model, machine, lattice, gap=0.05).run()
    assert truth <= near.progress.best_s <= truth * 1.05 * (1 + 1e-12)
    assert near.progress.bound_s <= truth * (1 + 1e-12)


@pytest.mark.parametrize("at", range(len(CASES)))
def test_no_bound_exceeds_a_price(at: int) -> None:
    model, gib, fixed = CASES[at]
    machine, lattice = Machine(cluster(gib)), list_lattice(model, 8, BASE, fixed=fixed)
    estimates = VastEstimates(model, machine, lattice, None)
    known = prices(at)
    assert least_peak_s(model, machine, lattice, packs=False) <= min(s for s, _ in known.values())
    siblings = lattice.factors[-1].sizes
    for cell in range(len(lattice.counts)):
        first, stop = (int(each) for each in lattice.firsts[cell : cell + 2])
        mine = {row: known[row] for row in range(first, stop) if row in known}
        least = min((s for s, _ in mine.values()), default=np.inf)
        assert estimates.kernels_s(first) <= least
        survey = estimates.survey(np.array([cell]), 0.0, np.inf)
        tight = estimates.tighten(survey.rows, survey.bound_s)
        assert (tight >= survey.bound_s).all()
        open_rows = set[int]()
        for row, cheap, bound in zip(survey.rows, survey.bound_s, tight, strict=True):
            for each in range(int(row), int(row) + int(siblings[cell])):
                open_rows.add(each)
                step_s, fits = mine.get(each, (np.inf, False))
                assert cheap <= step_s
                assert bound <= step_s or not fits
        assert not any(fits for row, (_, fits) in mine.items() if row not in open_rows)
        assert survey.too_large == stop - first - len(open_rows)


def test_documents_are_searched_too() -> None:
    machine, fixed = Machine(cluster(40.0)), {"tp": 2, "cp": 1, "recompute": "none", "zero": 1}
    lattice, pack = list_lattice(DENSE, 8, BASE, fixed=fixed), packer_of(DENSE, BASE, 0)
    found = VastSearch(DENSE, machine, lattice, packer=pack, gap=0.0).run()
    best = np.inf
    for row in range(len(lattice)):
        choice = lattice.choice(row)
        documents = found_documents(machine, lattice, pack, choice)
        try:
            price = price_step(DENSE, machine, choice.layout, choice.options, documents=documents)
        except EquipoiseError:
            continue
        best = min(best, price.step_s if price.fits else np.inf)
    assert found.progress.best_s == best


def found_documents(machine, lattice, pack, choice):
    return VastSearch(DENSE, machine, lattice, packer=pack).documents(choice)[:1]


@pytest.mark.parametrize("has_recipe", [False, True])
def test_an_answer_is_there_before_the_compiler_is(has_recipe: bool, monkeypatch) -> None:
    machine, lattice = Machine(cluster(40.0)), list_lattice(SPARSE, 8, BASE)
    said = {"tp": [2], "pp": [2], "zero": [1], "recompute": [0]}
    seeds = tuple(lattice.find(said, strictly=True)[:1].tolist()) if has_recipe else ()
    search = VastSearch(SPARSE, machine, lattice, published=seeds)

    def stop(_: object) -> None:
        raise TimeOver

    monkeypatch.setattr(vast, "compile_loop", stop)
    found = search.run(seconds=60.0)
    assert found.fitting and len(search.known) <= 12
    for row in seeds:
        choice = lattice.choice(row)
        price = price_step(SPARSE, machine, choice.layout, choice.options)
        assert found.fitting[0].step_s <= price.step_s and price.fits


def test_the_first_answer_shares_gradients_where_whole_ones_do_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base, whole = StepOptions(4096, 8), Machine(cluster(40.0))
    one, two = (
        price_step(DENSE, whole, Layout(dp=8, zero=zero), base).needs_bytes for zero in (1, 2)
    )
    machine, fixed = Machine(cluster((one + two) / 2**31)), {"tp": 1, "cp": 1, "pp": 1}
    lattice = list_lattice(DENSE, 8, base, fixed=fixed)

    def stop(_: object) -> None:
        raise TimeOver

    monkeypatch.setattr(vast, "compile_loop", stop)
    found = VastSearch(DENSE, machine, lattice).run(seconds=60.0)
    best = lattice.choice(found.fitting[0].row)
    assert (best.layout.dp, best.layout.zero, best.options.recompute) == (8, 2, "none")


def test_a_stopped_search_is_no_slower_than_a_published_recipe() -> None:
    machine, lattice = Machine(cluster(40.0)), list_lattice(DENSE, 8, BASE)
    seed = int(
        lattice.find({"tp": [2], "pp": [2], "zero": [1], "recompute": [0]}, strictly=True)[0]
    )
    search = VastSearch(DENSE, machine, lattice, published=(seed,))
    choice, noted = lattice.choice(seed), list[SearchProgress]()
    price = price_step(DENSE, machine, choice.layout, choice.options)
    outcome = search.run(seconds=20.0, watch=noted.append)
    assert price.fits and noted[0].best_s <= price.step_s
    assert outcome.fitting[0].step_s <= price.step_s
    again = VastSearch(DENSE, machine, lattice, known=dict(search.known)).run()
    assert again.fitting[0].step_s <= outcome.fitting[0].step_s
