"""Measure this machine for ``equipoise calibrate``, stage by stage.

Why
    A core of this machine multiplies at its own rate, slower when its neighbour computes too,
    and gloo's wait for a message varies from machine to machine. A minute of measuring replaces
    every guess about them.

What it decides
    Which sizes are measured. Kernels run on every core at once, one rank a core, pinned and
    with a training process's allocator, because that is how they will run. Samples of all ranks
    are pooled, six a point, so that fewer a rank are enough. On a machine that others use the
    minute ends first, and the rest of the points get fewer samples, which the file counts. A
    product of more operations than ``most_flop`` is left out unless its inner
    side is the shortest: there the core is full, and time goes with the inner side.

Kept true (tests/multi/plan/test_calibrate.py)
    A small plan gives a whole device file; its curves price what was measured.
"""

import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from equipoise.comm.group import Ranks
from equipoise.comm.local import run_ranks
from equipoise.comm.measure import OPS, collective_samples
from equipoise.cost.curves.interval import median_interval
from equipoise.nn.measure_kernels import (
    Patience,
    attention_samples,
    gemm_samples,
    stream_samples,
)
from equipoise.nn.stream import KERNELS
from equipoise.observe.disk import disk_rates
from equipoise.observe.machine import busy_core_s, usable_cores
from equipoise.spec.device.file import (
    FORM,
    AttentionPoint,
    CollectivePoint,
    DeviceFile,
    GemmPoint,
    Stream,
)
from equipoise.spec.device.here import cpu_model, memory_share_bytes
from equipoise.spec.device.spec import Dtype
from equipoise.spec.run.resolve import ResolvedRun
from equipoise.train.process import settle

MOST_RANKS = 16
"""Ranks that measure at once, at most."""

_ENOUGH = 6
"""Samples that give a 95% interval."""

_HURRY_S = 4.0
"""Collectives that have less than this left are sampled twice."""

Place = tuple[Any, ...]
"""What was measured: a kind and its sizes."""

Samples = dict[Place, list[float]]


@dataclass(frozen=True, slots=True)
class CalibrationPlan:
    """What is measured."""

    dtypes: tuple[Dtype, ...] = ("fp32", "bf16")
    rows: tuple[int, ...] = (16, 128, 1024, 8192)
    widths: tuple[int, ...] = (64, 256, 1024, 4096)
    """Both other sizes of a product."""
    most_flop: float = 9e9
    doc_tokens: tuple[int, ...] = (16, 64, 256, 1024, 4096, 8192)
    head_widths: tuple[int, ...] = (32, 64)
    """Widths of one head: a core computes one head after the other."""
    stream_elements: int = 12 << 20
    """Three arrays of 96 MiB: what a core streams is seldom in its cache."""
    collective_bytes: tuple[int, ...] = tuple(1 << power for power in range(10, 27, 4))
    disk_bytes: int = 32 << 20
    limit_s: float = 50.0
    """Time on the clock after which every point gets one sample a rank."""

    @classmethod
    def for_run(cls, run: ResolvedRun) -> "CalibrationPlan":
        """The usual sizes, and those of a run where they are larger.

        >>> from equipoise.spec.run.load import read_run
        >>> run = read_run(None, [("pack.context_tokens", "16384")])
        >>> CalibrationPlan.for_run(run).doc_tokens[-1]
        16384
        """
        usual, model, pack = cls(), run.model, run.spec.pack
        query = model.heads * model.head_width
        widest = max(model.hidden, 2 * model.ffn, query * 3, model.vocab, 2 * model.expert_ffn)
        return dataclasses.replace(
            usual,
            rows=_reaching(usual.rows, pack.most_tokens),
            widths=_reaching(usual.widths, widest),
            doc_tokens=_reaching(usual.doc_tokens, pack.context_tokens),
            head_widths=tuple(sorted({*usual.head_widths, model.head_width})),
        )


def _reaching(sizes: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The sizes, the last of them grown to a power of two that is enough."""
    most = max(sizes[-1], 1 << (size - 1).bit_length())
    return (*sizes[:-1], most)


class MeasureProgress(Protocol):
    """Shows progress to a user."""

    def start(self, label: str, total: int) -> None:
        """``total`` stages follow."""

    def advance(self, amount: int = 1) -> None:
        """One is done."""

    def finish(self) -> None:
        """All are."""


def measure_machine(plan: CalibrationPlan, folder: Path, progress: MeasureProgress) -> DeviceFile:
    """Measure everything.

    Args:
        plan: Which sizes.
        folder: On the disk to measure.
        progress: Shows every stage.

    Cost: about 30 s with the default plan on idle cores, a minute on busy ones.
    """
    begin, busy_s, mine_s = time.perf_counter(), busy_core_s(), _own_s()
    ranks_s = 0.0
    taken: Samples = {}
    stages = list(_stages(plan, folder))
    progress.start("measure", len(stages))
    for index, (_, stage) in enumerate(stages):
        left_s = max(0.0, plan.limit_s - (time.perf_counter() - begin))
        share = stages[index][0] / sum(weight for weight, _ in stages[index:])
        samples, spent_s = stage(left_s * share)
        for place, values in samples.items():
            taken.setdefault(place, []).extend(values)
        ranks_s += spent_s
        progress.advance()
    progress.finish()
    seconds = time.perf_counter() - begin
    others_s = busy_core_s() - busy_s - (_own_s() - mine_s) - ranks_s
    gemm = tuple(
        GemmPoint(dtype, m, n, k, median_interval(taken["gemm", dtype, m, n, k]))
        for _, dtype, m, n, k in _of_kind(taken, "gemm")
    )
    return DeviceFile(
        form=FORM,
        machine=cpu_model(),
        date=time.strftime("%Y-%m-%d"),
        torch=torch.__version__,
        seconds=round(seconds, 1),
        other_load_cores=round(max(0.0, others_s) / seconds, 2),
        thin_points=sum(len(values) < _ENOUGH for values in taken.values()),
        memory_bytes=memory_share_bytes(),
        peaks=tuple(
            (dtype, max(2.0 * p.m * p.n * p.k / p.s.mid for p in gemm if p.dtype == dtype))
            for dtype in plan.dtypes
        ),
        stream=Stream(
            *(median_interval(taken["stream", name]) for name in ("copy", "scale", "add", "triad"))
        ),
        disk_read_bytes_per_s=median_interval(taken["disk", "read"]),
        disk_write_bytes_per_s=median_interval(taken["disk", "write"]),
        gemm=gemm,
        attention=tuple(
            AttentionPoint(
                dtype,
                tokens,
                width,
                median_interval(taken["forward", dtype, tokens, width]),
                median_interval(taken["backward", dtype, tokens, width]),
            )
            for _, dtype, tokens, width in _of_kind(taken, "forward")
        ),
        collectives=tuple(
            CollectivePoint(op, ranks, size, median_interval(taken["collective", op, ranks, size]))
            for _, op, ranks, size in _of_kind(taken, "collective")
        ),
    )


def _of_kind(taken: Samples, kind: str) -> list[Place]:
    return [place for place in taken if place[0] == kind]


def _own_s() -> float:
    """Processor time of this process and of the children it has waited for."""
    return sum(os.times()[:4])


Stage = Callable[[float], tuple[Samples, float]]
"""From the seconds on the clock that it may take, to samples and processor seconds."""


def _stages(plan: CalibrationPlan, folder: Path) -> Iterator[tuple[float, Stage]]:
    """All that is to be done, in steps of a few seconds, each with about how many."""
    cores = len(usable_cores())
    for dtype, k in itertools.product(plan.dtypes, plan.widths):
        points = [
            (dtype, m, n, k)
            for m, n in itertools.product(plan.rows, plan.widths)
            if k == plan.widths[0] or 2.0 * m * n * k <= plan.most_flop
        ]
        seconds = 1.0 + sum(2e-10 * m * n * k for _, m, n, k in points)
        yield seconds, partial(_on_ranks, cores, _gemm, points)
    for dtype, head_width in itertools.product(plan.dtypes, plan.head_widths):
        shapes = [(dtype, tokens, head_width) for tokens in plan.doc_tokens]
        seconds = 1.0 + sum(1e-9 * head_width * tokens**2 for _, tokens, _ in shapes)
        yield seconds, partial(_on_ranks, cores, _attention, shapes)
    yield 1.0, partial(_on_ranks, cores, _stream, plan.stream_elements)
    count = 2
    while count <= min(max(2, cores), MOST_RANKS):
        yield 5.0, partial(_on_ranks, count, _collectives, plan.collective_bytes)
        count *= 2
    yield 1.0, partial(_disk, folder, plan.disk_bytes)


def _on_ranks(
    count: int, function: Callable[..., tuple[Samples, float]], work: Any, limit_s: float
) -> tuple[Samples, float]:
    """Samples of all ranks together, and the processor time they took."""
    pooled: Samples = {}
    spent_s = 0.0
    for samples, took_s in run_ranks(count, function, work, limit_s):
        spent_s += took_s
        for place, values in samples.items():
            pooled.setdefault(place, []).extend(values)
    return pooled, spent_s


def _together(ranks: Ranks, places: Iterable[Place], measure: Callable[..., None]) -> float:
    """Measure place after place, all ranks at the same one; this rank's processor time."""
    settle(ranks.rank, pin=True)
    torch.manual_seed(ranks.rank)
    for place in places:
        ranks.barrier()
        measure(*place)
    return _own_s()


def _patience(ranks: Ranks, points: int, limit_s: float) -> Patience:
    """Six samples of all ranks together, if the clock allows."""
    return Patience(least=max(2, -(-_ENOUGH // ranks.world)), limit_s=limit_s / points)


def _gemm(ranks: Ranks, points: list[Place], limit_s: float) -> tuple[Samples, float]:
    taken: Samples = {}
    patience = _patience(ranks, len(points), limit_s)

    def measure(dtype: str, m: int, n: int, k: int) -> None:
        taken["gemm", dtype, m, n, k] = gemm_samples(dtype, m, n, k, patience)

    return taken, _together(ranks, points, measure)


def _attention(ranks: Ranks, shapes: list[Place], limit_s: float) -> tuple[Samples, float]:
    taken: Samples = {}
    patience = _patience(ranks, 2 * len(shapes), limit_s)

    def measure(dtype: str, tokens: int, head_width: int) -> None:
        both = attention_samples(dtype, tokens, head_width, patience)
        taken["forward", dtype, tokens, head_width] = both[0]
        taken["backward", dtype, tokens, head_width] = both[1]

    return taken, _together(ranks, shapes, measure)


def _stream(ranks: Ranks, elements: int, limit_s: float) -> tuple[Samples, float]:
    taken: Samples = {}
    patience = _patience(ranks, len(KERNELS), limit_s)

    def measure() -> None:
        for name, rates in stream_samples(elements, patience).items():
            taken["stream", name] = rates

    return taken, _together(ranks, [()], measure)


def _collectives(ranks: Ranks, sizes: tuple[int, ...], limit_s: float) -> tuple[Samples, float]:
    taken: Samples = {}
    # All ranks must take as many, so what is left decides and no rank's own clock.
    samples = 7 if limit_s > _HURRY_S else 2

    def measure(op: str, size: int) -> None:
        slowest = collective_samples(ranks, op, size, samples=samples)
        if ranks.rank == 0:  # every rank has the same
            taken["collective", op, ranks.world, size] = slowest

    return taken, _together(ranks, itertools.product(OPS, sizes), measure)


def _disk(folder: Path, size_bytes: int, limit_s: float) -> tuple[Samples, float]:
    samples = 6 if limit_s > 0 else 2
    reads, writes = disk_rates(folder, size_bytes=size_bytes, samples=samples)
    return {("disk", "read"): reads, ("disk", "write"): writes}, 0.0
