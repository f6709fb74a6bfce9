"""Measure the CUDA devices of this machine for ``equipoise calibrate``, stage by stage.

What it decides
    One rank a device, all at once, over NCCL. Kernels of one dtype are one stage, as starting
    ranks on devices takes seconds. Collectives run on the first two, four, ... devices and on all;
    one message between every two of them tells links of several kinds apart. The host's memory is
    measured on its cores, and the disk as for cores.

Kept true (tests/multi/plan/test_calibrate_devices.py, tests/gpu/test_calibrate.py)
    Ranks on a CPU whose queue stands in for a device's give a whole device file; a device's own
    file predicts micro-batches that it did not measure.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from equipoise.cost.curves.interval import median_interval
from equipoise.observe.machine import usable_cores
from equipoise.spec.device.driver import CudaDevice, power_limit_w
from equipoise.spec.device.file import CudaFacts, DeviceFile, PairPoint
from equipoise.spec.device.here import memory_share_bytes
from equipoise.train.calibrate.measure import (
    MeasureProgress,
    Stage,
    measure_disk,
    powers_of_two,
    take_all,
)
from equipoise.train.calibrate.plan import CalibrationPlan
from equipoise.train.calibrate.ranks import (
    Samples,
    Target,
    measure_collectives,
    measure_kernels,
    measure_memory,
    measure_pairs,
    measure_stream,
)

_MOST_CORES = 64
"""Cores that measure the host's memory at once, at most: fewer fill it."""

_HOST_ELEMENTS = 12 << 20
"""Three arrays of 96 MiB a core."""


def measure_devices(
    plan: CalibrationPlan,
    devices: tuple[CudaDevice, ...],
    folder: Path,
    progress: MeasureProgress,
    *,
    target: Target | None = None,
    power_w: Callable[[str], float | None] = power_limit_w,
) -> DeviceFile:
    """Measure every CUDA device of this machine, all of one product.

    Args:
        plan: Which sizes.
        devices: As the driver reports them.
        folder: On the disk to measure.
        progress: Shows every stage.
        target: What ranks measure; the devices unless something stands in for them.
        power_w: The driver's limit of a product's boards.

    Cost: not measured on a device yet; the plan's ``limit_s`` and some seconds for each stage.
    """
    memory_bytes = min(each.memory_bytes for each in devices)
    target, plan = target or Target.cuda(len(devices)), plan.within(memory_bytes)
    cores = min(len(usable_cores()), _MOST_CORES)
    session = take_all(plan, list(_stages(plan, target, cores, folder)), progress)
    facts = CudaFacts(
        devices=target.ranks,
        reserved_bytes=int(max(session.taken[("reserved",)])),
        host_memory_bytes=memory_share_bytes(target.ranks),
        host_bytes_per_s=median_interval(session.taken[("host copy",)]),
        host_stream=session.stream("host"),
        host_cores=cores,
        pairs=tuple(_pairs(session.taken, target.ranks)),
        power_limit_w=power_w(devices[0].title),
    )
    return session.file(devices[0].title, memory_bytes, facts)


def _stages(
    plan: CalibrationPlan, target: Target, cores: int, folder: Path
) -> Iterator[tuple[float, Stage]]:
    """All that is to be done, each stage with its share of the time."""
    for dtype in plan.dtypes:
        products = [size for k in plan.widths for size in plan.products(dtype, k)]
        widths = () if dtype == "fp8" else plan.head_widths  # attention is in bf16 then
        calls = [size for width in widths for size in plan.attentions(dtype, width)]
        weight = 10.0 + (10.0 if calls else 0.0)
        yield weight, partial(target.take, measure_kernels, (dtype, products, calls))
    yield 3.0, partial(target.take, measure_memory, plan.stream_elements)
    for count in sorted({*powers_of_two(target.ranks), target.ranks} - {1}):
        work = measure_collectives, plan.collective_bytes
        yield 10.0, partial(target.first(count).take, *work)
    if target.ranks > 1:
        sizes = plan.collective_bytes[0], plan.collective_bytes[-1]
        yield 10.0, partial(target.take, measure_pairs, sizes)
    elements = min(_HOST_ELEMENTS, plan.stream_elements)
    yield 2.0, partial(_host_stream, Target.cores(cores), elements)
    yield 1.0, partial(measure_disk, folder, plan.disk_bytes)


def _host_stream(cores: Target, elements: int, limit_s: float) -> tuple[Samples, float]:
    taken, spent_s = cores.take(measure_stream, elements, limit_s)
    return {("host", name): rates for (_, name), rates in taken.items()}, spent_s


def _pairs(taken: Samples, devices: int) -> Iterator[PairPoint]:
    """The slowest pair of every smallest block that holds it, sample by sample."""
    slowest: dict[tuple[int, int], list[list[float]]] = defaultdict(list)
    for place, values in taken.items():
        if place[0] == "pair":
            _, one, other, size = place
            slowest[block_of(one, other, devices), size].append(values)
    for (block, size), rows in sorted(slowest.items()):
        worst = [max(each) for each in zip(*rows, strict=True)]
        yield PairPoint(block, size, median_interval(worst))


def block_of(one: int, other: int, devices: int) -> int:
    """The smallest block with both devices: of 2, 4, ... that divide all of them, or all.

    >>> [block_of(0, other, 8) for other in range(1, 8)], block_of(2, 3, 6), block_of(1, 2, 6)
    ([2, 4, 4, 8, 8, 8, 8], 2, 6)
    """
    blocks = [size for size in powers_of_two(devices) if devices % size == 0]
    return next((size for size in blocks if one // size == other // size), devices)
