"""Measure the cores of this machine for ``equipoise calibrate``, stage by stage.

Why
    A core of this machine multiplies at its own rate, slower when its neighbour computes too,
    and gloo's wait for a message varies from machine to machine. A minute of measuring replaces
    every guess about them.

What it decides
    Kernels run on every core at once, one rank a core. On a machine that others use the minute
    ends first, and the rest of the points get fewer samples, which the file counts.
    ``calibrate.plan`` says which sizes, ``calibrate.ranks`` how they are measured.

Kept true (tests/multi/plan/test_calibrate.py)
    A small plan gives a whole device file; its curves price what was measured.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from equipoise.cost.curves.interval import median_interval
from equipoise.observe.disk import disk_rates
from equipoise.observe.machine import busy_core_s, usable_cores
from equipoise.spec.device.file import (
    FORM,
    AttentionPoint,
    CollectivePoint,
    CudaFacts,
    DeviceFile,
    GemmPoint,
    Stream,
)
from equipoise.spec.device.here import cpu_model, memory_share_bytes
from equipoise.train.calibrate.plan import CalibrationPlan
from equipoise.train.calibrate.ranks import (
    ENOUGH,
    Place,
    Samples,
    Target,
    measure_collectives,
    measure_kernels,
    measure_stream,
    own_s,
)

MOST_RANKS = 16
"""Ranks that exchange messages at once, at most."""

Stage = Callable[[float], tuple[Samples, float]]
"""From the seconds on the clock that it may take, to samples and processor seconds."""


class MeasureProgress(Protocol):
    """Shows progress to a user."""

    def start(self, label: str, total: int) -> None:
        """``total`` stages follow."""

    def advance(self, amount: int = 1) -> None:
        """One is done."""

    def finish(self) -> None:
        """All are."""


def measure_machine(plan: CalibrationPlan, folder: Path, progress: MeasureProgress) -> DeviceFile:
    """Measure the cores of this machine.

    Args:
        plan: Which sizes.
        folder: On the disk to measure.
        progress: Shows every stage.

    Cost: about 30 s with the default plan on idle cores, a minute on busy ones.
    """
    stages = [(each.weight, each.take) for each in machine_stages(plan, folder)]
    session = take_all(plan, stages, progress)
    return session.file(cpu_model(), memory_share_bytes())


def take_all(
    plan: CalibrationPlan, stages: Sequence[tuple[float, Stage]], progress: MeasureProgress
) -> "Session":
    """Run every stage within the plan's time.

    Args:
        plan: Which sizes.
        stages: Each with its share of the time.
        progress: Shows every stage.
    """
    taken: Samples = {}
    begin, busy_s, mine_s, ranks_s = time.perf_counter(), busy_core_s(), own_s(), 0.0
    progress.start("measure", len(stages))
    for index, (weight, stage) in enumerate(stages):
        left_s = max(0.0, plan.limit_s - (time.perf_counter() - begin))
        share = weight / sum(each for each, _ in stages[index:])
        samples, spent_s = stage(left_s * share)
        for place, values in samples.items():
            taken.setdefault(place, []).extend(values)
        ranks_s += spent_s
        progress.advance()
    progress.finish()
    seconds = time.perf_counter() - begin
    others_s = busy_core_s() - busy_s - (own_s() - mine_s) - ranks_s
    return Session(plan, taken, seconds, max(0.0, others_s) / seconds)


@dataclass(frozen=True, slots=True)
class Session:
    """All samples of one measurement."""

    plan: CalibrationPlan
    taken: Samples
    seconds: float
    other_cores: float
    """Cores that other programs kept busy meanwhile."""
    left: tuple[str, ...] = ()
    """What is left for another session."""

    def of_kind(self, kind: str) -> list[Place]:
        """The places of one kind."""
        return [place for place in self.taken if place[0] == kind]

    def stream(self, kind: str) -> Stream:
        """STREAM's rates."""
        rates = (self.taken[kind, name] for name in ("copy", "scale", "add", "triad"))
        return Stream(*map(median_interval, rates))

    def file(self, machine: str, memory_bytes: int, cuda: CudaFacts | None = None) -> DeviceFile:
        """The device file of what was measured.

        Args:
            machine: Processor and cores, or the product that the devices are.
            memory_bytes: Of one core or device.
            cuda: What is known of devices besides.
        """
        taken = self.taken
        gemm = tuple(
            GemmPoint(dtype, m, n, k, median_interval(taken["gemm", dtype, m, n, k]))
            for _, dtype, m, n, k in self.of_kind("gemm")
        )
        return DeviceFile(
            form=FORM,
            machine=machine,
            date=time.strftime("%Y-%m-%d"),
            torch=torch.__version__,
            seconds=round(self.seconds, 1),
            other_load_cores=round(self.other_cores, 2),
            thin_points=_thin_points(taken),
            memory_bytes=memory_bytes,
            peaks=tuple(
                (dtype, max(2.0 * p.m * p.n * p.k / p.s.mid for p in gemm if p.dtype == dtype))
                for dtype in self.plan.dtypes
                if any(point.dtype == dtype for point in gemm)
            ),
            stream=self.stream("stream"),
            disk_read_bytes_per_s=median_interval(taken["disk", "read"]),
            disk_write_bytes_per_s=median_interval(taken["disk", "write"]),
            gemm=gemm,
            attention=tuple(
                AttentionPoint(
                    dtype,
                    tokens,
                    width,
                    median_interval(taken["forward", *place[1:]]),
                    median_interval(taken["backward", *place[1:]]),
                    *shape,
                )
                for place in self.of_kind("forward")
                for _, dtype, tokens, width, *shape in (place,)
            ),
            collectives=tuple(
                CollectivePoint(op, ranks, size, median_interval(taken[place]))
                for place in self.of_kind("collective")
                for _, op, ranks, size in (place,)
            ),
            cuda=cuda,
            left=self.left,
        )


def _thin_points(taken: Mapping[Place, Sequence[float]]) -> int:
    """Places with fewer samples than an interval needs; what is held needs one."""
    return sum(len(values) < ENOUGH for place, values in taken.items() if place[0] != "reserved")


@dataclass(frozen=True, slots=True)
class MachineStage:
    """A few seconds of measuring cores."""

    name: str
    weight: float
    """Seconds that it takes, about."""
    take: Stage
    dtype: str = ""
    """What its kernels multiply; empty for what every dtype needs."""
    head_width: int = 0
    """Width of the heads that it attends with; 0 for none."""


def machine_stages(plan: CalibrationPlan, folder: Path) -> Iterator[MachineStage]:
    """All that is to be done, in stages of a few seconds."""
    cores = Target.cores(len(usable_cores()))
    for dtype, k in itertools.product(plan.dtypes, plan.widths):
        points = plan.products(dtype, k)
        seconds = 1.0 + sum(2e-10 * m * n * k for _, m, n, k in points)
        take: Stage = partial(cores.take, measure_kernels, (dtype, points, []))
        yield MachineStage(f"products of {dtype} and {k}", seconds, take, dtype)
    for dtype, head_width in itertools.product(plan.dtypes, plan.head_widths):
        shapes = plan.attentions(dtype, head_width)
        seconds = 1.0 + sum(1e-9 * head_width * tokens**2 for _, tokens, *_ in shapes)
        take = partial(cores.take, measure_kernels, (dtype, [], shapes))
        name = f"attention of {dtype}, heads of {head_width}"
        yield MachineStage(name, seconds, take, dtype, head_width)
    stream: Stage = partial(cores.take, measure_stream, plan.stream_elements)
    yield MachineStage("memory", 1.0, stream)
    for count in powers_of_two(min(max(2, cores.ranks), MOST_RANKS)):
        work = partial(Target.cores(count).take, measure_collectives, plan.collective_bytes)
        yield MachineStage(f"collectives of {count} ranks", 5.0, work)
    yield MachineStage("the disk", 1.0, partial(measure_disk, folder, plan.disk_bytes))


def powers_of_two(most: int) -> list[int]:
    """Those from 2 to ``most``.

    >>> powers_of_two(12)
    [2, 4, 8]
    """
    return [1 << power for power in range(1, most.bit_length())]


def measure_disk(folder: Path, size_bytes: int, limit_s: float) -> tuple[Samples, float]:
    """Rates of the disk on which a folder is."""
    samples = 6 if limit_s > 0 else 2
    reads, writes = disk_rates(folder, size_bytes=size_bytes, samples=samples)
    return {("disk", "read"): reads, ("disk", "write"): writes}, 0.0
