"""A two-level Clos network, and which spine switch each flow takes: by a hash, or by a plan.

Why
    Training has few flows, and they are long and equally heavy. A switch picks the cable for each
    by a hash of its addresses (ECMP), which is fair to thousands of flows; of a few, some meet on
    one cable while others lie idle, for as long as the job lasts.

What it decides
    Leaf switches hold nodes, and each is joined to every spine by one cable for each direction; a
    flow between two leaves picks a spine, and that is its path::

        spine     0       1       2      each joined to each leaf
        leaf    0     1     2     3
        nodes  0 1   2 3   4 5   6 7

    A plan gives each spine as many flows of every leaf as any other, or one more. That is an edge
    coloring: each leaf is divided into parts of as many flows as there are spines, each part uses
    every spine at most once, and where a color is taken, it is swapped along a path of two colors
    (Kőnig: a bipartite graph of degree n has a coloring with n). So no cable carries more than the
    fullest leaf's flows over the number of spines, rounded up, which no assignment can beat.

Kept true (tests/unit/sim/test_traffic.py, by Hypothesis)
    The plan's fullest cable is as full as the best of all assignments on small networks, and has
    the bound's load on any.

Sources
    C4P, planned paths for few long flows: arXiv:2406.04594. Coloring: Kőnig, Math. Annalen 77,
    1916.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.base.arrays import Floats, Ints
from equipoise.base.errors import SpecError


@dataclass(frozen=True, slots=True)
class ClosSpec:
    """Leaves, spines and the cables between them."""

    leaves: int
    spines: int
    leaf_nodes: int
    """Nodes of each leaf."""
    nics: int
    """Network cards of each node, all joined to its leaf."""
    nic_bytes_per_s: float
    cable_bytes_per_s: float
    """What one cable between a leaf and a spine carries in each direction."""

    def __post_init__(self) -> None:
        counts = self.leaves, self.spines, self.leaf_nodes, self.nics
        if min(counts) < 1 or not (self.nic_bytes_per_s > 0 and self.cable_bytes_per_s > 0):
            raise SpecError(
                f"{self.leaves} leaves of {self.leaf_nodes} nodes with {self.nics} network cards "
                f"and {self.spines} spines: give 1 or more of each, and rates above 0."
            )

    @property
    def nodes(self) -> int:
        """Nodes of all leaves."""
        return self.leaves * self.leaf_nodes

    @property
    def oversubscription(self) -> float:
        """What a leaf's nodes can send, over what its cables carry."""
        up = self.spines * self.cable_bytes_per_s
        return self.leaf_nodes * self.nics * self.nic_bytes_per_s / up


@dataclass(frozen=True, slots=True)
class Flows:
    """Flows of rings; one element each, [flows]."""

    ring: Ints
    source: Ints
    """The card that sends, numbered by node."""
    target: Ints
    share: Floats
    """Share of the ring's rate that goes over this flow."""


def ring_flows(clos: ClosSpec, rings: Sequence[Sequence[int]], *, split: int = 1) -> Flows:
    """The flows of rings over nodes: every card sends to its like of the next node.

    Args:
        clos: The network.
        rings: Nodes of each ring, in its order.
        split: Flows into which each of these is divided (queue pairs of a connection).

    Raises:
        SpecError: a node that is not there, in two rings, or alone.
    """
    nodes = [node for ring in rings for node in ring]
    if len({*nodes}) < len(nodes) or min(map(len, rings), default=0) < 2 or split < 1:
        raise SpecError("Each ring needs two nodes or more, and each node belongs to one ring.")
    if min(nodes) < 0 or max(nodes) >= clos.nodes:
        raise SpecError(
            f"Node {max(nodes)} is not in a network of {clos.nodes} nodes, numbered from 0."
        )
    rows = [
        (number, clos.nics * node + nic, clos.nics * follower + nic)
        for number, ring in enumerate(rings)
        for node, follower in zip(ring, [*ring[1:], ring[0]], strict=True)
        for nic in range(clos.nics)
        for _ in range(split)
    ]
    ring, source, target = np.array(rows, dtype=np.int64).T
    return Flows(ring, source, target, np.full(len(rows), 1 / (clos.nics * split)))


def hash_spines(clos: ClosSpec, flows: Flows, seed: int) -> Ints:
    """Draw a spine for each flow, as a switch's hash does: int64[flows]."""
    return np.random.default_rng(seed).integers(clos.spines, size=len(flows.ring))


def plan_spines(clos: ClosSpec, flows: Flows) -> Ints:
    """The spine of each flow, so that the fullest cable carries as few as possible: int64[flows].

    Flows within one leaf, which take no spine, have 0.

    Cost: O(flows x leaves' parts) at worst.
    """
    leaves = leaf_of(clos, flows.source), leaf_of(clos, flows.target)
    spines = np.zeros(len(flows.ring), dtype=np.int64)
    crossing = np.flatnonzero(leaves[0] != leaves[1])
    seen: dict[tuple[int, int], int] = {}
    taken: dict[tuple[int, int, int], dict[int, int]] = {}
    """The flow of each spine, by part of a leaf, on the sending or the receiving side."""
    ends: dict[int, list[tuple[int, int, int]]] = {}
    for flow in crossing.tolist():
        ends[flow] = []
        for side in (0, 1):
            leaf = int(leaves[side][flow])
            count = seen.get((side, leaf), 0)
            seen[side, leaf] = count + 1
            part = (side, leaf, count // clos.spines)
            taken.setdefault(part, {})
            ends[flow].append(part)
        _color(flow, ends, taken, spines, clos.spines)
    return spines


def _color(
    flow: int,
    ends: dict[int, list[tuple[int, int, int]]],
    taken: dict[tuple[int, int, int], dict[int, int]],
    spines: Ints,
    count: int,
) -> None:
    """Give a flow a spine that is free at both ends, swapping two others' where there is none."""
    sender, receiver = ends[flow]
    free = next(each for each in range(count) if each not in taken[sender])
    other = next(each for each in range(count) if each not in taken[receiver])
    if free in taken[receiver]:
        path, part, color = [], receiver, free
        while (each := taken[part].get(color)) is not None:
            path.append(each)
            one, two = ends[each]
            part = two if part == one else one
            color = other if color == free else free
        for each in path:
            for part in ends[each]:
                if taken[part].get(int(spines[each])) == each:
                    del taken[part][int(spines[each])]
        for each in path:
            spines[each] = other if spines[each] == free else free
            for part in ends[each]:
                taken[part][int(spines[each])] = each
    spines[flow] = free
    taken[sender][free] = taken[receiver][free] = flow


def leaf_of(clos: ClosSpec, cards: Ints) -> Ints:
    """The leaf of each card, int64 as ``cards``."""
    leaves: Ints = cards // (clos.nics * clos.leaf_nodes)
    return leaves


def link_uses(clos: ClosSpec, flows: Flows, spines: Ints) -> tuple[Floats, Floats]:
    """What each ring sends over each link, and what the links carry.

    Returns:
        ``uses`` float64[links, rings] and ``capacity`` float64[links] for ``fair_rates``: of cards
        out, cards in, cables up, cables down, in this order.
    """
    cards, cables = clos.nodes * clos.nics, clos.leaves * clos.spines
    uses = np.zeros((2 * (cards + cables), int(flows.ring.max()) + 1))
    begin, end = leaf_of(clos, flows.source), leaf_of(clos, flows.target)
    np.add.at(uses, (flows.source, flows.ring), flows.share)
    np.add.at(uses, (cards + flows.target, flows.ring), flows.share)
    far = begin != end
    up = 2 * cards + begin * clos.spines + spines
    down = 2 * cards + cables + end * clos.spines + spines
    for links in (up, down):
        np.add.at(uses, (links[far], flows.ring[far]), flows.share[far])
    rates = [clos.nic_bytes_per_s] * (2 * cards) + [clos.cable_bytes_per_s] * (2 * cables)
    return uses, np.array(rates)


def cable_loads(clos: ClosSpec, flows: Flows, spines: Ints) -> Ints:
    """Flows on each cable, int64[2, leaves, spines]: up, then down."""
    begin, end = leaf_of(clos, flows.source), leaf_of(clos, flows.target)
    loads = np.zeros((2, clos.leaves, clos.spines), dtype=np.int64)
    far = begin != end
    np.add.at(loads[0], (begin[far], spines[far]), 1)
    np.add.at(loads[1], (end[far], spines[far]), 1)
    return loads
