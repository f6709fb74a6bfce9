"""What a CUDA driver shows: names and bytes, and nothing where it fails or torch cannot use it."""

import ctypes
from pathlib import Path

import pytest

from equipoise.spec.device.driver import CudaDevice, power_limit_w, read_driver, torch_cuda

Out = ctypes.c_void_p


class Driver:
    """A driver's library: real C calls, answered in Python."""

    def __init__(self, titles: list[str], init: int = 0) -> None:
        self._titles = [title.encode() for title in titles]
        integer = ctypes.c_int
        self.cuInit = ctypes.CFUNCTYPE(integer, ctypes.c_uint)(lambda flags: init)
        self.cuDriverGetVersion = ctypes.CFUNCTYPE(integer, Out)(self._version)
        self.cuDeviceGetCount = ctypes.CFUNCTYPE(integer, Out)(self._count)
        self.cuDeviceGet = ctypes.CFUNCTYPE(integer, Out, integer)(self._get)
        self.cuDeviceGetName = ctypes.CFUNCTYPE(integer, Out, integer, integer)(self._name)
        self.cuDeviceTotalMem_v2 = ctypes.CFUNCTYPE(integer, Out, integer)(self._bytes)

    def _version(self, out: int) -> int:
        ctypes.c_int.from_address(out).value = 13_020
        return 0

    def _count(self, out: int) -> int:
        ctypes.c_int.from_address(out).value = len(self._titles)
        return 0

    def _get(self, out: int, ordinal: int) -> int:
        ctypes.c_int.from_address(out).value = 10 + ordinal  # a handle is no ordinal
        return 0

    def _name(self, out: int, size: int, device: int) -> int:
        text = self._titles[device - 10] + b"\0"
        ctypes.memmove(out, text[:size], min(size, len(text)))
        return 0

    def _bytes(self, out: int, device: int) -> int:
        ctypes.c_size_t.from_address(out).value = (device - 9) << 33
        return 0


def test_names_and_bytes_are_the_drivers() -> None:
    assert read_driver(Driver(["NVIDIA H200", "NVIDIA T4"])) == (
        CudaDevice("NVIDIA H200", 8 << 30),
        CudaDevice("NVIDIA T4", 16 << 30),
    )
    assert read_driver(Driver([])) == ()


def test_a_driver_that_fails_shows_no_device() -> None:
    assert read_driver(Driver(["NVIDIA H200"], init=100)) == ()
    lost = Driver(["NVIDIA H200"])
    lost.cuDeviceTotalMem_v2 = ctypes.CFUNCTYPE(ctypes.c_int, Out, ctypes.c_int)(lambda *_: 1)
    assert read_driver(lost) == ()


@pytest.mark.parametrize(
    ("line", "major"),
    [
        ("cuda: Optional[str] = '13.0'", 13),
        ("cuda = '12.6'", 12),
        ("cuda: Optional[str] = None", None),
        ("hip: Optional[str] = '7.0'", None),
    ],
)
def test_torchs_own_words_say_which_cuda_it_needs(
    line: str, major: int | None, tmp_path: Path
) -> None:
    file = tmp_path / "version.py"
    file.write_text(f"__all__ = ['cuda']\ndebug = False\n{line}\n")
    assert torch_cuda(file) == major
    assert torch_cuda(None) == 0
    assert torch_cuda(tmp_path / "none.py") is None


def test_a_driver_older_than_torchs_cuda_shows_no_device() -> None:
    driver = Driver(["NVIDIA H200"])
    assert len(read_driver(driver, 13)) == 1
    assert read_driver(driver, 14) == ()


def test_the_lowest_limit_of_a_product_is_its_power(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\nprintf 'NVIDIA H200, 700.00\\nNVIDIA H200, 650.50\\nNVIDIA T4, [N/A]\\n'\n"
    )
    program.chmod(0o755)
    assert power_limit_w("NVIDIA H200", str(program)) == 650.5
    assert power_limit_w("NVIDIA T4", str(program)) is None
    assert power_limit_w("NVIDIA H200", str(tmp_path / "none")) is None
