"""A device file as a picture: rates over sizes, each with its 95% interval."""

from pathlib import Path
from typing import Any

from equipoise.spec.device.file import DeviceFile
from equipoise.spec.device.parts import Measured

_COLORS = ("#2f6690", "#c8553d", "#6a994e", "#8d6a9f", "#d9a441", "#5b6770")
_INK, _PALE = "#1d2733", "#e7ebef"


def plot_device_file(file: Path, device: DeviceFile) -> None:
    """Draw products, attention, memory and collectives, narrow enough for a phone.

    Args:
        file: Where to; the ending says whether PNG, SVG or PDF.
        device: What was measured.
    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(4, 1, figsize=(5.4, 11), layout="constrained")
    for axis, draw in zip(axes, (_products, _attention, _memory, _collectives), strict=True):
        draw(axis, device)
        axis.grid(color=_PALE)
        axis.set_axisbelow(True)
        axis.tick_params(which="both", length=0, labelsize=9, colors=_INK)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
    figure.suptitle(
        f"{device.machine}, {device.date}\n"
        f"one rank a {'core' if device.cuda is None else 'device'}, all at once; "
        f"{device.other_load_cores:.1f} cores of other load",
        fontsize=10,
        x=0.01,
        ha="left",
        color=_INK,
    )
    figure.align_ylabels(axes)
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def _title(axis: Any, title: str, x: str, y: str) -> None:
    axis.set_title(title, fontsize=10, loc="left", color=_INK)
    axis.set_xlabel(x, fontsize=9, color=_INK)
    axis.set_ylabel(y, fontsize=9, color=_INK)


def _bars(axis: Any, x: list[float], rates: list[Measured], label: str, color: str) -> None:
    middle = [each.mid for each in rates]
    spread = (
        [each.mid - each.low for each in rates],
        [each.high - each.mid for each in rates],
    )
    axis.errorbar(x, middle, spread, fmt="o", markersize=3, linewidth=0.8, label=label, color=color)


def _rate(time: Measured, amount: float) -> Measured:
    return Measured(amount / time.mid / 1e9, amount / time.high / 1e9, amount / time.low / 1e9)


def _products(axis: Any, device: DeviceFile) -> None:
    for (dtype, _), color in zip(device.peaks, _COLORS, strict=False):
        points = [point for point in device.gemm if point.dtype == dtype]
        flop = [2.0 * point.m * point.n * point.k for point in points]
        rates = [_rate(point.s, each) for point, each in zip(points, flop, strict=True)]
        _bars(axis, flop, rates, dtype, color)
    axis.set_xscale("log")
    axis.set_ylim(bottom=0)
    _title(axis, "products", "FLOP of one", "GFLOP/s")
    axis.legend(frameon=False, fontsize=9)


def _attention(axis: Any, device: DeviceFile) -> None:
    kinds = sorted({(point.dtype, point.head_width) for point in device.attention})
    for (dtype, width), color in zip(kinds, _COLORS, strict=False):
        points = [p for p in device.attention if (p.dtype, p.head_width) == (dtype, width)]
        flop = [2.0 * width * p.tokens * (p.tokens + 1) * (p.units or 1) for p in points]
        rates = [_rate(p.forward_s, each) for p, each in zip(points, flop, strict=True)]
        _bars(axis, [float(p.tokens) for p in points], rates, f"{dtype}, {width} wide", color)
    axis.set_xscale("log", base=2)
    axis.set_ylim(bottom=0)
    _title(axis, "attention, forward", "tokens of a document", "GFLOP/s")
    axis.legend(frameon=False, fontsize=9)


def _memory(axis: Any, device: DeviceFile) -> None:
    rows = {
        "copy": device.stream.copy,
        "scale": device.stream.scale,
        "add": device.stream.add,
        "triad": device.stream.triad,
        "disk, read": device.disk_read_bytes_per_s,
        "disk, write": device.disk_write_bytes_per_s,
    }
    names = list(rows)
    rates = [each.mid / 1e9 for each in rows.values()]
    spread = (
        [(each.mid - each.low) / 1e9 for each in rows.values()],
        [(each.high - each.mid) / 1e9 for each in rows.values()],
    )
    axis.bar(names, rates, 0.6, yerr=spread, color=_COLORS[0], ecolor=_INK)
    _title(axis, "memory (STREAM) and disk", "", "GB/s")


def _collectives(axis: Any, device: DeviceFile) -> None:
    ranks = min((point.ranks for point in device.collectives), default=1)
    ops = list(dict.fromkeys(point.op for point in device.collectives))
    for op, color in zip(ops, _COLORS, strict=False):
        points = [p for p in device.collectives if (p.op, p.ranks) == (op, ranks)]
        rates = [_rate(point.s, float(point.bytes)) for point in points]
        _bars(axis, [float(point.bytes) for point in points], rates, op, color)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    _title(axis, f"collectives on {ranks} ranks", "bytes of the whole tensor", "GB/s")
    if ops:
        axis.legend(frameon=False, fontsize=9)
