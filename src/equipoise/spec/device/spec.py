"""Devices: peak compute, memory and bandwidth, power and price.

Why
    A prediction is as good as its machine's numbers. Every number has its source, and two cards
    that share a name but not a power limit or a memory are two devices.

What it decides
    Peaks are for dense matrices, bytes per second for one direction. A *device* is what one rank
    computes on: a GPU, one of the two dies of an MI250X, one core of ``this-cpu``, one CUDA device
    of ``this-cuda``. Memory is what the driver reports, and ``usable_bytes`` excludes what the
    driver's context and the communication library hold before the first tensor.

Kept true (tests/unit/spec/device/test_by_name.py)
    Every number of every device has a source; wider types are never faster than narrower ones;
    an unknown name gets its nearest.

Sources
    Datasheets, given in each device's ``sources``. Prices: on-demand lists, which change.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from equipoise.base.errors import SpecError

Dtype = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]

DTYPE_BYTES: dict[Dtype, int] = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}

THIS_CPU = "this-cpu"
THIS_CUDA = "this-cuda"


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One device."""

    name: str
    title: str
    peaks: tuple[tuple[Dtype, float], ...]
    """Dense matrix peak of each dtype [FLOP/s]."""
    memory_bytes: int
    """Device memory, as the driver reports it."""
    reserved_bytes: int
    """Held before the first tensor: the driver's context and communication buffers."""
    memory_bytes_per_s: float
    host_memory_bytes: int
    """This device's share of host memory."""
    host_bytes_per_s: float
    """Rate between device and host, one direction."""
    host_memory_bytes_per_s: float
    """This device's share of the host memory's peak rate."""
    power_w: float
    """Maximum power of the board."""
    idle_power_w: float
    host_power_w: float
    """This device's share of the power of the rest of its host."""
    usd_per_hour: float | None
    """Rent, if a public price is known."""
    sources: tuple[tuple[str, str], ...]
    """Where each group of numbers comes from."""
    disk_read_bytes_per_s: float | None = None
    disk_write_bytes_per_s: float | None = None
    curve_file: Path | None = None
    """Device file with its measured curves; None for shipped devices."""
    like: str | None = None
    """The shipped device whose measured kernels stand in, for one that a cluster file declares."""

    @property
    def is_here(self) -> bool:
        """Whether it is a core or a device of this machine, not one of the table."""
        return self.name in (THIS_CPU, THIS_CUDA)

    @property
    def usable_bytes(self) -> int:
        """Memory that tensors may fill."""
        return self.memory_bytes - self.reserved_bytes

    @property
    def dtypes(self) -> tuple[Dtype, ...]:
        """Dtypes that this device multiplies."""
        return tuple(dtype for dtype, _ in self.peaks)

    def require_precision(self, precision: str) -> None:
        """Refuse a step's precision that this device has no products of.

        Raises:
            SpecError: lists those it has.
        """
        if precision == "fp8" and "fp8" not in self.dtypes:
            raise SpecError(
                f"{self.name} has no fp8; it multiplies {', '.join(self.dtypes)}. Give precision "
                f"bf16, which is computed in fp16 where there is no bf16, or fp32."
            )

    def peak_flop_per_s(self, dtype: Dtype) -> float:
        """Dense matrix peak [FLOP/s].

        Raises:
            SpecError: the device lacks this dtype; lists those it has.

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
