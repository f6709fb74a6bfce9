"""What a step is priced on: a device's kernels, and the links of its ranks' groups.

What it decides
    Nothing of its own: ``cost.kernel`` and ``cost.link`` under the names by which a step asks
    for them, each size looked up once, and which curves were read beyond their sizes. On a
    cluster of several classes kernels are those of the class that multiplies slowest, and of such
    classes of the one with the slowest memory.

Kept true (tests/unit/sim/test_parts.py)
    Equal questions get equal answers; a curve read beyond its sizes is named.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from equipoise.base.arrays import Floats, Ints
from equipoise.cost.kernel import attention_s, attention_slowdown, gemm_s, stream_s
from equipoise.cost.link import Op, collective_s, group_of
from equipoise.cost.step.dispatch import ExpertRoutes, carried_bytes_per_s
from equipoise.cost.step.layer import Collective
from equipoise.cost.step.request import Precision
from equipoise.schedule.attention.price import LinkPrice, Links
from equipoise.sim.attention import ContextLinks
from equipoise.spec.cluster.spec import ClusterSpec
from equipoise.spec.device.by_name import DeviceSpec, Dtype
from equipoise.spec.layout import Layout
from equipoise.spec.program.stack import Attention, Fp8
from equipoise.spec.rank_group import RankGroup

Ranks = tuple[int, ...] | RankGroup
"""Ranks that communicate."""


def _dtype_of(device: DeviceSpec, precision: Precision) -> Dtype:
    """What a device multiplies in that is not in 8 bits."""
    narrow: Dtype = "bf16" if "bf16" in device.dtypes else device.dtypes[0]
    return "fp32" if precision == "fp32" else narrow


def slowest_of(devices: Iterable[DeviceSpec], precision: Precision) -> DeviceSpec:
    """The device that multiplies slowest, and of such the one with the slowest memory."""

    def rates(each: DeviceSpec) -> tuple[float, float]:
        return each.peak_flop_per_s(_dtype_of(each, precision)), each.memory_bytes_per_s

    return min(devices, key=rates)


class Machine:
    """A cluster as a step needs it: kernels, links and memory."""

    def __init__(
        self, cluster: ClusterSpec, precision: Precision = "bf16", device: DeviceSpec | None = None
    ) -> None:
        self.cluster = cluster
        self.extrapolated: set[str] = set()
        """Curves that were read beyond their measured sizes."""
        devices = [each.device for each in cluster.classes] if device is None else [device]
        self._is_wide = precision == "fp32"
        self.device: DeviceSpec = slowest_of(devices, precision)
        self._dtype: Dtype = _dtype_of(self.device, precision)
        self._other: Machine | None = None
        self._products: dict[tuple[float, float, float, bool, Fp8], float] = {}
        self._routes: dict[tuple[int, ...], ExpertRoutes] = {}
        self._traffic: dict[tuple[Ranks, int | None], Collective] = {}
        self._moves = float(stream_s(self.device, 1e9).s - stream_s(self.device, 0.0).s) / 1e9

    def at(self, precision: Precision) -> "Machine":
        """The same cluster as it computes at this precision; made once, and kept."""
        if self._is_wide == (precision == "fp32"):
            return self
        if self._other is None:
            self._other = Machine(self.cluster, precision)
            self._other._other, self._other.extrapolated = self, self.extrapolated
        return self._other

    def require_precision(self, precision: str) -> None:
        """Refuse a step's precision that a device of any class has no products of.

        Raises:
            SpecError: names the device, and lists what it multiplies.
        """
        for each in self.cluster.classes:
            each.device.require_precision(precision)

    @property
    def capacity_bytes(self) -> int:
        """Memory of a device that tensors may fill."""
        return min(each.device.usable_bytes for each in self.cluster.classes)

    @property
    def host_capacity_bytes(self) -> int:
        """A device's share of host memory."""
        return min(each.device.host_memory_bytes for each in self.cluster.classes)

    def peak_flop_per_s(self, precision: Precision) -> float:
        """Dense peak of a device."""
        kept = self.at(precision)._dtype
        return self.device.peak_flop_per_s("fp8" if precision == "fp8" else kept)

    def mean_peak_flop_per_s(self, precision: Precision) -> float:
        """Dense peak of a device, the mean over those of all classes."""
        peaks = [
            each.devices * Machine(self.cluster, device=each.device).peak_flop_per_s(precision)
            for each in self.cluster.classes
        ]
        return sum(peaks) / self.cluster.devices

    def product_s(
        self,
        rows: float,
        columns: float,
        inner: float,
        *,
        fp8: bool,
        scaled: Fp8 = "per-product",
    ) -> float:
        """One matrix product, in FP8 scaled as ``scaled`` says [s]."""
        key = rows, columns, inner, fp8, scaled
        if key not in self._products:
            dtype = "fp8" if fp8 else self._dtype
            timing = gemm_s(self.device, rows, columns, inner, dtype, scaled=scaled)
            self._products[key] = float(timing.s)
            self._note("matrix products", bool(timing.extrapolated))
        return self._products[key]

    def attention_s(
        self,
        doc_tokens: Floats,
        heads: int,
        kv_heads: int,
        head_width: int,
        *,
        backward: bool,
        pack_tokens: Floats | None = None,
        score_width: int | None = None,
    ) -> Floats:
        """Causal attention over whole documents, each [s]; of one pack, or of packs so large."""
        timing = attention_s(
            self.device,
            doc_tokens,
            heads=heads,
            kv_heads=kv_heads,
            head_width=head_width,
            dtype=self._dtype,
            backward=backward,
            pack_tokens=pack_tokens,
            score_width=score_width,
        )
        self._note("attention", bool(timing.extrapolated.any()))
        return timing.s

    def attention_slowdown(self, kernel: Attention, *, wider_scores: bool = False) -> float:
        """Time of an attention kernel over that of the device's fastest, which was measured."""
        return attention_slowdown(self.device, kernel, wider_scores=wider_scores)

    @property
    def bytes_per_s(self) -> float:
        """Between memory and cores, as kernels reach it."""
        return 1.0 / self._moves

    def stand(self, ranks: Sequence[int] | Ints) -> Ints:
        """Devices on which these ranks stand, int64 [ranks]: rank r on device r."""
        return np.asarray(ranks, dtype=np.int64)

    def collective(self, ranks: Ranks, *, at_once: int | None = None) -> Collective:
        """Collectives of one group of ranks: from the operation and the whole tensor's bytes.

        Args:
            ranks: The group.
            at_once: As ``cost.link.group_of`` has it.
        """
        if (ranks, at_once) not in self._traffic:
            named = ranks.ranks if isinstance(ranks, RankGroup) else ranks
            group = group_of(self.cluster, self.stand(named), at_once=at_once)
            known: dict[tuple[str, float], float] = {}

            def seconds(operation: Op, size_bytes: float) -> float:
                key = operation, size_bytes
                if key not in known:
                    timing = collective_s(operation, size_bytes, group)
                    known[key] = float(timing.s)
                    self._note("collectives", bool(timing.extrapolated))
                return known[key]

            self._traffic[ranks, at_once] = seconds
        return self._traffic[ranks, at_once]

    def expert_routes(
        self, ranks: tuple[int, ...], most_nodes: Callable[[int], int]
    ) -> ExpertRoutes | None:
        """What connects the ranks that share a layer's experts; None of one rank.

        Args:
            ranks: Who they are.
            most_nodes: Of nodes, how many a row is sent to at most.
        """
        if len(ranks) == 1:
            return None
        if ranks not in self._routes:
            self._routes[ranks] = self._routes_of(ranks)
        routes = self._routes[ranks]
        return replace(routes, most_nodes=most_nodes(routes.nodes))

    def _routes_of(self, ranks: tuple[int, ...]) -> ExpertRoutes:
        """Without what a router does about nodes."""
        stand = self.stand(ranks)
        nodes = len(np.unique(self.cluster.node_of(stand)))
        touched = [self.cluster.classes[at] for at in np.unique(self.cluster.class_of(stand))]
        inside = {tier.devices for each in touched for tier in each.tiers}
        beyond = group_of(self.cluster, stand).levels[len(inside) :]
        far = min((level.bytes_per_s for level in beyond), default=0.0)
        near = min((each.tiers[-1].link for each in touched), key=lambda link: link.bytes_per_s)
        carried = carried_bytes_per_s(near.bytes_per_s)
        return ExpertRoutes(len(ranks), nodes, near.bytes_per_s, far, nodes, carried)

    def hop_s(
        self, source: int, target: int, size_bytes: float, *, at_once: int | None = None
    ) -> float:
        """One message between two ranks, while ``at_once`` ranks send theirs [s]."""
        return self.collective((source, target), at_once=at_once)("send", size_bytes)

    def context_links(self, layout: Layout) -> ContextLinks:
        """What connects the ranks of a context group."""
        ranks = layout.group_of(0, "cp")
        if len(ranks) == 1:
            return ContextLinks(LinkPrice(0.0, float("inf")))
        nodes = self.cluster.node_of(self.stand(ranks))
        inside = int((nodes == nodes[0]).sum())
        near = self._link(ranks[0], ranks[1])
        if inside in (1, len(ranks)):
            return ContextLinks(near)
        return ContextLinks(near, self._link(ranks[0], ranks[inside]), inside)

    def data_links(self, layout: Layout) -> Links:
        """What connects data-parallel ranks; rank 0 of each stands for the others."""
        ranks = layout.group_of(0, "dp")
        nodes = self.cluster.node_of(self.stand(ranks)).tolist()
        near = far = LinkPrice(0.0, float("inf"))
        beside = [at for at in range(1, len(ranks)) if nodes[at] == nodes[0]]
        away = [at for at in range(1, len(ranks)) if nodes[at] != nodes[0]]
        if away:
            near = far = self._link(ranks[0], ranks[away[0]])
        if beside:
            near = self._link(ranks[0], ranks[beside[0]])
        return Links(near, far, tuple(nodes))

    def _link(self, source: int, target: int) -> LinkPrice:
        small, large = 1.0, float(1 << 26)
        first = self.hop_s(source, target, small)
        return LinkPrice(first, (large - small) / (self.hop_s(source, target, large) - first))

    def _note(self, curve: str, beyond: bool) -> None:
        if beyond:
            self.extrapolated.add(curve)
