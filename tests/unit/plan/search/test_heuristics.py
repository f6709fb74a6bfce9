"""Recipes are rows of the space; a search that is stopped is no slower than those it priced."""

import numpy as np
import pytest

from equipoise.cost.step.request import StepOptions
from equipoise.plan.search.heuristics import RECIPES, find_seeds, recipe_rows, scattered
from equipoise.plan.search.incumbent import Priced
from equipoise.plan.search.mixed import ClassSearch
from equipoise.plan.search.search import Search
from equipoise.plan.space.choice import Choice
from equipoise.plan.space.listing import list_lattice, list_space
from equipoise.sim.machine import Machine
from equipoise.sim.step import Documents, price_step
from equipoise.spec.cluster.spec import find_cluster
from equipoise.spec.words import read_model

MODEL = read_model("layers=8,hidden=2048,heads=16,kv_heads=4,vocab=32000")
BASE = StepOptions(4096, 16)


class Ticks:
    """A clock that a second passes on whenever somebody looks at it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.mark.parametrize(
    ("model", "cluster", "base", "has_documents"),
    [
        ("llama3-70b", "h100-sxm:64", StepOptions(8192, 128), False),
        ("llama3-8b", "h100-sxm:8", StepOptions(131_072, 8), True),
        ("mixtral-8x7b", "h100-sxm:16", StepOptions(4096, 32), False),
    ],
)
def test_recipes_keep_their_rules(
    model: str, cluster: str, base: StepOptions, has_documents: bool
) -> None:
    machine = Machine(find_cluster(cluster))
    space = list_space(read_model(model), machine.cluster.devices, base)
    recipes = find_seeds(read_model(model), machine, space, has_documents=has_documents)
    rows = [row for recipe in recipes for row in recipe]
    assert len(recipes) > 6 and set(rows) <= set(range(len(space)))
    for recipe in recipes:
        laid = [space.choice(row) for row in recipe]
        sharing = [each.layout.pp * each.layout.cp for each in laid]
        assert sharing == sorted(set(sharing)) and 1 <= len(sharing) <= 3
        assert len({(each.layout.tp, each.options.recompute) for each in laid}) == 1
        for each in laid:
            assert each.layout.tp <= 8 and each.options.micro_batch == 1
            assert each.layout.zero == 1 or (each.layout.zero == 3 and each.layout.pp == 1)
            assert each.options.schedule in ("1f1b", "interleaved")


def test_what_is_fixed_is_kept_where_no_recipe_has_it() -> None:
    fixed: dict[str, int | str] = {"tp": 16, "zero": 0, "recompute": "every-2", "micro_batch": 2}
    space = list_space(MODEL, 32, BASE, fixed=fixed)
    machine = Machine(find_cluster("h100-sxm:32"))
    recipes = find_seeds(MODEL, machine, space, has_documents=False)
    assert len(recipes) == 1
    choice = space.choice(recipes[0][0])
    assert (choice.layout.tp, choice.layout.zero) == (16, 0)


def test_the_list_of_recipes_is_part_of_the_list_of_all() -> None:
    model, base = read_model("mixtral-8x7b"), StepOptions(4096, 32)
    every = list_lattice(model, 32, base)
    some = recipe_rows(every)
    assert 0 < len(some) < 0.3 * len(every)
    space = every.keep(some)
    places = RECIPES | {"zero": (1, 2, 3)}
    assert all(set(space[name].tolist()) <= set(known) for name, known in places.items())
    # Gradients are shared alone where there are no stages.
    assert set(space["pp"][space["zero"] == 2].tolist()) == {1} < set(space["pp"].tolist())
    lattice = list_lattice(model, 32, base, fixed={"tp": 16, "zero": 0})
    fixed = lattice.keep(recipe_rows(lattice))
    assert {*zip(fixed["tp"].tolist(), fixed["zero"].tolist(), strict=True)} == {(16, 0)}


@pytest.mark.long
@pytest.mark.parametrize("seconds", [100])
def test_a_stopped_search_is_no_slower_than_its_seeds(seconds: int) -> None:
    machine = Machine(find_cluster("h100-sxm:64"))
    model, base = read_model("llama3-70b"), StepOptions(8192, 128)
    space = list_space(model, 64, base, fixed={"cp": 1})
    ticks, at = Ticks(), list[float]()
    search = Search(model, machine, space, note=lambda _: at.append(ticks.now), clock=ticks)
    found = search.run(seconds=seconds)
    assert found.progress.gap > search.gap
    seeds: list[float] = []
    for recipe in find_seeds(model, machine, space, has_documents=False):
        for row in recipe:
            choice = space.choice(row)
            price = price_step(model, machine, choice.layout, choice.options)
            if price.fits:
                seeds.append(price.step_s)
                break
    assert seeds and found.fitting[0].step_s <= min(seeds)
    # What is noted last are the seeds themselves, which were priced first.
    looks = [tick for tick in at if tick <= seconds + 1]
    assert len(at) - len(looks) <= len(seeds) + 24


def pack(choice: Choice) -> Documents:
    size, count = (
        choice.options.micro_batch * 4096,
        choice.options.count_micro_batches(choice.layout),
    )
    return [[[size - 100, 100]] * count for _ in range(choice.layout.dp)]


@pytest.mark.parametrize("packer", [None, pack])
def test_a_search_that_ends_by_itself_has_no_seeds(packer) -> None:
    machine, noted = Machine(find_cluster("h100-sxm:8")), dict[float, list[Priced]]()
    space = list_space(MODEL, 8, BASE, fixed={"recompute": "none"})
    found = {}
    for seconds in (np.inf, 1e6):
        noted[seconds] = []
        search = Search(MODEL, machine, space, packer, note=noted[seconds].append)
        found[seconds] = search.run(seconds=seconds)
    assert noted[np.inf] == noted[1e6]
    assert found[np.inf].fitting == found[1e6].fitting
    assert found[np.inf].progress == found[1e6].progress


@pytest.mark.long
@pytest.mark.parametrize("kind", [Search, ClassSearch])
def test_an_evaluation_that_never_ends_is_stopped(kind: type[Search]) -> None:
    """Nothing else ends it: it would hang."""

    def never(choice: Choice) -> Documents:
        while choice.layout.dp > 1:
            pass
        return pack(choice)

    space = list_space(MODEL, 8, BASE, fixed={"recompute": "none", "zero": 1})
    machine = Machine(find_cluster("h100-sxm:8"))
    search = kind(MODEL, machine, space, never)
    found = search.run(seconds=1.0)
    assert found.progress.bound_s < np.inf and found.progress.gap > search.gap
    # And what it had priced is priced the same by one that is resumed with all of its time.
    again = kind(MODEL, machine, space, pack, known=dict(search.known)).run()
    whole = kind(MODEL, machine, space, pack).run()
    assert again.progress.best_s == whole.progress.best_s


def test_experts_on_more_nodes_than_they_need_count_as_slower() -> None:
    model = read_model(
        "layers=8,hidden=1024,heads=16,vocab=32000,experts=16,top_k=2,expert_ffn=512"
    )
    space = list_space(model, 64, BASE, fixed={"tp": 1, "zero": 1, "micro_batch": 1, "etp": 1})
    slower = dict[tuple[int, ...], float]()
    for row, each in enumerate(scattered(space, 8)):
        layout = space.choice(row).layout
        slower[layout.cp, layout.pp, layout.ep, layout.order[0] == "pp"] = float(each)
        group = layout.group_of(0, "ep")
        nodes, least = len({rank // 8 for rank in group}), -(-len(group) // 8)
        assert each == pytest.approx(1.0 + 0.25 * np.log2(nodes / least))
    assert slower[1, 8, 8, False] == 1.75 and slower[1, 8, 8, True] == 1.0
