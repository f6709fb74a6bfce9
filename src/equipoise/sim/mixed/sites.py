"""Where each pipeline stage stands on a cluster of several classes, and on what it computes.

Why
    A cluster that grew has fast and slow devices, and islands joined by a slow network. A step
    priced on the slowest class wastes the others; one that reduces gradients across islands goes
    at the pace of what joins them. Stages hand over little, so they may cross; what a stage
    reduces should not.

What it decides
    The *site* of a pipeline rank: devices of the ranks of its stage, whose slowest sets its
    pace, and their own links. Rank order says who stands where: under ``pp-dp`` a stage's
    ranks are neighbours, and a stage whose ranks fill whole nodes of one class stays in it.

    Layers go to stages by speed, exactly (``balance.stage``): a stage's speed is what the
    slowest site takes for all layers over what its own takes.

Kept true (tests/unit/sim/mixed/test_sites.py)
    A faster class gets more layers, as many as the best of all splits; classes that are alike
    price as one; groups stand where their ranks do.

Sources
    Stages by class of network card and by speed: Holmes, arXiv:2312.03549.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from equipoise.balance.stage import StageSplit, split_stages
from equipoise.base.arrays import Flags, Floats, Ints
from equipoise.cost.offload import loads_without_copies
from equipoise.cost.step.request import Precision, StepOptions, kernel_key
from equipoise.schedule.pipeline.strategies import place_stages
from equipoise.sim.machine import Machine, slowest_of
from equipoise.sim.parts import BatchParts, StepParts
from equipoise.spec.cluster.spec import ClusterSpec
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec


class Site(Machine):
    """A cluster as the ranks of one stage see it, in the places of those of the first."""

    def __init__(
        self, cluster: ClusterSpec, layout: Layout, rank: int, precision: Precision = "bf16"
    ) -> None:
        classes = [cluster.classes[each] for each in _classes(cluster, layout)[rank]]
        slowest = slowest_of((each.device for each in classes), precision)
        super().__init__(cluster, precision, slowest)
        self._layout, self._rank = layout, rank

    def at(self, precision: Precision) -> Machine:
        """The same site at this precision."""
        if self._is_wide == (precision == "fp32"):
            return self
        if self._other is None:
            self._other = Site(self.cluster, self._layout, self._rank, precision)
            self._other.extrapolated = self.extrapolated
        return self._other

    def stand(self, ranks: Sequence[int] | Ints) -> Ints:
        """Rank r of the first stage stands where this stage's does."""
        ids, stride, stages = np.asarray(ranks), self._layout.stage_stride, self._layout.pp
        stage = ids // stride % stages
        return np.asarray(ids + ((stage + self._rank) % stages - stage) * stride)


def _classes(cluster: ClusterSpec, layout: Layout) -> list[tuple[int, ...]]:
    """Numbers of the classes that each stage's ranks stand in.

    Raises:
        SpecError: the layout has more ranks than there are devices.
    """
    cluster.class_of(layout.world - 1)
    stands = stage_classes(cluster, layout.stage_stride, layout.pp, world=layout.world)
    return [tuple(np.flatnonzero(row).tolist()) for row in stands]


def stage_classes(
    cluster: ClusterSpec, stride: int, stages: int, *, world: int | None = None
) -> Flags:
    """Whether a stage has ranks in each class, bool [stages, classes].

    Args:
        cluster: Its classes follow each other.
        stride: ``Layout.stage_stride``: a stage's ranks are runs of it, one in every
            ``stride x stages``.
        stages: Ranks of a pipeline.
        world: All ranks; as many as there are devices unless given.
    """
    every, begins = stride * stages, np.arange(stages) * stride
    begin, inside = 0, list[Flags]()
    for each in cluster.classes:
        turn, rest = divmod(begin, every)
        is_here = rest < begins + stride
        # The first rank of each stage that is ``begin`` or more.
        first = turn * every + np.where(is_here, np.maximum(begins, rest), every + begins)
        begin += each.devices
        inside.append(first < min(begin, world or begin))
    return np.array(inside).T


def room_bytes(cluster: ClusterSpec, layout: Layout) -> Floats:
    """What the smallest device of each pipeline rank's stage may fill, float64 [pp] [bytes].

    >>> from equipoise.spec.cluster.spec import find_cluster
    >>> (room_bytes(find_cluster("h100-sxm:16"), Layout(pp=2, dp=8)) / 2**30).round(1).tolist()
    [78.7, 78.7]
    """
    usable = np.array([each.device.usable_bytes for each in cluster.classes], dtype=np.float64)
    if len(usable) == 1:
        return np.repeat(usable, layout.pp)
    return np.array([usable[list(kinds)].min() for kinds in _classes(cluster, layout)])


def name_sites(cluster: ClusterSpec, layout: Layout) -> list[str]:
    """Names of the classes that each pipeline rank's stage stands in, joined by ``+``.

    >>> from equipoise.spec.cluster.spec import find_cluster
    >>> name_sites(find_cluster("h100-sxm:16"), Layout(pp=2, dp=8))
    ['h100-sxm', 'h100-sxm']
    """
    return [
        "+".join(cluster.classes[each].name for each in kinds)
        for kinds in _classes(cluster, layout)
    ]


def find_sites(machine: Machine, layout: Layout) -> list[Machine]:
    """On what each pipeline rank computes; stages that stand in the same classes share a site."""
    cluster = machine.cluster
    if len(cluster.classes) == 1 or layout.pp == 1:
        return [machine] * layout.pp
    known: dict[tuple[int, ...], Machine] = {}
    sites = []
    for rank, classes in enumerate(_classes(cluster, layout)):
        if classes not in known:
            known[classes] = Site(cluster, layout, rank)
            known[classes].extrapolated = machine.extrapolated
        sites.append(known[classes])
    return sites


class SiteParts:
    """Sites and their parts: steps that run the same kernels there share what was priced."""

    def __init__(self, model: ModelSpec, machine: Machine) -> None:
        self._model, self._machine = model, machine
        self._sites: dict[tuple[object, ...], list[Machine]] = {}
        self._parts: dict[tuple[object, ...], StepParts] = {}

    def sites(self, layout: Layout) -> list[Machine]:
        """As ``find_sites``; the same ones for the same degrees and order."""
        key = layout.pp, layout.dp, layout.cp, layout.tp, layout.order
        if key not in self._sites:
            self._sites[key] = find_sites(self._machine, layout)
        return self._sites[key]

    def parts(self, site: Machine, layout: Layout, options: StepOptions) -> StepParts:
        """What a micro-batch takes on one of them; options differ in what is searched alone."""
        key = id(site), *kernel_key(layout, options)
        if key not in self._parts:
            self._parts[key] = StepParts(self._model, site, layout, options)
        return self._parts[key]


def slowest_hop_s(machine: Machine, layout: Layout, first: BatchParts, traffic: float) -> float:
    """The slowest of all hops between stages [s].

    Args:
        machine: The cluster.
        layout: Degrees.
        first: A micro-batch as the first stage has it.
        traffic: The residual of messages.
    """
    if len(machine.cluster.classes) == 1 or layout.pp == 1:
        return first.hop_s
    ranks = [layout.rank_at(pp=rank) for rank in range(layout.pp)]
    size, senders = first.hop_bytes, layout.world // layout.pp
    times = (machine.hop_s(a, b, size, at_once=senders) for a, b in itertools.pairwise(ranks))
    return traffic * max(times)


def rank_of_stages(layout: Layout, options: StepOptions) -> Ints:
    """Pipeline rank of each stage, int64 [pp x virtual]."""
    return place_stages(options.schedule, layout.pp, layout.pp * options.virtual)


def split_by_speed(parts: Sequence[BatchParts], layout: Layout, options: StepOptions) -> StageSplit:
    """Layers to stages so that the slowest is as fast as can be, each at its site's speed.

    Args:
        parts: Of one micro-batch, as each pipeline rank's site takes it.
        layout: Degrees.
        options: Schedule and virtual stages.
    """
    place = rank_of_stages(layout, options)
    loads = [loads_without_copies(each.layers) for each in parts]
    whole = np.array([float(each.sum()) for each in loads])
    pace = whole.max() / whole[place]
    first, last = float(parts[place[0]].first.sum()), float(parts[place[-1]].last.sum())
    return split_stages(
        loads[int(whole.argmax())],
        len(place),
        first_load=first * pace[0],
        last_load=last * pace[-1],
        speeds=pace.tolist(),
        empty_ends=len(place) > len(loads[0]),
    )
