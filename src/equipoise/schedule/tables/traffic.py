"""The bytes that embedding tables make ranks exchange in a step: formulas, link by link.

Why
    What is sent must be what the plan says. A plan that gathered whole tables would compute the
    same numbers; only its bytes would tell.

What it decides
    A step's stages in order, for a rank r with ``b[r]`` bags of a table (one for each sample, or
    for each distinct row of the table's group), D columns of a shard and ``e`` bytes of a float on
    the wire::

        sizes       8 B of each group of tables to each rank
        lengths     4 b[r] to the rank of each shard
        ids         8 B of each id to the ranks of its shards
        partial     table-row: sums of a bucket for 1/L of all samples, inside the host
        pooled      b[s] D e from each shard to each source s; table-row: from one rank of the host
        gradients   as pooled, the other way
        spread      as partial, the other way
        squares     column shards under row-wise AdaGrad: 4 B of each row touched
        replicas    data-parallel: 8 B, and 8 + 4 D of each row that the rank's samples touch

    Towers go another way from ``ids`` on. Rank j of each host serves the rank j of every host::

        partial     sums of a shard for the samples that each rank of the host serves; means also
                    4 B for each bag of a bucket of rows
        pooled      b[s] V e of a tower's V floats from its host to the rank s, which it serves
        gradients   as pooled, the other way
        spread      as partial without lengths, the other way
        towers      4 B of each weight of a module to the other ranks of its host

Kept true (tests/multi/recsys/test_tables.py, tests/multi/recsys/test_models.py)
    Each number is what ranks sent, in each stage, on each link.

Sources
    Bytes by kind of sharding: Neo, arXiv:2104.05158, section 4.2. Shards of a dense part: DHEN,
    arXiv:2203.11014, section 3.3.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.schedule.tables.placement import TablePlacement, TablePlan
from equipoise.spec.tables.table import FLOAT_BYTES

Wire = Literal["fp32", "bf16", "fp16", "int8"]
WIRES: tuple[Wire, ...] = get_args(Wire)
STAGES = (
    "sizes",
    "lengths",
    "ids",
    "partial",
    "pooled",
    "gradients",
    "spread",
    "squares",
    "replicas",
    "towers",
)

DENSE_STAGES = ("gather", "scatter", "across")
"""Exchanges of a dense part in shards (``recsys.models.shards``)."""

_RECEIVED = ("lengths", "ids", "gradients")


def wire_bytes(width: int, wire: Wire) -> int:
    """Bytes of a row of some floats on the wire; int8 adds its scale.

    >>> [wire_bytes(16, wire) for wire in ("fp32", "bf16", "fp16", "int8")]
    [64, 32, 32, 20]
    """
    return {"fp32": 4 * width, "bf16": 2 * width, "fp16": 2 * width, "int8": width + 4}[wire]


def count_traffic(
    plan: TablePlan,
    sizes: Sequence[int] | Mapping[str, Sequence[int]],
    ids: Mapping[str, Ints],
    touched: Mapping[str, Ints] | None = None,
    *,
    forward: Wire = "fp32",
    backward: Wire = "fp32",
    is_row_wise: bool = False,
    groups: int = 1,
) -> dict[str, Ints]:
    """Bytes from each rank to each other in each stage of a step.

    Args:
        plan: Where tables lie.
        sizes: Samples of each rank; or, for each table, bags of each rank.
        ids: For each table, ids of each rank's samples by bucket of rows, int64 [ranks, buckets].
        touched: For each data-parallel table, distinct rows of each rank's samples, int64 [ranks];
            for each column-wise one, distinct rows of all, int64 [1]. None: a forward alone.
        forward: How pooled rows travel.
        backward: How their gradients travel.
        is_row_wise: Whether the optimizer is row-wise AdaGrad.
        groups: Groups of tables, each with its own number of bags.

    Returns:
        For each stage, int64 [from, to]; nothing is sent from a rank to itself.
    """
    ranks = plan.ranks
    # Stages that are counted receiver by receiver have a receiver's bytes side by side.
    bytes_of = {
        stage: np.zeros((ranks, ranks), dtype=np.int64, order="F" if stage in _RECEIVED else "C")
        for stage in STAGES
    }
    by_table = sizes if isinstance(sizes, Mapping) else dict[str, Sequence[int]]()
    every = np.asarray([] if isinstance(sizes, Mapping) else sizes, dtype=np.int64)
    bytes_of["sizes"] += 8 * groups
    for each in plan.placements:
        name, width = each.table.name, each.table.width
        size_R = np.asarray(by_table[name], dtype=np.int64) if by_table else every
        if each.kind == "data":
            if touched is not None:
                bytes_of["replicas"] += 8 + touched[name][:, None] * (8 + 4 * width)
            continue
        for shard, rank in enumerate(each.ranks):
            begin, end = each.columns(shard)
            bytes_of["lengths"][:, rank] += 4 * size_R
            bytes_of["ids"][:, rank] += 8 * ids[name][:, each.row_shard(shard)]
            if each.kind != "table-row" and not plan.towers:
                bytes_of["pooled"][rank] += size_R * wire_bytes(end - begin, forward)
                if touched is not None:
                    bytes_of["gradients"][:, rank] += size_R * wire_bytes(end - begin, backward)
        if plan.towers:
            _count_inside(plan, each, size_R, bytes_of, forward, backward, touched is not None)
        elif each.kind == "table-row":
            _count_two_hops(plan, each.ranks, size_R, bytes_of, "partial", "pooled", width, forward)
            if touched is not None:
                hops = ("spread", "gradients")
                _count_two_hops(plan, each.ranks, size_R, bytes_of, *hops, width, backward)
        if each.kind == "column" and is_row_wise and touched is not None:
            held = np.bincount(each.ranks, minlength=ranks)
            sent = 4 * int(touched[name][0]) * held
            bytes_of["squares"] += sent[:, None] * (held > 0)[None, :]
    for tower in plan.towers:
        name = tower.tables[0]
        size_R = np.asarray(by_table[name], dtype=np.int64) if by_table else every
        first = tower.host * plan.per_host
        host = np.arange(first, first + plan.per_host)
        for rank in host.tolist():
            served = np.arange(rank - first, ranks, plan.per_host)
            out = size_R[served] * tower.vectors
            bytes_of["pooled"][rank, served] += out * wire_bytes(tower.width, forward)
            if touched is not None:
                bytes_of["gradients"][served, rank] += out * wire_bytes(tower.width, backward)
                bytes_of["towers"][rank, host] += FLOAT_BYTES * tower.weights
    for stage in STAGES:
        np.fill_diagonal(bytes_of[stage], 0)
    return bytes_of


def count_dense_bytes(
    units: Sequence[Sequence[Sequence[int]]], *, hosts: int, per_host: int
) -> dict[str, int]:
    """Bytes that a rank sends in a step for a dense part in shards inside hosts.

    A weight is cut along its first dim, and its parts are filled up to the first one's size; with
    P bytes of weights, 3 P (L - 1) / L inside a host of L ranks and 2 (P / L) (H - 1) / H across.

    Args:
        units: For each unit that is gathered at a time, the shapes of its weights.
        hosts: H, copies of all shards.
        per_host: L, over which weights are divided.

    >>> count_dense_bytes([[(8, 2), (4,)]], hosts=2, per_host=2)
    {'gather': 80, 'scatter': 40, 'across': 40}
    """
    shards = [
        sum(-(-first // per_host) * math.prod(rest) for first, *rest in unit) for unit in units
    ]
    inside = FLOAT_BYTES * (per_host - 1) * sum(shards)
    across = 2 * FLOAT_BYTES * (hosts - 1) * sum(-(-shard // hosts) for shard in shards)
    return {"gather": 2 * inside, "scatter": inside, "across": across}


def _count_inside(
    plan: TablePlan,
    placement: TablePlacement,
    size_R: Ints,
    bytes_of: Mapping[str, Ints],
    forward: Wire,
    backward: Wire,
    is_training: bool,
) -> None:
    """What a table of a tower makes the ranks of its host exchange."""
    for shard, rank in enumerate(placement.ranks):
        begin, end = placement.columns(shard)
        first = rank - rank % plan.per_host
        for peer in range(first, first + plan.per_host):
            bags = int(size_R[peer - first :: plan.per_host].sum())
            bytes_of["partial"][rank, peer] += bags * wire_bytes(end - begin, forward)
            if placement.table.pooling == "mean" and begin == 0:
                bytes_of["partial"][rank, peer] += 4 * bags
            if is_training:
                bytes_of["spread"][peer, rank] += bags * wire_bytes(end - begin, backward)


def across_hosts(plan: TablePlan, sent: Ints) -> int:
    """Bytes that leave a host, of those from each rank to each other, int64 [from, to]."""
    hosts = np.arange(plan.ranks) // plan.per_host
    return int(sent[hosts[:, None] != hosts[None, :]].sum())


def _count_two_hops(
    plan: TablePlan,
    host: Sequence[int],
    size_R: Ints,
    bytes_of: Mapping[str, Ints],
    inside: str,
    across: str,
    width: int,
    wire: Wire,
) -> None:
    """Rank j of the table's host serves rank j of every host."""
    row = wire_bytes(width, wire)
    for place, rank in enumerate(host):
        served = np.arange(place, plan.ranks, plan.per_host)
        own = int(size_R[served].sum())
        for peer in host:
            if inside == "partial":
                bytes_of[inside][peer, rank] += own * row
            else:
                bytes_of[inside][rank, peer] += own * row
        if across == "pooled":
            bytes_of[across][rank, served] += size_R[served] * row
        else:
            bytes_of[across][served, rank] += size_R[served] * row
