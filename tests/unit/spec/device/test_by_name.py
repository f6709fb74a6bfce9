"""Devices: every number has a source, wider types are slower, wrong names are told."""

import dataclasses
import re
from pathlib import Path

import pytest

from equipoise.base.errors import SpecError
from equipoise.spec.device.by_name import DEVICES, DTYPE_BYTES, find_device
from equipoise.spec.device.here import cpu_model, this_cpu
from equipoise.spec.device.spec import DeviceSpec
from support.device_files import A_FILE, written

NAMES = {
    "like",
    "name",
    "title",
    "sources",
    "disk_read_bytes_per_s",
    "disk_write_bytes_per_s",
    "curve_file",
}


@pytest.mark.parametrize("name", [*DEVICES, "this-cpu"])
def test_every_number_has_a_source(name: str) -> None:
    device = find_device(name)
    fields = {field.name for field in dataclasses.fields(DeviceSpec)} - NAMES
    assert {key for key, _ in device.sources} == fields
    assert all(source for _, source in device.sources)


@pytest.mark.parametrize("device", DEVICES.values(), ids=list(DEVICES))
def test_narrower_types_are_as_fast_or_faster_and_memory_is_left(device: DeviceSpec) -> None:
    order = sorted(device.dtypes, key=lambda dtype: DTYPE_BYTES[dtype])
    peaks = [device.peak_flop_per_s(dtype) for dtype in order if dtype != "fp32"]
    assert peaks == sorted(peaks, reverse=True)
    assert device.peak_flop_per_s("fp32") <= min(peaks)
    assert 0.9 * device.memory_bytes < device.usable_bytes < device.memory_bytes
    assert 0 < device.idle_power_w < device.power_w
    assert device.usd_per_hour is None or device.usd_per_hour > 0


def test_aliases_and_case() -> None:
    assert find_device("H100") is DEVICES["h100-sxm"]
    assert find_device("V100").memory_bytes > DEVICES["v100-16"].memory_bytes


def test_a_wrong_name_is_told_its_nearest() -> None:
    names = ", ".join([*DEVICES, "this-cpu", "this-cuda"])
    message = f'There is no device "h1000". Nearest: h200. Known: {names}.'
    with pytest.raises(SpecError, match=f"^{re.escape(message)}$"):
        find_device("h1000")


def test_a_dtype_that_a_device_lacks_is_refused() -> None:
    message = (
        "a100-80 does not multiply fp8. Choose a precision among bf16, fp16, tf32, fp32, or "
        "another device."
    )
    with pytest.raises(SpecError, match=f"^{re.escape(message)}$"):
        find_device("a100-80").peak_flop_per_s("fp8")


def test_a_device_file_replaces_the_guess(tmp_path: Path) -> None:
    found = dataclasses.replace(A_FILE, machine=cpu_model())
    device = this_cpu(written(tmp_path, found))
    assert device.peak_flop_per_s("fp32") == 1e11
    assert device.memory_bytes_per_s == 12e9
    assert device.disk_write_bytes_per_s == 3e8
    assert dict(device.sources)["peaks"] == (
        "equipoise calibrate, 2026-01-02, 0.5 cores of other load"
    )
    assert dict(device.sources)["power_w"] == "a guess: 250 W over 32 cores"


def test_a_device_file_of_another_machine_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, dataclasses.replace(A_FILE, machine="Abacus, 3 cores"))
    message = (
        f'{file} was measured on "Abacus, 3 cores" but this is "{cpu_model()}". Measure this '
        'one: "equipoise calibrate".'
    )
    with pytest.raises(SpecError, match=f"^{re.escape(message)}$"):
        this_cpu(file)
