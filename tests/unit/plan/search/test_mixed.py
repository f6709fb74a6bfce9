"""The search on clusters of two classes against pricing every row where it stands."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.base.errors import LayoutError, SpecError
from equipoise.cost.step.request import StepOptions
from equipoise.plan.answer.final import price_finalists
from equipoise.plan.answer.run_steps import COMPARED
from equipoise.plan.search.incumbent import Priced
from equipoise.plan.search.mixed import ClassSearch, least_worst
from equipoise.plan.search.offload import search_offloaded
from equipoise.plan.space.choice import Choice
from equipoise.plan.space.columns import Space
from equipoise.plan.space.listing import list_space
from equipoise.sim.machine import Machine
from equipoise.sim.mixed.replay import run_sites
from equipoise.spec.cluster.link import find_link
from equipoise.spec.cluster.spec import ClusterSpec, node_class
from equipoise.spec.offload import OFFLOADS
from equipoise.spec.words import read_model

MODEL = read_model("layers=6,hidden=2048,heads=16,kv_heads=4,vocab=32000")
BASE = StepOptions(4096, 16)


def mixed(*names: str, usable_gib: float = 70.0) -> ClusterSpec:
    """Nodes of four devices, a class each, joined by a slow network."""
    classes = []
    for at, name in enumerate(names):
        one = node_class(name, 4)
        size = int(usable_gib * 2**30) + one.device.reserved_bytes
        device = dataclasses.replace(one.device, memory_bytes=size)
        classes.append(dataclasses.replace(one, name=f"{name}-{at}", device=device))
    return ClusterSpec("grown", tuple(classes), find_link("ethernet-25"))


def space(**fixed: int | str) -> Space:
    return list_space(MODEL, 8, BASE, fixed=fixed)


def prices(machine: Machine, rows: Space) -> dict[int, float]:
    """The fastest of all rows that fit."""
    found = {}
    for row in range(len(rows)):
        choice = rows.choice(row)
        try:
            price = run_sites(MODEL, machine, choice.layout, choice.options).price
        except (LayoutError, SpecError):
            continue
        if price.fits:
            found[row] = price.step_s
    return found


@pytest.mark.long
@pytest.mark.parametrize("names", [("a100-80", "h100-sxm"), ("h100-sxm", "v100-32")], ids=str)
@pytest.mark.parametrize(
    ("gib", "fixed"),
    [
        (70.0, {"cp": 1, "tp": 1, "micro_batch": 2, "recompute": "none"}),
        (8.0, {"cp": 1, "pp": 2, "micro_batch": 1, "schedule": "1f1b"}),
        (70.0, {"cp": 2, "micro_batch": 1, "recompute": "none", "zero": 1, "schedule": "zb-h1"}),
    ],
    ids=str,
)
def test_the_answer_is_that_of_pricing_every_row(
    names: tuple[str, str], gib: float, fixed: dict[str, int | str]
) -> None:
    machine, rows = Machine(mixed(*names, usable_gib=gib)), space(**fixed)
    truth = prices(machine, rows)
    search = ClassSearch(MODEL, machine, rows, gap=0.0)
    found = search.run()
    best = min(truth.values())
    assert found.progress.best_s == pytest.approx(best, rel=1e-12)
    assert found.progress.bound_s <= best * (1 + 1e-12)
    assert found.progress.priced <= len(rows)
    for row, step_s in truth.items():
        choice = rows.choice(row)
        assert search.bound_s(choice, virtual=choice.options.virtual) <= step_s
    first = price_finalists(search, found)[0].run.price
    assert first.step_s == pytest.approx(best, rel=1e-12)


def test_no_degrees_fixed_by_hand_are_faster() -> None:
    machine = Machine(mixed("a100-80", "h100-sxm"))
    asked: dict[str, int | str] = {"cp": 1, "micro_batch": 1, "recompute": "none", "zero": 1}
    free = ClassSearch(MODEL, machine, space(**asked)).run().progress.best_s
    for pp, tp in ((2, 1), (2, 2), (4, 1)):
        for order in ("dp-pp", "pp-dp"):
            rows = space(**asked, pp=pp, order=order, tp=tp)
            by_hand = ClassSearch(MODEL, machine, rows).run().progress.best_s
            assert free <= by_hand / 0.99


def test_the_bound_holds_with_documents() -> None:
    machine = Machine(mixed("a100-80", "h100-sxm"))

    def pack(choice: Choice) -> list[list[list[int]]]:
        count = choice.options.count_micro_batches(choice.layout)
        draw = np.random.default_rng(choice.layout.dp)
        whole = choice.options.micro_batch * 4096
        ranks = []
        for _ in range(choice.layout.dp):
            cuts = [sorted({0, whole, *draw.integers(1, whole, 3).tolist()}) for _ in range(count)]
            ranks.append([[stop - start for start, stop in pairwise(cut)] for cut in cuts])
        return ranks

    rows = space(tp=1, cp=1, micro_batch=1, recompute="none")
    search = ClassSearch(MODEL, machine, rows, packer=pack, gap=0.0)
    least = np.inf
    for row in range(len(rows)):
        choice = rows.choice(row)
        documents = search.documents(choice)[:1]
        try:
            price = run_sites(MODEL, machine, choice.layout, choice.options, documents=documents)
        except (LayoutError, SpecError):
            continue
        least = min(least, price.price.step_s)
        bound = search.bound_s(choice, virtual=choice.options.virtual)
        assert bound <= price.price.step_s
    assert search.run().progress.best_s == pytest.approx(least, rel=1e-12)


def test_no_policy_is_bounded_by_documents_of_another() -> None:
    """Documents have nothing to do with policies; a seed at which mixed groups are seen."""
    machine = Machine(mixed("a100-80", "h100-sxm"))

    def pack(choice: Choice) -> list[list[list[int]]]:
        options, layout = choice.options, choice.layout
        draw = np.random.default_rng(
            [2, COMPARED.index(options.policy), layout.dp, options.micro_batch]
        )
        batch = [int(4096 * draw.uniform(1, 3))] * options.micro_batch
        return [[batch] * options.count_micro_batches(layout)] * layout.dp

    fixed: dict[str, int | str] = {"cp": 1, "recompute": "none", "zero": 1, "schedule": "1f1b"}
    best = []
    for policies in (*((policy,) for policy in COMPARED), COMPARED):
        rows = list_space(MODEL, 8, BASE, fixed=fixed, policies=policies)
        found = ClassSearch(MODEL, machine, rows, packer=pack, gap=0.0).run()
        best.append(found.progress.best_s)
    *alone, together = best
    assert together == pytest.approx(min(alone), rel=1e-12) and together < max(alone)


def test_a_stopped_search_goes_on() -> None:
    machine, rows = Machine(mixed("a100-80", "h100-sxm")), space(cp=1, tp=1, recompute="none")
    whole = ClassSearch(MODEL, machine, rows)
    found = whole.run()
    assert ClassSearch(MODEL, machine, rows).run(seconds=0.0).progress.gap == np.inf
    noted: list[Priced] = []
    again = ClassSearch(MODEL, machine, rows, known=dict(whole.known), note=noted.append)
    assert again.run().fitting == found.fitting and not noted


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 30)), min_size=1, max_size=3),
    st.integers(1, 8),
)
def test_the_least_worst_of_all_ways_to_hold_layers(
    kinds: list[tuple[int, int]], layers: int
) -> None:
    times = [np.arange(layers + 1, dtype=np.float64) * each for _, each in kinds]
    counts = [count for count, _ in kinds]
    ranks = [each for count, each in kinds for _ in range(count)]
    best = [0.0] + [np.inf] * layers
    for each in ranks:
        best = [
            min(max(best[held - mine], each * mine) for mine in range(held + 1))
            for held in range(layers + 1)
        ]
    assert least_worst(times, counts, layers) == best[layers]


@pytest.mark.parametrize("gib", [2.5, 3.0])
def test_what_fits_only_by_offloading_is_found(gib: float) -> None:
    machine = Machine(mixed("a100-80", "h100-sxm", usable_gib=gib))
    fixed = {"cp": 1, "pp": 2, "tp": 2, "micro_batch": 2, "schedule": "1f1b", "recompute": "none"}
    search = ClassSearch(MODEL, machine, space(**fixed), gap=0.0)
    found = search_offloaded(search, search.run())
    places = range(len(OFFLOADS) * len(search.space))
    every = [search.space.choice(place) for place in places]
    steps = [run_sites(MODEL, machine, each.layout, each.options).price for each in every]
    truth = min((price.step_s for price in steps if price.fits), default=np.inf)
    assert found.progress.best_s == truth
    assert every[found.fitting[0].row].options.offload == "optimizer"
