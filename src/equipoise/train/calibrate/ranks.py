"""Ranks that take samples together: of kernels, memory, collectives and pairs.

What it decides
    All ranks measure the same place at the same time, because that is how they will run, and their
    samples are pooled: six a place, so that fewer a rank are enough. A rank on a core is pinned,
    with a training process's allocator; a rank on a device is a new process.

    What a rank computes on, and how it takes samples there, is given (``Target``), so that all of
    it runs on a CPU whose queue stands in for a device's.

Kept true (tests/multi/plan/test_calibrate.py, tests/multi/plan/test_calibrate_devices.py)
    Every place has its samples, on cores and on what stands in for devices.
"""

import itertools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from equipoise.comm.group import Ranks
from equipoise.comm.local import run_ranks
from equipoise.comm.measure import OPS, collective_samples, pair_samples
from equipoise.nn.device.clock import wall_clock
from equipoise.nn.device.memory import beside_bytes
from equipoise.nn.measure_kernels import (
    AttentionCall,
    MakeSampler,
    Patience,
    Sampler,
    attention_samples,
    gemm_samples,
    host_copy_samples,
    multiplies,
    sampler_on,
    stream_samples,
)
from equipoise.nn.stream import KERNELS
from equipoise.spec.device.spec import Dtype
from equipoise.train.calibrate.plan import AttentionSize, GemmSize, documents_of, heads_of
from equipoise.train.process import settle

ENOUGH = 6
"""Samples that give a 95% interval."""

_HURRY_S = 4.0
"""Collectives that have less than this left are sampled twice."""

_TOGETHER, _TOGETHER_TOKENS = 4, 1024
"""Heads per call on a core, as in small decoders, so that a call's fixed cost weighs as much as
there."""

Place = tuple[Any, ...]
"""What was measured: a kind and its sizes."""

Samples = dict[Place, list[float]]

Measure = Callable[..., tuple[Samples, float]]
"""What a rank does: from its ``Ranks``, work, seconds on the clock and a maker of samplers, to
samples and processor seconds."""


@dataclass(frozen=True, slots=True)
class Target:
    """What ranks measure."""

    devices: tuple[torch.device, ...]
    """Each rank's."""
    make_sampler: MakeSampler = sampler_on
    fresh: bool = False
    """Whether each rank is a new interpreter, as those on CUDA devices must be."""

    @classmethod
    def cores(cls, count: int) -> "Target":
        """Cores of this machine."""
        return cls((torch.device("cpu"),) * count)

    @classmethod
    def cuda(cls, count: int) -> "Target":
        """The first CUDA devices of this machine."""
        return cls(tuple(torch.device("cuda", at) for at in range(count)), fresh=True)

    @property
    def ranks(self) -> int:
        """One for each device."""
        return len(self.devices)

    def first(self, ranks: int) -> "Target":
        """The first ``ranks`` of them."""
        return Target(self.devices[:ranks], self.make_sampler, self.fresh)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call ``function(ranks, *arguments)`` on every rank; their results."""
        return run_ranks(self.ranks, function, *arguments, devices=self.devices, fresh=self.fresh)

    def take(self, measure: Measure, work: Any, limit_s: float) -> tuple[Samples, float]:
        """Samples of all ranks together, and the processor time they took."""
        pooled: Samples = {}
        spent_s = 0.0
        for samples, took_s in self.run(measure, work, limit_s, self.make_sampler):
            spent_s += took_s
            for place, values in samples.items():
                pooled.setdefault(place, []).extend(values)
        return pooled, spent_s


def own_s() -> float:
    """Processor time of this process and of the children it has waited for."""
    return sum(os.times()[:4])


def _together(ranks: Ranks, places: Iterable[Place], measure: Callable[..., None]) -> float:
    """Measure place after place, all ranks at the same one; this rank's processor time."""
    settle(ranks.rank, pin=ranks.device.type == "cpu")
    torch.manual_seed(ranks.rank)
    for place in places:
        ranks.barrier()
        measure(*place)
    return own_s()


def _patience(ranks: Ranks, points: int, limit_s: float) -> Patience:
    """Six samples of all ranks together, if the clock allows."""
    return Patience(least=max(2, -(-ENOUGH // ranks.world)), limit_s=limit_s / max(1, points))


Kernels = tuple[Dtype, list[GemmSize], list[AttentionSize]]


def measure_kernels(
    ranks: Ranks, work: Kernels, limit_s: float, make_sampler: MakeSampler
) -> tuple[Samples, float]:
    """Products and attention of one dtype; nothing where the device has no such products."""
    (dtype, products, attentions), taken = work, Samples()
    sampler = make_sampler(ranks.device)
    if not multiplies(ranks.device, dtype):
        return taken, own_s()
    patience = _patience(ranks, len(products) + 2 * len(attentions), limit_s)

    def measure(kind: str, size: Any) -> None:
        if kind == "gemm":
            taken[kind, *size] = gemm_samples(sampler, size, patience)
        else:
            both = _attention_s(sampler, size, patience)
            taken["forward", *size], taken["backward", *size] = both

    places = [*(("gemm", each) for each in products), *(("both", each) for each in attentions)]
    return taken, _together(ranks, places, measure)


def _attention_s(
    sampler: Sampler, size: AttentionSize, patience: Patience
) -> tuple[list[float], list[float]]:
    """Seconds of a forward and a backward: of one head on a core, of all units on a device."""
    dtype, tokens, head_width, sharing, units = size
    if sharing is None or units is None:
        heads = _TOGETHER if tokens <= _TOGETHER_TOKENS else 1
        call = AttentionCall([tokens], heads, heads, head_width)
        both = attention_samples(sampler, dtype, call, patience)
        return [s / heads for s in both[0]], [s / heads for s in both[1]]
    heads, documents = heads_of(units, sharing), documents_of(units, sharing)
    call = AttentionCall([tokens] * documents, heads, heads // sharing, head_width)
    return attention_samples(sampler, dtype, call, patience)


def measure_stream(
    ranks: Ranks, elements: int, limit_s: float, make_sampler: MakeSampler
) -> tuple[Samples, float]:
    """STREAM's kernels in the memory that each rank computes in."""
    taken: Samples = {}
    sampler, patience = make_sampler(ranks.device), _patience(ranks, len(KERNELS), limit_s)

    def measure() -> None:
        for name, rates in stream_samples(sampler, elements, patience).items():
            taken["stream", name] = rates

    return taken, _together(ranks, [()], measure)


def measure_memory(
    ranks: Ranks, elements: int, limit_s: float, make_sampler: MakeSampler
) -> tuple[Samples, float]:
    """As ``measure_stream``, and copies from the host's memory to a device's."""
    taken, _ = measure_stream(ranks, elements, limit_s / 2, make_sampler)
    sampler, patience = make_sampler(ranks.device), _patience(ranks, 1, limit_s / 2)

    def measure() -> None:
        taken[("host copy",)] = host_copy_samples(sampler, 8 * elements, patience)

    spent_s = _together(ranks, [()], measure)
    taken[("reserved",)] = [float(beside_bytes(ranks.device))]
    return taken, spent_s


def measure_collectives(
    ranks: Ranks, sizes: tuple[int, ...], limit_s: float, make_sampler: MakeSampler
) -> tuple[Samples, float]:
    """Every collective over all ranks."""
    del make_sampler
    taken: Samples = {}
    # All ranks must take as many, so what is left decides and no rank's own clock.
    samples, clock = 7 if limit_s > _HURRY_S else 2, wall_clock(ranks.device)

    def measure(op: str, size: int) -> None:
        slowest = collective_samples(ranks, op, size, samples=samples, clock=clock)
        if ranks.rank == 0:  # every rank has the same
            taken["collective", op, ranks.world, size] = slowest

    spent_s = _together(ranks, itertools.product(OPS, sizes), measure)
    taken[("reserved",)] = [float(beside_bytes(ranks.device))]
    return taken, spent_s


def measure_pairs(
    ranks: Ranks, sizes: tuple[int, ...], limit_s: float, make_sampler: MakeSampler
) -> tuple[Samples, float]:
    """One message between every two ranks, small and large."""
    del make_sampler
    taken: Samples = {}
    samples, clock = 7 if limit_s > _HURRY_S else 2, wall_clock(ranks.device)

    def measure(size: int) -> None:
        for pair, slower in pair_samples(ranks, size, samples=samples, clock=clock).items():
            if ranks.rank == 0:
                taken["pair", *pair, size] = slower

    return taken, _together(ranks, [(size,) for size in sizes], measure)
