"""Training over sites that are far apart: what would be faster, and what it is not equal to.

Why
    Between buildings there is a hundredth of the bandwidth inside one. Synchronous training then
    waits for the pipe, and several published ways do not; but they train another model, step by
    step, than one device would. That is for the user to choose.

What it decides
    Each site holds whole replicas and runs the fastest step that a search finds for its share of
    the sequences. What the sites exchange is the model's gradient or update, of every device its
    shard, over ports and trunk, in a ring of sites. Of that step and that exchange follow:

        compressed   every step, in 8 bits instead of gradients' own width
        delayed      every step, beside the next one
        local        every 500th step, the update of all those steps

    None is ever the plan's best: they stand beside it, each with its effect and its gain.

Kept true (tests/unit/plan/answer/test_across.py)
    A wider trunk is never slower; local updates exchange a 500th; with one class nothing is said.

Sources
    Local updates: DiLoCo, arXiv:2311.08105, 500 steps. One step late: PipeDream-2BW,
    arXiv:2006.09503. What rounding lost is added to the next step: 1-bit Adam, arXiv:2102.02888.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from equipoise.base.units import GIB, format_seconds
from equipoise.plan.search.deadline import Deadline
from equipoise.plan.search.search import Search
from equipoise.spec.cluster.spec import ClusterSpec

LOCAL_STEPS = 500
"""Steps between two exchanges of local updates."""

_SHARE = 0.8
"""Share of the time that is left; what would change the plan needs some of it."""
_UPDATE_BYTES = 4.0
"""Width of an element of what local steps changed."""
_OUTER_BYTES = 8.0
"""What an outer optimizer with momentum holds of a weight, in fp32."""
_SMALL_BYTES = 1.0
"""Width of an element of a compressed gradient."""

SiteSearch = Callable[[ClusterSpec, int], Search]
"""A search of one site's devices with its sequences of a step."""


@dataclass(frozen=True, slots=True)
class SitesStep:
    """What sites take by themselves, and to exchange."""

    step_s: float
    """The slowest site's own step [s]."""
    layouts: tuple[str, ...]
    """The layout of each kind of site."""
    params: int
    rate: float
    """What a site sends to the others together [bytes/s]."""
    latency_s: float
    sites: int
    devices: int
    """Devices in the smallest site."""

    @property
    def outer_gib(self) -> float:
        """What local updates hold more on a device: the weights joined last, and a momentum."""
        return _OUTER_BYTES * self.params / self.devices / GIB

    def exchange_s(self, width: float) -> float:
        """Seconds to add up one number of ``width`` bytes for each weight, over all sites."""
        ring = 2.0 * (self.sites - 1) / self.sites
        return ring * self.params * width / self.rate + 2 * (self.sites - 1) * self.latency_s


def site_clusters(cluster: ClusterSpec) -> list[ClusterSpec]:
    """Each class as a cluster of its own."""
    return [ClusterSpec(each.name, (each,)) for each in cluster.classes]


def trunk_rate(cluster: ClusterSpec) -> float:
    """What the nodes of one site send to another together, as links reach it [bytes/s]."""
    between = cluster.between
    if between is None:
        return 0.0
    ports = between.bytes_per_s * min(each.nodes for each in cluster.classes)
    trunk = cluster.trunk_bytes_per_s
    return between.efficiency * (ports if trunk is None else min(ports, trunk))


def step_of_sites(
    cluster: ClusterSpec, sequences: int, params: int, make: SiteSearch, due: Deadline
) -> SitesStep | None:
    """The fastest step of sites that hold whole replicas; None where one cannot hold its share.

    Args:
        cluster: Several classes, each a site.
        sequences: Sequences of one step, over all sites, which share them by devices.
        params: Weights that are exchanged.
        make: A search of one site.
        due: When planning ends; the searches share most of the time.
    """
    sites, rate = site_clusters(cluster), trunk_rate(cluster)
    shares = [sequences * each.devices / cluster.devices for each in sites]
    if len(sites) == 1 or rate == 0.0 or any(share % 1 for share in shares):
        return None
    kinds = {
        dataclasses.replace(site.classes[0], name=""): (site, int(share))
        for site, share in zip(sites, shares, strict=True)
    }
    alone: list[tuple[float, str]] = []
    for site, share in kinds.values():
        search = make(site, share)
        left_s = _SHARE * due.left_s
        outcome = search.run(seconds=left_s / (len(kinds) - len(alone)))
        if not outcome.fitting:
            return None
        best = outcome.fitting[0]
        alone.append((best.step_s, search.space.choice(best.row).words()["layout"]))
    slowest = max(step_s for step_s, _ in alone)
    layouts = tuple(layout for _, layout in alone)
    latency = 0.0 if cluster.between is None else cluster.between.latency_s
    devices = min(site.devices for site in sites)
    return SitesStep(slowest, layouts, params, rate, latency, len(sites), devices)


def across_remarks(step: SitesStep | None, best_s: float, grad_bytes: float) -> list[str]:
    """One sentence for each way that is faster than the plan's best.

    Args:
        step: What sites take; None where that is not known, which is then said.
        best_s: The plan's best step, which is synchronous.
        grad_bytes: Width of a gradient's element as it is reduced.
    """
    if step is None:
        return [
            "Local updates and late or compressed gradients between sites are not priced, as no "
            "step of a site alone was found. Give more --seconds, or a number of sequences that "
            "sites can share by their devices."
        ]
    small, whole = step.exchange_s(_SMALL_BYTES), step.exchange_s(grad_bytes)
    update = step.exchange_s(_UPDATE_BYTES)
    ways: Sequence[tuple[float, str, str]] = [
        (
            step.step_s + small,
            "gradients in 8 bits between sites (arXiv:2102.02888)",
            "each step adds a rounded sum, and what was rounded off to the next",
        ),
        (
            max(step.step_s, whole),
            "gradients of other sites one step late (PipeDream-2BW, arXiv:2006.09503)",
            "a step adds gradients of weights that are one update older",
        ),
        (
            step.step_s + update / LOCAL_STEPS,
            f"local updates, joined every {LOCAL_STEPS} steps (DiLoCo, arXiv:2311.08105)",
            f"each site takes {LOCAL_STEPS} steps of its own on 1/{step.sites} of the sequences, "
            "and an outer optimizer adds up what they changed, which holds "
            f"{step.outer_gib:.2f} GiB more on each device",
        ),
    ]
    return [
        f"Not equal to synchronous SGD, so not chosen: {what}: {format_seconds(seconds)} a step, "
        f"{best_s / seconds:.2f} times as fast, with {' and '.join(step.layouts)} in a site; "
        f"{effect}."
        for seconds, what, effect in ways
        if seconds < best_s
    ]
