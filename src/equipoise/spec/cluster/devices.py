"""Devices that a cluster.toml declares.

Why
    A table of devices is never whole: an accelerator of one's own has a datasheet, and no measured
    kernels.

What it decides
    What the file leaves out of a device is that of a shipped one, ``like``, and its measured
    kernels stand in, at the same share of the roofline.

Kept true (tests/unit/spec/cluster/test_file.py)
    Each number has its source; a device without 16-bit products, or under a shipped name, is
    refused.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated, get_args

from pydantic import BaseModel, ConfigDict, Field

from equipoise.base.nearest import nearest
from equipoise.base.units import GIB
from equipoise.spec.device.by_name import DEVICES, DeviceSpec, Dtype, is_device
from equipoise.spec.run.load import TomlPath

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
LEAST, MOST = 1e-9, 1e12
"""Rates, powers and prices beyond these are slips, and their seconds would be infinite."""
Positive = Annotated[float, Field(ge=LEAST, le=MOST)]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)


class GivenPeaks(BaseModel):
    """Dense peaks [TFLOP/s]."""

    model_config = STRICT
    fp8: Positive | None = None
    bf16: Positive | None = None
    fp16: Positive | None = None
    tf32: Positive | None = None
    fp32: Positive | None = None


class GivenDevice(BaseModel):
    """A table of ``[devices]``."""

    model_config = STRICT
    like: str
    source: Annotated[str, Field(min_length=1)]
    tflops: GivenPeaks
    memory_gib: Annotated[float, Field(ge=1, le=1e6)]
    memory_gbyte_per_s: Positive
    power_w: Positive | None = None
    usd_per_hour: Positive | None = None


def own_device(
    name: str, given: GivenDevice, add: Callable[[TomlPath, str], None]
) -> DeviceSpec | None:
    """A device of the file; what it leaves out is another's, whose measured kernels stand in.

    Args:
        name: Its own.
        given: Its table.
        add: Reports a fault; then there is no device.
    """
    at: TomlPath = ("devices", name)
    if is_device(name):
        add(at, f'"{name}" is a device already. Give this one another name.')
        return None
    base = DEVICES.get(given.like)
    if base is None:
        meant = nearest(given.like, DEVICES)
        add((*at, "like"), f'there is no device "{given.like}". Nearest: {meant}')
        return None
    peaks = tuple(
        (dtype, rate * 1e12)
        for dtype in reversed(DTYPES)
        if (rate := getattr(given.tflops, dtype)) is not None
    )
    if not {"bf16", "fp16"} & {dtype for dtype, _ in peaks}:
        add((*at, "tflops"), "has neither bf16 nor fp16, in which attention is computed. Give one.")
        return None
    own = {"peaks", "memory_bytes", "memory_bytes_per_s", "usd_per_hour"}
    own |= {"power_w"} if given.power_w is not None else set()
    power_w = base.power_w if given.power_w is None else given.power_w
    return dataclasses.replace(
        base,
        name=name,
        title=name,
        peaks=peaks,
        memory_bytes=int(given.memory_gib * GIB),
        memory_bytes_per_s=given.memory_gbyte_per_s * 1e9,
        power_w=power_w,
        idle_power_w=base.idle_power_w * power_w / base.power_w,
        usd_per_hour=given.usd_per_hour,
        sources=tuple(
            (key, f"the cluster file: {given.source}" if key in own else f"as {base.name}: {value}")
            for key, value in base.sources
        ),
        like=base.name,
    )
