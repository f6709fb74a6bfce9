"""What a step of a recommender will take on this machine, rank by rank, before and beside a run.

What it decides
    Counts follow from the plan and the samples; rates are what ``recsys.foresight.calibrate``
    measured, in ``recommend.json`` beside the device files. Without them nothing is said of
    seconds.

Kept true (tests/multi/recsys/test_forecast.py)
    Counts of bytes and ids are those that ranks measure; rates of another machine are refused.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from equipoise.balance.tables.plan import TableAnswer
from equipoise.base.errors import SpecError
from equipoise.cost.recommend import RankCounts, StepRates, TableRates
from equipoise.recsys.cache.foresight import predict_hits
from equipoise.recsys.folder import held_rates
from equipoise.recsys.models.catalog import build_model
from equipoise.recsys.models.shards import unit_shapes
from equipoise.recsys.optimizer import SparseStep
from equipoise.recsys.place import predict_traffic
from equipoise.recsys.samples import Samples
from equipoise.recsys.tiers.run import cached_shards, keep_rows
from equipoise.recsys.towers.modules import TowerModule
from equipoise.recsys.trainer import draw_order
from equipoise.schedule.tables.placement import TablePlan
from equipoise.schedule.tables.traffic import count_dense_bytes
from equipoise.spec.device.file import device_folder
from equipoise.spec.device.here import cpu_model
from equipoise.spec.recommend import RecommendSpec
from equipoise.spec.tables.table import FLOAT_BYTES


def rates_file() -> Path:
    """Where ``equipoise calibrate`` keeps the rates of recommenders on this machine."""
    return device_folder() / "recommend.json"


def read_rates(file: Path | None = None) -> StepRates | None:
    """The rates of this machine; None before they were measured.

    Raises:
        SpecError: the file is damaged, or of another machine.
    """
    path = rates_file() if file is None else file
    try:
        rates = StepRates.from_row(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise SpecError(
            f"{path} cannot be read ({error}). Measure again: equipoise calibrate run.toml."
        ) from error
    if rates.machine != cpu_model():
        raise SpecError(
            f'{path} was measured on "{rates.machine}" but this is "{cpu_model()}". Measure this '
            "one: equipoise calibrate run.toml."
        )
    return rates


def placing_rates(folder: Path) -> TableRates:
    """The rates by which a run places its tables: those that its folder holds, or this machine's.

    Where this machine's cannot be read, or are another's, the assumed ones.
    """
    held = held_rates(folder)
    if held is not None:
        return held
    try:
        return TableRates.fitted(read_rates())
    except SpecError:
        return TableRates()


def count_dense(spec: RecommendSpec, samples: Samples, answer: TableAnswer) -> tuple[int, int]:
    """Weights of the dense part, and FLOP of a sample's forward."""
    vectors = answer.plan.outputs
    numbers = samples.numbers.shape[1]
    dense = build_model(spec.model, vectors, numbers, seed=spec.train.seed)
    pooled = torch.zeros(1, sum(each.width for each in vectors))
    with FlopCounterMode(display=False) as counter:
        dense(pooled, torch.zeros(1, numbers))
    weights = sum(each.numel() for each in dense.parameters())
    return weights, counter.get_total_flops()


def count_towers(spec: RecommendSpec, plan: TablePlan) -> list[int]:
    """FLOP of each rank in a forward of the modules of its host's towers, for a sample."""
    flop = []
    for tower in plan.towers:
        module = TowerModule(spec.model.tower_sizes, len(tower.tables))
        with FlopCounterMode(display=False) as counter:
            module(torch.zeros(1, len(tower.tables), spec.model.width))
        flop.append(counter.get_total_flops())
    return [
        sum(flop[at] for at, _ in plan.towers_on(rank // plan.per_host))
        for rank in range(plan.ranks)
    ]


def count_step(spec: RecommendSpec, samples: Samples, answer: TableAnswer) -> list[RankCounts]:
    """What each rank does in a mean step."""
    plan, ranks = answer.plan, answer.plan.ranks
    weights, flop = count_dense(spec, samples, answer)
    traffic = predict_traffic(spec, samples, plan)
    size = spec.train.batch / ranks
    towers = count_towers(spec, plan)
    counts, passes = samples.row_counts(), np.zeros(ranks)
    held = np.zeros(ranks, dtype=np.int64)
    train = samples.edges[1]
    for each in plan.placements:
        row_map = each.row_map
        if each.kind == "data":
            ids = counts[each.table.name].sum() * size / train
            passes += (4 * ids + 2 * size) * each.table.width * FLOAT_BYTES
            held += 1
            continue
        for shard, rank in enumerate(each.ranks):
            rows = row_map.rows_of(each.row_shard(shard))
            ids = counts[each.table.name][rows].sum() * size * ranks / train
            begin, end = each.columns(shard)
            passes[rank] += (4 * ids + 2 * size * ranks) * (end - begin) * FLOAT_BYTES
            held[rank] += 1
    sent = traffic["bytes"].sum(axis=1)
    dense_bytes, dense_exchanges = (4 * weights, 1) if ranks > 1 else (0, 0)
    if shards := count_shards(spec, samples, plan):
        dense_bytes = sum(shards.sent.values()) * ranks // (2 * (ranks - 1))
        dense_exchanges = shards.units * (3 + 2 * (plan.hosts > 1))
    exchanges = 0 if ranks == 1 else count_exchanges(spec, answer)
    return [
        RankCounts(
            shards=int(held[rank]),
            table_bytes=float(passes[rank]),
            exchanges=exchanges,
            sent_bytes=float(sent[rank]),
            flop=3.0 * size * (flop + plan.hosts * towers[rank]),
            dense_bytes=dense_bytes,
            dense_exchanges=dense_exchanges,
            samples=size,
        )
        for rank in range(ranks)
    ]


def predict_first_hits(spec: RecommendSpec, samples: Samples, plan: TablePlan) -> dict[str, float]:
    """Share of the first epoch's rows that each table's caches will have, over all ranks.

    Empty where rows lie in memory as fp32.
    """
    step, total = SparseStep(spec.tables.optimizer), dict[str, tuple[int, int]]()
    order = draw_order(spec, samples, 0)
    for rank in range(plan.ranks):
        kept = keep_rows(spec, samples, plan, step, Path(), rank, None)
        shards, steps = cached_shards(kept, plan, rank), range(len(order))
        if not shards:
            continue
        own = predict_hits(shards, rank, plan.ranks, samples, [order], spec.train.batch, steps)
        for name, (hits, reads) in own.items():
            before = total.get(name, (0, 0))
            total[name] = before[0] + hits, before[1] + reads
    return {name: hits / max(1, reads) for name, (hits, reads) in total.items()}


@dataclass(frozen=True, slots=True)
class DenseShards:
    """A dense part that is divided over the ranks of a host."""

    units: int
    """Parts that are gathered one at a time."""
    sent: Mapping[str, int]
    """Bytes that a rank sends in a step, by stage of ``DENSE_STAGES``."""


def count_shards(spec: RecommendSpec, samples: Samples, plan: TablePlan) -> DenseShards | None:
    """How a run's dense part is divided; None where each rank has a copy."""
    if not spec.layout.zero or plan.ranks == 1:
        return None
    dense = build_model(spec.model, plan.outputs, samples.numbers.shape[1], seed=0)
    units = unit_shapes(dense)
    sent = count_dense_bytes(units, hosts=plan.hosts, per_host=plan.per_host)
    return DenseShards(len(units), sent)


def count_exchanges(spec: RecommendSpec, answer: TableAnswer) -> int:
    """Exchanges of a step: sizes, lengths, ids, sums and gradients, and what some kinds add.

    Towers add one inside hosts both ways, and the sum of their modules' gradients.
    """
    if answer.plan.towers:
        return 7 + any(each.weights for each in answer.plan.towers)
    kinds = {each.kind for each in answer.plan.placements}
    adds_squares = "column" in kinds and spec.tables.optimizer == "row-wise-adagrad"
    return 5 + 2 * ("table-row" in kinds) + 2 * ("data" in kinds) + adds_squares
