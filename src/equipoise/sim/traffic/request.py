"""What concurrent rings of a cluster get from its network: hashed paths beside planned ones.

What it decides
    Jobs are rings of equally many nodes, spread so that every hop leaves its leaf, which is where
    paths matter. Hashes are drawn many times; a plan is one.

Kept true (tests/unit/sim/test_traffic.py)
    Planned rings get what their cards can send where the network is not oversubscribed; hashed
    ones never more.

Sources
    C4 in production: arXiv:2406.04594.
"""

from dataclasses import dataclass

import numpy as np

from equipoise.base.arrays import Floats
from equipoise.base.errors import SpecError
from equipoise.sim.traffic.clos import (
    ClosSpec,
    Flows,
    cable_loads,
    hash_spines,
    link_uses,
    plan_spines,
    ring_flows,
)
from equipoise.sim.traffic.fair import fair_rates
from equipoise.spec.cluster.file import read_cluster

PUBLISHED = (
    "Published for C4 (arXiv:2406.04594, a cloud's own jobs over Ethernet; other networks and "
    "models than this one): communication cost 15% less by planned traffic, and efficiency up from "
    "30% to 45% together with the detection of faults."
)

_MOST_FLOWS, _MOST_DRAWS = 100_000, 10_000


@dataclass(frozen=True, slots=True)
class TrafficRequest:
    """Rings on a cluster's network."""

    cluster: str
    """``NAME:DEVICES`` or a cluster.toml."""
    leaf_nodes: int
    """Nodes of each leaf."""
    ring_nodes: int | None = None
    """Nodes of each ring; one of each leaf unless given."""
    oversubscription: float = 1.0
    """What a leaf's nodes can send, over what its cables carry."""
    lost_spines: int = 0
    """Spines that have failed."""
    split: int = 1
    """Flows of each connection."""
    draws: int = 100
    """How often hashes are drawn."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class WayOfTraffic:
    """What rings get by one way to choose paths."""

    name: str
    rates: Floats
    """Bus bandwidth of each ring of each draw, float64[draws, rings] [bytes/s per node]."""
    fullest: Floats
    """Flows on the fullest cable of each draw, float64[draws]."""

    def as_row(self) -> dict[str, object]:
        """For ``--json``."""
        slowest, fastest = self.rates.min(axis=1), self.rates.max(axis=1)
        return {
            "name": self.name,
            "draws": len(self.rates),
            "mean_bytes_per_s": float(self.rates.mean()),
            "slowest_bytes_per_s": float(slowest.mean()),
            "fastest_bytes_per_s": float(fastest.mean()),
            "fullest_flows": float(self.fullest.mean()),
            "fullest_flows_max": int(self.fullest.max()),
        }


@dataclass(frozen=True, slots=True)
class TrafficAnswer:
    """Hashed paths beside planned ones."""

    clos: ClosSpec
    rings: int
    flows: int
    limit_bytes_per_s: float
    """What the cards of a node send."""
    hashed: WayOfTraffic
    planned: WayOfTraffic

    @property
    def gain(self) -> float:
        """Throughput of all rings by the plan, over that by hashes."""
        return float(self.planned.rates.mean() / self.hashed.rates.mean())

    def as_row(self) -> dict[str, object]:
        """For ``--json``."""
        return {
            "leaves": self.clos.leaves,
            "leaf_nodes": self.clos.leaf_nodes,
            "spines": self.clos.spines,
            "nics": self.clos.nics,
            "oversubscription": self.clos.oversubscription,
            "rings": self.rings,
            "flows": self.flows,
            "limit_bytes_per_s": self.limit_bytes_per_s,
            "ways": [each.as_row() for each in (self.hashed, self.planned)],
            "gain": self.gain,
        }


def simulate_traffic(request: TrafficRequest) -> TrafficAnswer:
    """Let rings run at once over hashed and over planned paths.

    Raises:
        SpecError: no such cluster, no network between its nodes, or sizes that do not go together.

    >>> answer = simulate_traffic(TrafficRequest("h100-sxm:128", leaf_nodes=4))
    >>> answer.clos.spines, round(answer.planned.rates.min() / answer.limit_bytes_per_s, 3)
    (32, 1.0)
    """
    clos = _network(request)
    ring_nodes = clos.leaves if request.ring_nodes is None else request.ring_nodes
    rings = spread_rings(clos, ring_nodes)
    flows = ring_flows(clos, rings, split=request.split)
    hashed = [
        _rates(clos, flows, hash_spines(clos, flows, request.seed + draw))
        for draw in range(request.draws)
    ]
    planned = _rates(clos, flows, plan_spines(clos, flows))
    return TrafficAnswer(
        clos,
        len(rings),
        len(flows.ring),
        clos.nics * clos.nic_bytes_per_s,
        _way("hashed (ECMP)", hashed),
        _way("planned (C4P)", [planned]),
    )


def _rates(clos: ClosSpec, flows: Flows, spines: np.ndarray) -> tuple[Floats, int]:
    rates = fair_rates(*link_uses(clos, flows, spines))
    return rates, int(cable_loads(clos, flows, spines).max())


def _way(name: str, drawn: list[tuple[Floats, int]]) -> WayOfTraffic:
    rates, fullest = zip(*drawn, strict=True)
    return WayOfTraffic(name, np.array(rates), np.array(fullest, dtype=np.float64))


def _network(request: TrafficRequest) -> ClosSpec:
    """The network that the request describes.

    Raises:
        SpecError: as ``simulate_traffic``.
    """
    cluster = read_cluster(request.cluster)
    kind = cluster.classes[0]
    if len(cluster.classes) > 1 or kind.nic is None:
        raise SpecError(
            f"{cluster.name} is not one kind of node with network cards, which a planned network "
            f"needs. Give a cluster of equal nodes, as h100-sxm:512."
        )
    nodes, leaves = kind.nodes, kind.nodes // max(1, request.leaf_nodes)
    if request.leaf_nodes < 1 or leaves < 2 or nodes % request.leaf_nodes:
        raise SpecError(
            f"{nodes:,} nodes do not make two or more leaves of {request.leaf_nodes}. Give "
            f"--leaf-nodes that divides {nodes:,}, and at most {nodes // 2:,}."
        )
    if request.draws < 1 or request.split < 1 or not request.oversubscription > 0:
        raise SpecError(
            f"{request.draws} draws of {request.split} flows a connection at oversubscription "
            f"{request.oversubscription:g}: give 1 or more draws and flows, and a ratio above 0."
        )
    if request.draws > _MOST_DRAWS or request.seed < 0:
        raise SpecError(
            f"{request.draws:,} draws from seed {request.seed}: give {_MOST_DRAWS:,} draws or "
            f"fewer, and a seed of 0 or more."
        )
    ports = request.leaf_nodes * kind.nics
    spines = round(ports / request.oversubscription) - request.lost_spines
    if request.lost_spines < 0 or spines < 1:
        raise SpecError(
            f"A leaf of {ports} cards at oversubscription {request.oversubscription:g} has "
            f"{spines + request.lost_spines} spines; {request.lost_spines} cannot be lost. Give "
            f"fewer --lost-spines."
        )
    if nodes * kind.nics * request.split > _MOST_FLOWS:
        raise SpecError(
            f"{nodes * kind.nics * request.split:,} flows are more than {_MOST_FLOWS:,}. Give a "
            f"smaller cluster or fewer --flows."
        )
    rate = kind.nic.bytes_per_s
    return ClosSpec(leaves, spines, request.leaf_nodes, kind.nics, rate, rate)


def spread_rings(clos: ClosSpec, ring_nodes: int) -> list[list[int]]:
    """Rings over all nodes, each hop of which leaves its leaf.

    Raises:
        SpecError: the nodes do not divide into such rings.

    >>> spread_rings(ClosSpec(2, 1, 2, 1, 1.0, 1.0), 2)
    [[0, 2], [1, 3]]
    """
    if not 2 <= ring_nodes <= clos.leaves or clos.nodes % ring_nodes:
        raise SpecError(
            f"Rings of {ring_nodes} nodes, no two of a ring beside each other in a leaf, cannot "
            f"take all {clos.nodes} nodes of {clos.leaves} leaves. Give --ring-nodes from 2 to "
            f"{clos.leaves} that divides {clos.nodes}."
        )
    dealt = [
        leaf * clos.leaf_nodes + place
        for place in range(clos.leaf_nodes)
        for leaf in range(clos.leaves)
    ]
    return [dealt[at : at + ring_nodes] for at in range(0, clos.nodes, ring_nodes)]
