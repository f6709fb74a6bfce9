"""Whole tables and the dense part of a run's newest checkpoint, in one process.

Kept true (tests/multi/recsys/test_ahead.py)
    Tables of any plan, also of few bits behind a cache, are put together as training read them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from equipoise.base.arrays import Ints
from equipoise.base.errors import CheckpointError
from equipoise.numerics.rows import unpack_rows
from equipoise.recsys.folder import read_prepared
from equipoise.recsys.models.catalog import build_model
from equipoise.recsys.optimizer import SparseStep
from equipoise.recsys.rank.coding import Coding, read_coding
from equipoise.recsys.rank.pooling import Division, PooledTable
from equipoise.recsys.rank.scorer import Scorer, ServedTowers
from equipoise.recsys.same import require_same_run
from equipoise.recsys.shard import draw_rows
from equipoise.recsys.store import DENSE, load_module
from equipoise.recsys.tiers.held import read_committed, shard_folder
from equipoise.recsys.tiers.rows import COMMIT
from equipoise.recsys.tiers.run import rank_folder
from equipoise.recsys.towers.modules import make_module
from equipoise.recsys.towers.tables import tower_name
from equipoise.recsys.whole import newest_whole, read_facts, stored_files
from equipoise.schedule.tables.placement import TablePlacement, TablePlan, TowerPlacement
from equipoise.schedule.tables.traffic import Wire
from equipoise.spec.recommend import RecommendSpec
from equipoise.spec.tables.table import TableSpec


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A run's model as its newest checkpoint has it."""

    spec: RecommendSpec
    base: Path
    """Where the run's relative paths begin."""
    coding: Coding
    scorer: Scorer
    step: int
    checkpoint: Path
    written_s: float
    """When the checkpoint was written, seconds since 1970."""


def read_stored(folder: Path) -> Stored:
    """Read a run's folder.

    Raises:
        CheckpointError: it has no whole checkpoint, a damaged one, or no ``columns.json``.
        SpecError: it is not the folder of a recommender.
    """
    spec, base = read_prepared(folder)
    newest, damaged = newest_whole(folder)
    if damaged:
        raise CheckpointError(
            f"{damaged[0]} Run the same `equipoise train` again, or remove its folder to read the "
            "checkpoint before."
        )
    if newest is None:
        raise CheckpointError(
            f"{folder} has no whole checkpoint. Train first: equipoise train run.toml."
        )
    coding = read_coding(folder)
    facts = read_facts(newest)
    require_same_run(newest, facts, spec, coding=coding)
    parts = [
        part
        for rank, file in enumerate(stored_files(newest, facts))
        for part in _parts(file, rank_folder(folder, rank))
    ]
    names = (*coding.ids, *coding.bags)
    tables = [_table(name, facts, [p for p in parts if p.name == name], spec) for name in names]
    for each in tables:
        rows = len(coding.words[each.table.name]) + 1
        if rows != each.table.rows:
            raise CheckpointError(
                f"{newest} has {each.table.rows:,} rows of {each.table.name}, and the run's "
                f"columns have {rows:,}: its data has changed. Train anew in another folder."
            )
    specs = [each.table for each in tables]
    towers = _read_towers(newest, facts, specs, spec) if spec.model.towers else None
    if towers is not None:
        specs = [*towers.plan.outputs]
    dense = build_model(spec.model, specs, len(coding.numbers), seed=spec.train.seed)
    load_module(newest, dense, torch.load(newest / DENSE, weights_only=True)["dense"])
    written_s = (newest / DENSE).stat().st_mtime
    scorer = Scorer(tables, dense.eval(), towers)
    return Stored(spec, base, coding, scorer, int(facts["step"]), newest, written_s)


def _wire(facts: Mapping[str, Any], spec: RecommendSpec) -> Wire:
    """As what rows travelled when the checkpoint was scored, which ``spec.json`` may say anew."""
    wire: Wire = facts.get("wire", spec.tables.wire)
    return wire


def _read_towers(
    checkpoint: Path, facts: Mapping[str, Any], tables: list[TableSpec], spec: RecommendSpec
) -> ServedTowers:
    """The modules of all towers, as one host would have them."""
    sizes, seed = spec.model.tower_sizes, spec.train.seed
    towers = [
        TowerPlacement(names, 0, *sizes.leaving(len(names)), sizes.count_weights(len(names)))
        for names in spec.model.towers
    ]
    placements = tuple(TablePlacement(table, "table", (0,)) for table in tables)
    modules = []
    for at, tower in enumerate(towers):
        state = torch.load(checkpoint / f"{tower_name(at)}.pt", weights_only=True)
        module = make_module(sizes, len(tower.tables), seed=seed, tower=at)
        load_module(checkpoint, module, state["module"])
        modules.append(module.eval())
    plan = TablePlan(placements, 1, towers=tuple(towers))
    return ServedTowers(plan, modules, _wire(facts, spec))


_READ = ("rows", "columns", "shard", "weight", "packed", "cache-tags", "cache-values", COMMIT)
"""What is read of a shard; the optimizer's state is not."""


@dataclass(slots=True, eq=False)
class _StoredPart:
    """What one rank wrote of one table."""

    name: str
    arrays: Mapping[str, np.ndarray]
    files: Path
    """Where its rank has files of rows."""

    @property
    def shard(self) -> int:
        """Its place among the table's shards; those of earlier versions by their first row."""
        if "shard" in self.arrays:
            return int(self.arrays["shard"][0])
        rows = self.arrays["rows"]
        return int(rows[0]) if len(rows) else 0

    def floats(self, spec: RecommendSpec, table: TableSpec, step: int) -> np.ndarray:
        """Its rows, float32 [rows, columns], as a step after that one would read them."""
        if "weight" in self.arrays:
            return self.arrays["weight"]
        if "packed" not in self.arrays:
            return self._file_rows(spec, table, step)
        form, width = spec.tables.precision, table.width
        if form == "fp32":
            raise CheckpointError(
                f"Table {self.name} has rows of few bits, and the run says fp32. Restore spec.json."
            )
        packed = torch.from_numpy(self.arrays["packed"])
        rows = unpack_rows(packed, width, form).numpy()
        tags = self.arrays["cache-tags"].reshape(-1)
        rows[tags[tags >= 0]] = self.arrays["cache-values"][tags >= 0]
        return rows

    def _file_rows(self, spec: RecommendSpec, table: TableSpec, step: int) -> np.ndarray:
        rows = self.arrays["rows"]
        begin, end = self.arrays["columns"].tolist()

        def draw(places: Ints) -> np.ndarray:
            return draw_rows(table, rows[places], spec.train.seed)[:, begin:end]

        sparse = SparseStep(spec.tables.optimizer, lr=spec.tables.lr)
        folder = shard_folder(self.files, self.name, self.shard)
        mark = self.arrays.get(COMMIT)
        return read_committed(folder, len(rows), end - begin, sparse, draw, step, mark)


def _parts(file: Path, files: Path) -> list[_StoredPart]:
    with safe_open(file, framework="numpy") as stored:
        by_prefix: dict[str, dict[str, np.ndarray]] = {}
        for key in stored.keys():  # noqa: SIM118 - not a mapping
            prefix, _, what = key.rpartition(":")
            if what in _READ:
                by_prefix.setdefault(prefix, {})[what] = stored.get_tensor(key)
    return [
        _StoredPart(prefix.partition(":")[2], arrays, files) for prefix, arrays in by_prefix.items()
    ]


def _table(
    name: str, facts: Mapping[str, Any], parts: list[_StoredPart], spec: RecommendSpec
) -> PooledTable:
    """A table put together, with how it was divided."""
    if name not in facts["tables"]:
        raise CheckpointError(f"The checkpoint has no table {name}. Train anew in another folder.")
    count, width = facts["tables"][name]
    table = TableSpec(name, count, width, pooling=spec.model.pooling)
    weight = np.full((count, width), np.nan, dtype=np.float32)
    owner = np.zeros(count, dtype=np.int64)
    parts = sorted(parts, key=lambda part: part.shard)
    cuts = set()
    for place, part in enumerate(parts):
        begin, end = part.arrays["columns"].tolist()
        rows = part.arrays["rows"]
        weight[rows, begin:end] = part.floats(spec, table, int(facts["step"]))
        owner[rows] = place
        cuts |= {begin, end} - {0, width}
    if np.isnan(weight).any():
        raise CheckpointError(
            f"The checkpoint lacks rows of table {name}. Remove its folder, so that the run goes "
            "on from the one before."
        )
    kind = facts.get("kinds", {}).get(name, "table")
    is_divided = len(parts) > 1 and not cuts
    division = Division(
        owner if is_divided else None,
        len(parts) if is_divided else 1,
        tuple(sorted(cuts)),
        _wire(facts, spec),
        {"data": 0, "table-row": 1 if spec.model.towers else 2}.get(kind, 1),
    )
    return PooledTable(table, torch.from_numpy(weight), None, division)
