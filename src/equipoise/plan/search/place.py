"""Local search for the order of nodes in which slow pairs of links matter least.

Why
    Measured links between nodes differ by tens of percent, and a ring goes at the pace of its
    slowest pair. Which pairs talk at all follows from who stands next to whom.

What it decides
    An order of the nodes. The cost is what passes between nodes in a step: the longest pipeline's
    hops, there and back, and the slowest ring of ranks that share weights. Simulated annealing
    swaps two nodes, moves one, or turns a run of them around; a worse order is taken with a chance
    that falls. The best order ever seen is kept, and the first one seen is the given one.

Kept true (tests/unit/plan/search/test_place.py)
    Never worse than the given order; finds the best order of small clusters; the same seed gives
    the same order; permuting the nodes' names changes nothing.

Sources
    Pipette, arXiv:2405.18093: the matrix of measured pairs, the moves, the critical path.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np

from equipoise.base.arrays import Floats, Ints
from equipoise.base.errors import LayoutError
from equipoise.spec.cluster.spec import ClusterSpec
from equipoise.spec.layout import Layout

_MOVES = 4000
_COOLING = 0.998
_FIRST_HEAT = 0.05
"""Share of the first order's cost."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Which node stands in which place."""

    nodes: tuple[int, ...]
    """Place i of the job is this node of the cluster."""
    before_s: float
    """What passes between nodes in the given order."""
    after_s: float


@dataclass(frozen=True, slots=True, eq=False)
class _Traffic:
    """Who talks, by place."""

    chains: Ints
    """Places that a micro-batch passes, int64 [pipelines, pp]."""
    rings: Ints
    """Places of ranks that share weights, in ring order, int64 [rings, ranks]."""
    rates: Floats
    """One device's share of each pair of nodes; infinite within a node, float64 [nodes, nodes]."""
    hop_bytes: float
    ring_bytes: float

    def cost_s(self, order: Ints) -> float:
        """Seconds of one order of the nodes."""
        chains, rings = order[self.chains], order[self.rings]
        hops = (self.hop_bytes / self.rates[chains[:, :-1], chains[:, 1:]]).sum(axis=1)
        after = np.roll(rings, -1, axis=1)
        slowest = self.rates[rings, after].min(axis=1)
        return float(2.0 * hops.max(initial=0.0) + (self.ring_bytes / slowest).max(initial=0.0))


def place_nodes(
    cluster: ClusterSpec, layout: Layout, *, hop_bytes: float, ring_bytes: float, seed: int = 0
) -> Placement:
    """Order nodes by annealing.

    Args:
        cluster: With a matrix of measured pairs, all nodes of one size.
        layout: Whose ranks fill the nodes in order.
        hop_bytes: One message between stages [bytes].
        ring_bytes: What a rank's gradients and parameters pass along a ring [bytes].
        seed: Seed of the moves.

    Raises:
        LayoutError: the cluster has no matrix, or nodes of several sizes.

    Cost: some 50 us a move of 4,000 on 100 nodes.
    """
    traffic = _read_traffic(cluster, layout, hop_bytes, ring_bytes)
    draw = np.random.default_rng(seed)
    order = np.arange(cluster.nodes)
    cost = before = traffic.cost_s(order)
    best, least, heat = order, cost, _FIRST_HEAT * cost
    for _ in range(_MOVES if cluster.nodes > 1 else 0):
        tried = _move(order, draw)
        tried_s = traffic.cost_s(tried)
        if tried_s <= cost or draw.random() < np.exp((cost - tried_s) / max(heat, 1e-30)):
            order, cost = tried, tried_s
        if cost < least:
            best, least = order, cost
        heat *= _COOLING
    return Placement(tuple(best.tolist()), before, least)


def order_s(cluster: ClusterSpec, layout: Layout, *, hop_bytes: float, ring_bytes: float) -> float:
    """What passes between nodes in a step, in the given order [s]."""
    traffic = _read_traffic(cluster, layout, hop_bytes, ring_bytes)
    return traffic.cost_s(np.arange(cluster.nodes))


def _read_traffic(
    cluster: ClusterSpec, layout: Layout, hop_bytes: float, ring_bytes: float
) -> _Traffic:
    sizes = {each.devices_per_node for each in cluster.classes}
    if cluster.node_bytes_per_s is None or len(sizes) > 1 or len(cluster.classes) > 1:
        raise LayoutError(
            f"{cluster.name} has {'no' if cluster.node_bytes_per_s is None else 'a'} matrix of "
            f"pairs and {len(cluster.classes)} classes of nodes. Give node_gbyte_per_s, and nodes "
            f"of one class."
        )
    layout.require_world(cluster.devices)
    rates = cluster.node_bytes_per_s / sizes.pop()
    rates = np.where(np.eye(cluster.nodes, dtype=bool), np.inf, rates)
    node = cluster.node_of(np.arange(layout.world))
    return _Traffic(
        np.unique(node[layout.groups("pp")], axis=0),
        np.unique(node[layout.groups("dp", "cp")], axis=0),
        rates,
        hop_bytes,
        ring_bytes,
    )


def _move(order: Ints, draw: np.random.Generator) -> Ints:
    """Swap two, move one, or turn a run around."""
    low, high = np.sort(draw.choice(len(order), size=2, replace=False)).tolist()
    kind, moved = int(draw.integers(3)), order.copy()
    if kind == 0:
        moved[[low, high]] = moved[[high, low]]
    elif kind == 1:
        moved[low : high + 1] = np.roll(moved[low : high + 1], 1)
    else:
        moved[low : high + 1] = moved[low : high + 1][::-1]
    return moved


def placed(cluster: ClusterSpec, placement: Placement) -> ClusterSpec:
    """The cluster with its nodes in that order."""
    if cluster.node_bytes_per_s is None:
        return cluster
    order = np.array(placement.nodes)
    matrix = cluster.node_bytes_per_s[np.ix_(order, order)]
    return dataclasses.replace(cluster, node_bytes_per_s=matrix)
