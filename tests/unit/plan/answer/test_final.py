"""Finalists: the first is the fastest, degrees differ; the smallest cluster that would do."""

import dataclasses

import numpy as np

from equipoise.cost.step.request import StepOptions
from equipoise.plan.answer.final import price_finalists, smallest_cluster
from equipoise.plan.search.search import Search
from equipoise.plan.space.choice import Choice
from equipoise.plan.space.listing import list_space
from equipoise.sim.machine import Machine
from equipoise.spec.cluster.spec import find_cluster
from equipoise.spec.model.presets import PLANNED
from equipoise.spec.words import read_model

MODEL = read_model("layers=8,hidden=2048,heads=16,kv_heads=4,vocab=32000")


def test_finalists_differ_in_degrees_and_are_in_order() -> None:
    space = list_space(MODEL, 8, StepOptions(4096, 16), fixed={"cp": 1, "zero": 1})
    search = Search(MODEL, Machine(find_cluster("h100-sxm:8")), space, gap=0.0)
    found = price_finalists(search, search.run())
    times = [each.run.price.step_s for each in found]
    assert len(found) == 4 and times == sorted(times)
    layouts = [each.choice.layout for each in found]
    assert len({(each.tp, each.pp, each.dp) for each in layouts}) == 4


def test_tokens_of_a_step_with_documents_are_those_of_all_pipelines() -> None:
    def pack(choice: Choice) -> list[list[list[int]]]:
        count = choice.options.count_micro_batches(choice.layout)
        batch = [1000, 3096] * choice.options.micro_batch
        return [[batch] * count for _ in range(choice.layout.dp)]

    space = list_space(MODEL, 8, StepOptions(4096, 16), fixed={"tp": 1, "cp": 1, "pp": 1})
    search = Search(MODEL, Machine(find_cluster("h100-sxm:8")), space, packer=pack)
    best = price_finalists(search, search.run())[0].run.price
    assert best.tokens == 4096 * 16


def test_nodes_are_placed_where_pairs_were_measured() -> None:
    matrix = np.full((4, 4), 400e9)
    matrix[0, 1] = matrix[1, 0] = matrix[2, 3] = matrix[3, 2] = 4e9
    cluster = dataclasses.replace(find_cluster("h100-sxm:32"), node_bytes_per_s=matrix)
    fixed = {"tp": 8, "cp": 1, "pp": 4, "recompute": "none", "schedule": "1f1b"}
    space = list_space(MODEL, 32, StepOptions(4096, 16), fixed=fixed)
    search = Search(MODEL, Machine(cluster), space)
    found = search.run()
    best = price_finalists(search, found)[0]
    assert sorted(best.nodes) == [0, 1, 2, 3] and best.nodes != (0, 1, 2, 3)
    assert best.run.price.step_s < found.fitting[0].step_s


def test_the_smallest_cluster() -> None:
    base = StepOptions(8192, 128)
    assert smallest_cluster(PLANNED["llama3-70b"], "h100-sxm", 8, base) == 16
    assert smallest_cluster(MODEL, "h100-sxm", 1 << 17, base) is None
