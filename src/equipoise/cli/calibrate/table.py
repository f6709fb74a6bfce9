"""Tables of ``equipoise calibrate``: what was measured, and a run beside it."""

from pathlib import Path
from typing import Any

from rich import box

from equipoise.base.units import format_bytes, format_seconds
from equipoise.cli.console import make_console
from equipoise.cli.table import Column, print_columns
from equipoise.cost.compare import CurveComparison
from equipoise.spec.device.cuda import cuda_tiers
from equipoise.spec.device.file import BUSY_CORES, DeviceFile
from equipoise.spec.device.parts import Measured
from equipoise.spec.device.spec import THIS_CPU


def file_rows(device: DeviceFile) -> dict[str, Any]:
    """A device file's summary, as data; the file itself holds every point."""

    def row(each: Measured) -> dict[str, float]:
        return {"median": each.mid, "low": each.low, "high": each.high}

    return {
        "machine": device.machine,
        "seconds": device.seconds,
        "other_load_cores": device.other_load_cores,
        "thin_points": device.thin_points,
        "left": list(device.left),
        "peak_flop_per_s": dict(device.peaks),
        "stream_bytes_per_s": {
            name: row(getattr(device.stream, name)) for name in ("copy", "scale", "add", "triad")
        },
        "disk_read_bytes_per_s": row(device.disk_read_bytes_per_s),
        "disk_write_bytes_per_s": row(device.disk_write_bytes_per_s),
        **({} if device.cuda is None else {"devices": device.cuda.devices}),
        "points": {
            "gemm": len(device.gemm),
            "attention": len(device.attention),
            "collectives": len(device.collectives),
        },
        "parts": [
            {
                "model": parts.title,
                "dtype": parts.dtype,
                "ranks": parts.ranks,
                "most_tokens": parts.most_tokens,
                "ways": [way.way for way in parts.ways],
            }
            for parts in device.parts
        ],
    }


def print_file(device: DeviceFile, file: Path) -> None:
    """The curves at a few sizes, each with its interval."""
    console = make_console()
    units = "every core" if device.cuda is None else f"{device.cuda.devices} devices"
    console.print(
        f"{device.machine}: measured in {device.seconds:.0f} s on {units} at once, with "
        f"{device.other_load_cores:.1f} cores of other load"
    )
    if device.other_load_cores > BUSY_CORES:
        console.print(
            "Something else kept cores busy, so these figures are too slow by as much. Measure "
            "again on a quiet machine."
        )
    if device.thin_points:
        console.print(
            f"Time ran out at {device.thin_points} points: they have fewer than six samples, and "
            f"their intervals hold less than 95%."
        )
    if device.left:
        console.print(
            f"Two minutes were not enough for {len(device.left)} more: {', '.join(device.left)}. "
            f"The same command goes on with them; forecasts say what they lack."
        )
    columns = (
        Column("what", is_left=True),
        Column("size", is_left=True, wraps=12),
        Column("median"),
        Column("95% interval", goes=1),
    )
    rows = [*_gemm_rows(device), *_attention_rows(device), *_byte_rows(device)]
    print_columns(console, columns, rows, box=box.SIMPLE_HEAD)
    console.print(
        f"{len(device.gemm)} products, {len(device.attention)} attentions and "
        f"{len(device.collectives)} collectives are in {file}"
    )
    for parts in device.parts:
        console.print(
            f"Parts of a step of the model of {parts.title}, {parts.dtype}, micro-batches up to "
            f"{parts.most_tokens:,} tokens on {parts.ranks} ranks: "
            f"{', '.join(way.way for way in parts.ways)}"
        )


def _rate(each: Measured, flop: float) -> tuple[str, str]:
    """A time as a rate; the slowest time is the lowest rate."""
    low, high = flop / each.high / 1e9, flop / each.low / 1e9
    return f"{flop / each.mid / 1e9:.1f} GFLOP/s", f"{low:.1f} to {high:.1f}"


def _gemm_rows(device: DeviceFile) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for dtype, _ in device.peaks:
        points = [point for point in device.gemm if point.dtype == dtype]
        by_flop = sorted(points, key=lambda point: point.m * point.n * point.k)
        for point in (by_flop[0], by_flop[len(by_flop) // 2], by_flop[-1]):
            flop = 2.0 * point.m * point.n * point.k
            size = f"{point.m:,} x {point.k:,} x {point.n:,}"
            rows.append((f"product, {dtype}", size, *_rate(point.s, flop)))
    return rows


def _attention_rows(device: DeviceFile) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for dtype, _ in device.peaks:
        points = [point for point in device.attention if point.dtype == dtype]
        if not points:  # fp8 is for products
            continue
        for point in (points[0], points[len(points) // 2], points[-1]):
            flop = 4.0 * point.head_width * point.tokens * (point.tokens + 1) / 2
            size = f"{point.tokens:,} tokens, a head of {point.head_width}"
            if point.units is not None:
                flop *= point.units
                size = f"{point.tokens:,} tokens, {point.units:,} heads of {point.head_width}"
            rows.append((f"attention, {dtype}", size, *_rate(point.forward_s, flop)))
    return rows


def _byte_rows(device: DeviceFile) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        (f"memory, {name}", "", *_bytes(getattr(device.stream, name)))
        for name in ("copy", "scale", "add", "triad")
    ]
    for point in device.collectives:
        if point.op in ("all_reduce", "all_gather") and point.ranks == 2:
            s = point.s
            between = f"{format_seconds(s.low)} to {format_seconds(s.high)}"
            size = format_bytes(point.bytes)
            rows.append((f"{point.op}, 2 ranks", size, format_seconds(s.mid), between))
    if device.cuda is not None:
        rows.append(("memory, from the host", "", *_bytes(device.cuda.host_bytes_per_s)))
        rows += [
            (f"a pair of {tier.devices}", "", f"{tier.bytes_per_s / 1e9:.2f} GB/s", "")
            for tier in cuda_tiers(device.cuda)
        ]
    rows.append(("disk, read", "", *_bytes(device.disk_read_bytes_per_s)))
    rows.append(("disk, write", "", *_bytes(device.disk_write_bytes_per_s)))
    return rows


def _bytes(each: Measured) -> tuple[str, str]:
    return f"{each.mid / 1e9:.2f} GB/s", f"{each.low / 1e9:.2f} to {each.high / 1e9:.2f}"


def print_comparison(
    comparison: CurveComparison, run: Path, file: Path, *, is_fitted: bool, name: str = THIS_CPU
) -> None:
    """Print predicted beside measured seconds, and the curve to doubt; ``name`` is the device's."""
    console = make_console()
    console.print(f"{run}: {comparison.steps} steps on {comparison.ranks} ranks, beside {file}")
    columns = (
        Column("of a step's slowest rank", is_left=True, wraps=16),
        Column("predicted"),
        Column("measured"),
        Column("ratio"),
        Column("95% interval", goes=1),
    )
    rows = [
        (
            f"  {each.name}, fitted",
            format_seconds(each.predicted_s),
            format_seconds(each.predicted_s * each.factor),
            f"{each.factor:.2f}",
            f"{each.low:.2f} to {each.high:.2f}",
        )
        for each in comparison.curves
    ]
    for name, predicted_s, measured_s in (
        ("forward and backward", comparison.compute_predicted_s, comparison.compute_measured_s),
        ("optimizer", comparison.optimizer_predicted_s, comparison.optimizer_measured_s),
    ):
        ratio = f"{measured_s / predicted_s:.2f}"
        cells = format_seconds(predicted_s), format_seconds(measured_s), ratio
        rows.append((name, *cells, ""))
    print_columns(console, columns, rows, box=box.SIMPLE_HEAD)
    console.print(f"A step's computing was predicted to within {comparison.mape:.1%} on average.")
    if not comparison.is_told_apart:
        console.print(
            "Products and moves rise together in this run, so they share what either is off."
        )
    wrong = comparison.wrong
    if wrong is None:
        console.print("No curve is further off than a tenth beyond doubt.")
    else:
        console.print(
            f"The curve of {wrong.name} is wrong: this run took {wrong.factor:.2f} times what it "
            f"predicts ({wrong.low:.2f} to {wrong.high:.2f})."
        )
    if is_fitted:
        console.print(f"The factors are kept in {file}; {name} is priced with them from now on.")
