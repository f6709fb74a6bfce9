"""Devices: what each computes, holds and moves at most, what it draws and what it costs.

Why
    A prediction is as good as the machine it is made for. Every number of the table stands
    beside its source, and two cards that share a name but not a power limit or a memory are
    two devices.

What it decides
    Peaks are of dense matrices. Bytes per second are of one direction. A *device* is what one
    rank computes on: a GPU, one of the two dies of an MI250X, one core of ``this-cpu``. Memory
    is what the driver reports, and ``usable_bytes`` leaves out what the driver's context and
    the communication library hold before the first tensor.

Kept true (tests/unit/spec/device/test_by_name.py)
    Every number of every device has a source; wider types are never faster than narrower
    ones; a wrong name is told its nearest.

Sources
    Datasheets, as each device's ``sources`` say. Prices: on-demand lists, which change.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from equipoise.base.errors import SpecError

Dtype = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]

DTYPE_BYTES: dict[Dtype, int] = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}

THIS_CPU = "this-cpu"


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One device."""

    name: str
    title: str
    peaks: tuple[tuple[Dtype, float], ...]
    """Dense matrix peak of each dtype [FLOP/s]."""
    memory_bytes: int
    """Of the device, as its driver reports."""
    reserved_bytes: int
    """Held before the first tensor: the driver's context and communication buffers."""
    memory_bytes_per_s: float
    host_memory_bytes: int
    """Of the host, this device's share."""
    host_bytes_per_s: float
    """Between device and host, one direction."""
    host_memory_bytes_per_s: float
    """Of the host's memory at its peak, this device's share."""
    power_w: float
    """The most that the board draws."""
    idle_power_w: float
    host_power_w: float
    """This device's share of what the rest of its host draws."""
    usd_per_hour: float | None
    """Rent, where a public price is known."""
    sources: tuple[tuple[str, str], ...]
    """Where each group of numbers comes from."""
    disk_read_bytes_per_s: float | None = None
    disk_write_bytes_per_s: float | None = None
    curve_file: Path | None = None
    """Device file that holds its measured curves; None for those that are shipped."""

    @property
    def usable_bytes(self) -> int:
        """Memory that tensors may fill."""
        return self.memory_bytes - self.reserved_bytes

    @property
    def dtypes(self) -> tuple[Dtype, ...]:
        """Dtypes that this device multiplies."""
        return tuple(dtype for dtype, _ in self.peaks)

    def peak_flop_per_s(self, dtype: Dtype) -> float:
        """Dense matrix peak [FLOP/s].

        Raises:
            SpecError: the device has no such dtype; says which it has.

        >>> from equipoise.spec.device.by_name import find_device
        >>> find_device("a100-80").peak_flop_per_s("bf16") / 1e12
        312.0
        """
        for known, peak in self.peaks:
            if known == dtype:
                return peak
        raise SpecError(
            f"{self.name} does not multiply {dtype}. Choose a precision among "
            f"{', '.join(self.dtypes)}, or another device."
        )
