"""The measured curve for a device or a link: shipped, this machine's, or none.

Why
    A curve measured on another device still beats a formula, as long as the price names it.
    Prices ask here, and get the device that the answer was measured on.

What it decides
    Which device's curves stand in for an unmeasured one. A device file of ``equipoise calibrate``
    is read once, until it changes.

Kept true (tests/unit/cost/test_kernel.py, tests/unit/cost/test_link.py)
    Every device and link of the tables has a curve, or says that it has none.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from equipoise.base.errors import SpecError
from equipoise.cost.curves.collectives import CollectiveCurve, curve_of_rows, nccl_rows
from equipoise.cost.curves.grid import LogGrid, read_table
from equipoise.cost.curves.kernels import AttentionCurve, attention_curve, decode_grid, gemm_grid
from equipoise.spec.cluster.link import LINKS, LinkSpec
from equipoise.spec.device.cuda import cuda_tiers
from equipoise.spec.device.file import DeviceFile, read_device_file
from equipoise.spec.device.parts import ModelParts
from equipoise.spec.device.spec import DeviceSpec, Dtype
from equipoise.spec.program.stack import Fp8

GEMM_TABLES = {
    "h100-sxm": "h100",
    "h200": "h200",
    "a100-80": "a100",
    "b200": "b200",
    "gb300": "gb300",
    "l40s": "l40s",
}
"""The shipped table of each device whose products were measured."""
ATTENTION_TABLES = {
    "h100-sxm": "h100",
    "a100-80": "a100",
    "b200": "b200",
    "gb300": "gb300",
    "l40s": "l40s",
}
"""The shipped table of each device whose attention was measured."""
LINK_OF = {"h100": "nvlink4", "a100": "nvlink3"}
"""The link that each shipped table of collectives was measured on."""

_STANDS_IN = {
    "h100-sxm-500w": "h100-sxm",
    "h200": "h100-sxm",
    "a100-40": "a100-80",
    "v100-32": "a100-80",
    "v100-16": "a100-80",
    "mi250x": "a100-80",
    "h800": "h100-sxm",
    "h20": "h100-sxm",
    "b300": "gb300",
    "gb200": "b200",
    "mi300x": "h100-sxm",
    "mi355x": "b200",
}
"""Devices with similar kernel efficiency: the same maker's next generation, or an equal peak."""


@dataclass(frozen=True, slots=True)
class _Here:
    """The curves of this machine."""

    gemm: dict[str, LogGrid]
    forward: dict[str, AttentionCurve]
    backward: dict[str, AttentionCurve]
    collectives: CollectiveCurve
    residuals: dict[str, float]
    parts: tuple[ModelParts, ...]


def collective_curve(link: LinkSpec) -> CollectiveCurve | None:
    """The measured curve of a link; None if there is none."""
    if link.curve is None:
        return None
    if link.curve not in LINK_OF:
        return _here(Path(link.curve)).collectives
    return _shipped_collectives(link.curve)


def gemm_curve(
    device: DeviceSpec, dtype: Dtype, scaled: Fp8 = "per-product"
) -> tuple[LogGrid, str, Dtype] | None:
    """A grid over m, n, k, with the device and dtype measured; None if no device is close.

    Dtypes of equal width are multiplied alike.
    """
    if device.is_here:
        if device.curve_file is None or dtype not in _here(device.curve_file).gemm:
            return None
        return _here(device.curve_file).gemm[dtype], device.name, dtype
    name = _measured_on(device, GEMM_TABLES)
    if name is None:
        return None
    grids = _shipped_gemm(GEMM_TABLES[name])
    known: Dtype = "fp8" if dtype == "fp8" and "fp8" in grids else "bf16"
    measured = _FP8_ROWS.get(scaled, known) if known == "fp8" else known
    return grids.get(measured, grids[known]), name, known


def attention_curves(
    device: DeviceSpec, dtype: Dtype
) -> tuple[AttentionCurve, AttentionCurve | None, str] | None:
    """Curves of forward and (if measured) backward, and the device; None if none is close."""
    if device.is_here:
        if device.curve_file is None or dtype not in _here(device.curve_file).forward:
            return None
        here = _here(device.curve_file)
        return here.forward[dtype], here.backward[dtype], device.name
    name = _measured_on(device, ATTENTION_TABLES)
    return None if name is None else (_shipped_attention(ATTENTION_TABLES[name]), None, name)


def decode_curve(device: DeviceSpec) -> tuple[LogGrid, str] | None:
    """A grid over sharing, cached tokens and units, with the device measured."""
    name = _measured_on(device, ATTENTION_TABLES)
    return None if name is None else (_shipped_decode(ATTENTION_TABLES[name]), name)


def _measured_on(device: DeviceSpec, tables: Mapping[str, str]) -> str | None:
    """The device whose table is read for this one; None if none is close."""
    name = device.like or device.name
    return name if name in tables else _STANDS_IN.get(name)


@functools.cache
def _shipped_collectives(name: str) -> CollectiveCurve:
    return curve_of_rows(nccl_rows(name), LINKS[LINK_OF[name]].bytes_per_s)


_FP8_ROWS: dict[Fp8, str] = {"per-tensor": "fp8-alone", "mx": "fp8-alone", "per-block": "fp8-block"}
"""What a shipped table calls products in FP8, by how they are scaled."""


@functools.cache
def _shipped_gemm(name: str) -> dict[str, LogGrid]:
    rows = (*read_table(f"gemm_{name}.csv"), *read_table(f"gemm_fp8_{name}.csv"))
    return {
        dtype: gemm_grid(
            (int(row["m"]), int(row["n"]), int(row["k"]), float(row["us"]) * 1e-6)
            for row in rows
            if row["dtype"] == dtype
        )
        for dtype in dict.fromkeys(row["dtype"] for row in rows)
    }


@functools.cache
def _shipped_attention(name: str) -> AttentionCurve:
    return attention_curve(
        (
            int(row["head_width"]),
            int(row["sharing"]),
            int(row["tokens"]),
            int(row["units"]),
            float(row["us"]) * 1e-6,
        )
        for row in read_table(f"attention_{name}.csv")
    )


@functools.cache
def _shipped_decode(name: str) -> LogGrid:
    return decode_grid(
        (int(row["sharing"]), int(row["tokens"]), int(row["units"]), float(row["us"]) * 1e-6)
        for row in read_table(f"decode_{name}.csv")
    )


def residual(device: DeviceSpec, curve: str) -> float:
    """Measured over predicted, as fitted by ``equipoise calibrate --fit``; 1 if never fitted."""
    if device.curve_file is None:
        return 1.0
    return _here(device.curve_file).residuals.get(curve, 1.0)


def model_parts(file: Path) -> tuple[ModelParts, ...]:
    """Parts of steps that were timed on the machine of a device file."""
    return _here(file).parts


def _here(path: Path) -> _Here:
    return _read_here(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _read_here(path: Path, _changed_ns: int) -> _Here:
    file = read_device_file(path)
    try:
        return _curves_of(file)
    except ValueError as error:  # of a grid with a hole
        raise SpecError(
            f'{path} is not a device file: {error}. Measure again: "equipoise calibrate".'
        ) from None


def _curves_of(file: DeviceFile) -> _Here:
    """The curves that a device file holds."""
    attention = {point.dtype for point in file.attention}
    return _Here(
        gemm={
            dtype: gemm_grid((p.m, p.n, p.k, p.s.mid) for p in file.gemm if p.dtype == dtype)
            for dtype in {point.dtype for point in file.gemm}
        },
        forward={dtype: _attention_here(file, dtype, False) for dtype in attention},
        backward={dtype: _attention_here(file, dtype, True) for dtype in attention},
        collectives=_collectives_here(file),
        residuals=dict(file.residuals),
        parts=file.parts,
    )


def _collectives_here(file: DeviceFile) -> CollectiveCurve:
    """Collectives over gloo; or of CUDA devices, over their innermost link alone."""
    rate, points = LINKS["gloo"].bytes_per_s, list(file.collectives)
    if file.cuda is not None and file.cuda.pairs:
        inner = cuda_tiers(file.cuda)[0]
        rate, points = inner.bytes_per_s, [p for p in points if p.ranks <= inner.devices]
    return curve_of_rows([(p.op, p.ranks, p.bytes, p.s.mid) for p in points], rate)


def _attention_here(file: DeviceFile, dtype: Dtype, is_backward: bool) -> AttentionCurve:
    return attention_curve(
        (
            p.head_width,
            p.sharing or 1,
            p.tokens,
            p.units,
            (p.backward_s if is_backward else p.forward_s).mid,
        )
        for p in file.attention
        if p.dtype == dtype
    )
