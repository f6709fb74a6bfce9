"""Devices by name: those of the table, and ``this-cpu``, a core of this machine.

Kept true (tests/unit/spec/device/test_by_name.py)
    An unknown name gets its nearest.
"""

from equipoise.base.errors import SpecError
from equipoise.base.nearest import nearest
from equipoise.spec.device.here import this_cpu
from equipoise.spec.device.spec import DTYPE_BYTES, THIS_CPU, DeviceSpec, Dtype
from equipoise.spec.device.table import DEVICES

__all__ = ["DEVICES", "DTYPE_BYTES", "THIS_CPU", "DeviceSpec", "Dtype", "find_device"]

_ALIASES = {
    "h100": "h100-sxm",
    "h200-sxm": "h200",
    "a100": "a100-80",
    "v100": "v100-32",
    "mi250x-gcd": "mi250x",
}


def find_device(name: str) -> DeviceSpec:
    """The device with this name; ``this-cpu`` is the calibrated core, else a guess.

    Raises:
        SpecError: no such device; names the nearest.

    >>> find_device("h100").memory_bytes_per_s
    3350000000000.0
    """
    word = name.casefold()
    if word == THIS_CPU:
        return this_cpu()
    known = DEVICES.get(_ALIASES.get(word, word))
    if known is None:
        names = [*DEVICES, THIS_CPU]
        raise SpecError(
            f'There is no device "{name}". Nearest: {nearest(word, names)}. '
            f"Known: {', '.join(names)}."
        )
    return known
