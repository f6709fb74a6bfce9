"""The search against pricing every row; stopped, resumed, and with more memory."""

import dataclasses

import numpy as np
import pytest

from equipoise.base.errors import LayoutError, SpecError
from equipoise.cost.step.request import StepOptions
from equipoise.plan.answer.run_steps import COMPARED
from equipoise.plan.search.incumbent import Outcome, Priced, SearchProgress
from equipoise.plan.search.search import Search
from equipoise.plan.space.choice import Choice
from equipoise.plan.space.columns import Space
from equipoise.plan.space.listing import list_space
from equipoise.plan.space.packs import Packer, Packs
from equipoise.sim.machine import Machine
from equipoise.sim.step import Documents, price_step
from equipoise.spec.catalog import Policy
from equipoise.spec.cluster.spec import ClusterSpec, find_cluster
from equipoise.spec.words import read_model
from support.drawn_batches import packer_of

MODEL = read_model("layers=8,hidden=2048,heads=16,kv_heads=4,vocab=32000")
BASE = StepOptions(4096, 16)


def cluster(usable_gib: float, devices: int = 8) -> ClusterSpec:
    whole = find_cluster(f"h100-sxm:{devices}")
    one = whole.classes[0]
    size = int(usable_gib * 2**30) + one.device.reserved_bytes
    small = dataclasses.replace(one, device=dataclasses.replace(one.device, memory_bytes=size))
    return dataclasses.replace(whole, classes=(small,))


def space(**fixed: int | str) -> Space:
    return list_space(MODEL, 8, BASE, fixed=fixed)


def brute(machine: Machine, rows: Space, packer: Packer | None = None) -> float:
    best = np.inf
    for row in range(len(rows)):
        choice = rows.choice(row)
        documents = Packs(MODEL, packer).documents(choice)[:1]
        try:
            price = price_step(MODEL, machine, choice.layout, choice.options, documents=documents)
        except (LayoutError, SpecError):
            continue
        if price.fits:
            best = min(best, price.step_s)
    return best


@pytest.mark.long
@pytest.mark.parametrize("gib", [12.0])
@pytest.mark.parametrize(
    "fixed",
    [
        {"micro_batch": 2, "recompute": "none", "zero": 1},
        {"tp": 2, "cp": 1, "zero": 1, "micro_batch": 1},
        {"cp": 2, "pp": 1, "micro_batch": 1, "zero": 3},
    ],
    ids=str,
)
def test_the_answer_is_that_of_pricing_every_row(gib: float, fixed: dict[str, int | str]) -> None:
    machine = Machine(cluster(gib))
    rows = space(**fixed)
    found = Search(MODEL, machine, rows, gap=0.0).run()
    truth = brute(machine, rows)
    assert found.progress.best_s == truth
    assert found.progress.bound_s <= truth
    near = Search(MODEL, machine, rows, gap=0.05).run()
    assert truth * (1 - 1e-12) <= near.progress.best_s <= truth * 1.05 * (1 + 1e-12)
    if found.fitting:
        assert found.fitting[0].step_s == truth
        assert found.progress.gap == 0


@pytest.mark.parametrize(
    ("fixed", "winner"),
    [
        ({"tp": 1, "cp": 1, "recompute": "none", "zero": 1, "micro_batch": 2}, "by-work"),
        ({"tp": 2, "cp": 1, "recompute": "none", "zero": 1, "micro_batch": 1}, "by-tokens"),
    ],
)
def test_any_policy_is_as_fast_as_the_faster_one(
    fixed: dict[str, int | str], winner: Policy
) -> None:
    machine, pack = Machine(cluster(40.0)), packer_of(MODEL, BASE, 0)
    best = {}
    for policies in (COMPARED, *((policy,) for policy in COMPARED)):
        rows = list_space(MODEL, 8, BASE, fixed=fixed, policies=policies)
        found = Search(MODEL, machine, rows, packer=pack, gap=0.0).run()
        assert found.progress.best_s == brute(machine, rows, pack)
        assert rows.choice(found.fitting[0].row).options.policy in policies
        best[policies] = found.progress.best_s
    assert best[COMPARED] == best[winner,] == min(best.values()) < max(best.values())


@pytest.mark.long
@pytest.mark.parametrize(
    ("seed", "fixed"),
    [
        (1, {"cp": 1, "recompute": "none", "zero": 1}),
        (111, {"cp": 2, "tp": 1, "recompute": "none", "zero": 1}),
    ],
)
def test_no_policy_is_bounded_by_documents_of_another(
    seed: int, fixed: dict[str, int | str]
) -> None:
    """Documents have nothing to do with policies; seeds at which a mixed cache is seen."""

    def pack(choice: Choice) -> Documents:
        options, layout = choice.options, choice.layout
        place = COMPARED.index(options.policy), layout.dp, options.micro_batch
        draw = np.random.default_rng([seed, *place])
        count = options.count_micro_batches(layout)
        windows = [[int(4096 * draw.uniform(1, 3))] * options.micro_batch for _ in range(count)]
        return [windows] * layout.dp

    machine, best, noted = Machine(cluster(60.0)), [], list[SearchProgress]()
    for policies in (*((policy,) for policy in COMPARED), COMPARED):
        rows = list_space(MODEL, 8, BASE, fixed=fixed, policies=policies)
        noted.clear()
        found = Search(MODEL, machine, rows, packer=pack, gap=0.0).run(watch=noted.append)
        best.append(found.progress.best_s)
    *alone, together = best
    assert together == min(alone) < max(alone)
    assert max(each.bound_s for each in noted) <= together


def test_a_search_of_policies_goes_on() -> None:
    pack, noted = packer_of(MODEL, BASE, 0), list[Priced]()
    rows = list_space(MODEL, 8, BASE, fixed={"tp": 2, "cp": 1, "micro_batch": 1}, policies=COMPARED)
    machine = Machine(cluster(40.0))
    whole = Search(MODEL, machine, rows, packer=pack, gap=0.0, note=noted.append).run()
    assert {rows.choice(each.row).options.policy for each in noted} == set(COMPARED)
    again: list[Priced] = []
    known = {each.row: each for each in noted[: len(noted) // 2]}
    search = Search(MODEL, machine, rows, pack, 0.0, dict(known), again.append)
    assert search.run().fitting == whole.fitting
    assert {each.row for each in again} == {each.row for each in noted} - set(known)


def run(gib: float, **arguments: object) -> tuple[Outcome, Search]:
    search = Search(MODEL, Machine(cluster(gib)), space(cp=1), **arguments)  # type: ignore[arg-type]
    return search.run(), search


def test_more_memory_is_never_slower() -> None:
    times = [run(gib, gap=0.0)[0].progress.best_s for gib in (8.0, 12.0, 40.0)]
    assert times == sorted(times, reverse=True)


def test_what_was_priced_is_not_priced_again() -> None:
    noted: list[Priced] = []
    whole, _ = run(20.0, note=noted.append)
    assert len(noted) == whole.progress.priced
    again: list[Priced] = []
    known = {each.row: each for each in noted[: len(noted) // 2]}
    before = set(known)
    resumed, _ = run(20.0, known=known, note=again.append)
    assert {each.row for each in again} == {each.row for each in noted} - before
    assert resumed.progress.best_s == whole.progress.best_s
    assert resumed.fitting[0] == whole.fitting[0]


def test_a_search_without_time_says_that_it_knows_nothing() -> None:
    search = Search(MODEL, Machine(cluster(20.0)), space(cp=1))
    stopped = search.run(seconds=0.0)
    assert stopped.fitting == () and stopped.progress.gap == np.inf
    assert search.run().progress.gap <= 0.01


def test_documents_are_packed_once_for_each_number_of_ranks_and_windows() -> None:
    asked: list[Choice] = []

    def pack(choice: Choice) -> list[list[list[int]]]:
        asked.append(choice)
        count = choice.options.count_micro_batches(choice.layout)
        whole = choice.options.micro_batch * 4096
        rows = [[[whole // 2, whole // 2]] * count for _ in range(choice.layout.dp)]
        return [[[whole]] * count, *rows[1:]]

    search = Search(MODEL, Machine(cluster(40.0)), space(cp=1), packer=pack)
    found = search.run()
    keys = [
        (each.layout.dp, each.options.micro_batch, each.layout.meets_each_turn) for each in asked
    ]
    assert len(keys) == len(set(keys))
    choice = search.space.choice(found.fitting[0].row)
    rows = search.documents(choice)
    assert rows[0][0] == [4096 * choice.options.micro_batch]  # most work first
    full = run(40.0)[0].progress.best_s
    assert found.progress.best_s == pytest.approx(full, rel=0.1)


def test_nothing_fits() -> None:
    found, _ = run(0.5)
    assert found.fitting == () and found.least_bytes > 0.5 * 2**30


def test_a_long_window_is_shared_by_context_ranks() -> None:
    """A planner that prices no context ranks never chooses them."""
    asked = StepOptions(262_144, 1)
    machine = Machine(cluster(60.0))
    found = Search(MODEL, machine, list_space(MODEL, 8, asked)).run(seconds=20.0)
    alone = Search(MODEL, machine, list_space(MODEL, 8, asked, fixed={"cp": 1})).run(seconds=20.0)
    best = found.fitting[0]
    assert list_space(MODEL, 8, asked)["cp"][best.row] > 1
    assert not alone.fitting or best.step_s < alone.fitting[0].step_s
