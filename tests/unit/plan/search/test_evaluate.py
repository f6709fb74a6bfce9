"""Cores that choices share are those of each choice alone."""

import numpy as np

from equipoise.cost.step.request import StepOptions
from equipoise.plan.answer.run_steps import COMPARED
from equipoise.plan.search.search import Search
from equipoise.plan.space.choice import Choice
from equipoise.plan.space.listing import list_space
from equipoise.sim.machine import Machine
from equipoise.sim.step import Documents, price_step
from equipoise.spec.cluster.spec import find_cluster
from equipoise.spec.words import read_model

MODEL = read_model("layers=4,hidden=1024,heads=16,kv_heads=8,vocab=8000")
MACHINE = Machine(find_cluster("h100-sxm:8"))


def pack(choice: Choice) -> Documents:
    """Twenty micro-batches, no two alike: more than are replayed."""
    draw = np.random.default_rng(choice.layout.dp + COMPARED.index(choice.options.policy))
    sizes = draw.integers(200, 3000, (choice.layout.dp, 20, 2)).tolist()
    return [[list(batch) for batch in rank] for rank in sizes]


def test_times_do_not_depend_on_who_asked_before() -> None:
    fixed: dict[str, int | str] = {"cp": 2, "dp": 2, "micro_batch": 1, "zero": 1, "order": "dp-pp"}
    space = list_space(MODEL, 8, StepOptions(8192, 40), fixed=fixed, policies=COMPARED)
    search = Search(MODEL, MACHINE, space, packer=pack)
    rows = np.flatnonzero(space["context_strategy"] < 2)[::-17].tolist()
    found = [search.documents(space.choice(row))[:1] for row in rows]
    assert len(rows) > 5
    for row, documents in zip(rows, found, strict=True):
        choice = space.choice(row)
        alone = price_step(MODEL, MACHINE, choice.layout, choice.options, documents=documents)
        shared = search.parts(choice)
        asked = price_step(
            MODEL, MACHINE, choice.layout, choice.options, documents=documents, parts=shared
        )
        assert asked.step_s == alone.step_s


def test_one_core_serves_what_differs_in_stages_and_recomputation() -> None:
    space = list_space(MODEL, 8, StepOptions(8192, 40), fixed={"cp": 2, "dp": 2, "tp": 1})
    search = Search(MODEL, MACHINE, space, packer=pack)
    is_one = (space["micro_batch"] == 1) & (space["context_strategy"] == 0) & (space["order"] == 0)
    choices = [space.choice(row) for row in np.flatnonzero(is_one).tolist()]
    cores = {id(search.estimates.cores.find(choice, in_windows=False)[1]) for choice in choices}
    assert len({choice.options.recompute for choice in choices}) == 7
    assert len(cores) == 1
    windows = search.estimates.cores.find(choices[0], in_windows=True)[1]
    assert id(windows) not in cores
