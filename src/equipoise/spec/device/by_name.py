"""Devices by name: those of the table, and those of this machine, a core or a CUDA device.

Kept true (tests/unit/spec/device/test_by_name.py)
    An unknown name gets its nearest.
"""

from pathlib import Path

from equipoise.base.errors import SpecError
from equipoise.base.nearest import nearest
from equipoise.spec.device.cuda import this_cuda
from equipoise.spec.device.driver import cuda_devices
from equipoise.spec.device.file import read_device_file
from equipoise.spec.device.here import this_cpu
from equipoise.spec.device.spec import DTYPE_BYTES, THIS_CPU, THIS_CUDA, DeviceSpec, Dtype
from equipoise.spec.device.table import DEVICES

__all__ = ["DEVICES", "DTYPE_BYTES", "THIS_CPU", "DeviceSpec", "Dtype", "find_device"]

OWN = (THIS_CPU, THIS_CUDA)
"""Names of this machine's own cores and devices."""

_ALIASES = {
    "h100": "h100-sxm",
    "h200-sxm": "h200",
    "a100": "a100-80",
    "v100": "v100-32",
    "mi250x-gcd": "mi250x",
    "b200-sxm": "b200",
    "h800-sxm": "h800",
}


def find_device(name: str) -> DeviceSpec:
    """The device with this name; ``this-cpu`` is the calibrated core, else a guess.

    Raises:
        SpecError: no such device; names the nearest. Or ``this-cuda`` where there is none, or none
            that was measured.

    >>> find_device("h100").memory_bytes_per_s
    3350000000000.0
    """
    word = name.casefold()
    if word == THIS_CPU:
        return this_cpu()
    if word == THIS_CUDA:
        return this_cuda()
    known = DEVICES.get(_ALIASES.get(word, word))
    if known is None:
        names = [*DEVICES, *OWN]
        raise SpecError(
            f'There is no device "{name}". Nearest: {nearest(word, names)}. '
            f"Known: {', '.join(names)}."
        )
    return known


def is_device(name: str) -> bool:
    """Whether a device has this name, of the table or of this machine.

    >>> is_device("H100"), is_device("this-cuda"), is_device("h1000")
    (True, True, False)
    """
    word = name.casefold()
    return word in OWN or _ALIASES.get(word, word) in DEVICES


def own_name() -> str:
    """What ranks started here compute on: this machine's CUDA devices, or cores if it has none."""
    return THIS_CUDA if cuda_devices() else THIS_CPU


def own_device(file: Path) -> DeviceSpec:
    """The core or the CUDA device of this machine that a device file was measured on.

    Raises:
        SpecError: the file is not a device file, of another form, or of another machine.
    """
    return this_cpu(file) if read_device_file(file).cuda is None else this_cuda(file)
