"""``this-cuda``: refused unless it was measured here; numbers and links are the file's."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from equipoise.base.errors import SpecError
from equipoise.spec.cluster.spec import find_cluster, own_cluster
from equipoise.spec.device.by_name import DEVICES, find_device
from equipoise.spec.device.cuda import cuda_file, cuda_tiers, shipped_device, this_cuda
from equipoise.spec.device.file import read_device_file, write_device_file
from equipoise.spec.device.here import calibrated_device, this_cpu
from support.device_files import A_FILE, written
from support.devices.machine import (
    PRODUCT,
    calibrated_machine,
    cuda_device_file,
    devices,
    facts,
    show_devices,
)


def refusal(*arguments: object) -> str:
    with pytest.raises(SpecError) as refused:
        this_cuda(*arguments)
    return str(refused.value)


def test_a_machine_without_devices_has_no_this_cuda() -> None:
    assert refusal(None, ()) == (
        "this-cuda names the CUDA devices of this machine, which has none that ranks would compute "
        f"on. Name a device of the table ({', '.join(DEVICES)}), or this-cpu."
    )


def test_devices_that_were_never_measured_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    message = (
        f"The CUDA devices of this machine (8 of {PRODUCT}) were never measured: {tmp_path}/.cache/"
        'equipoise/this-cuda-nvidia-h200.json is not there. Measure them: "equipoise calibrate".'
    )
    assert refusal(None, devices(8)) == message
    show_devices(monkeypatch, devices(8))
    with pytest.raises(SpecError, match=f"^{re.escape(message)}$"):
        find_cluster("this-cuda:8")


def test_devices_of_two_products_are_refused() -> None:
    assert refusal(None, devices(1) + devices(1, "NVIDIA T4")) == (
        f"This machine has CUDA devices of 2 products ({PRODUCT}, NVIDIA T4), and this-cuda is "
        "one. Show those of one product: CUDA_VISIBLE_DEVICES=0,1."
    )


def test_a_file_of_another_product_or_of_cores_is_refused(tmp_path: Path) -> None:
    for kind in (cuda_device_file(8), A_FILE):
        file = written(tmp_path, kind)
        assert refusal(file, devices(8, "NVIDIA T4")) == (
            f'{file} was measured on "{kind.machine}", but the CUDA devices of this machine are '
            '"NVIDIA T4". Measure these: "equipoise calibrate".'
        )
    with pytest.raises(SpecError, match=f'was measured on "{PRODUCT}" but this is'):
        this_cpu(written(tmp_path, cuda_device_file(8)))


def test_numbers_are_the_files_the_drivers_and_the_tables(tmp_path: Path) -> None:
    device = this_cuda(written(tmp_path, cuda_device_file(8)), devices(8))
    assert (device.name, device.title) == ("this-cuda", PRODUCT)
    assert device.dtypes == ("fp8", "bf16", "fp32")
    assert device.memory_bytes == 140 << 30
    assert device.usable_bytes == 139 << 30
    assert device.memory_bytes_per_s == 4e12
    assert device.host_memory_bytes_per_s == 20e9 * 16 / 8
    assert (device.power_w, device.idle_power_w) == (650.0, DEVICES["h200"].idle_power_w)
    assert device.usd_per_hour == DEVICES["h200"].usd_per_hour
    assert dict(device.sources).keys() == dict(DEVICES["h200"].sources).keys()
    assert all(source for _, source in device.sources)


def test_without_the_drivers_limit_power_is_the_tables_or_unknown(tmp_path: Path) -> None:
    for title, power_w in ((PRODUCT, 700), ("NVIDIA T4", 0)):
        known = cuda_device_file(2, title=title)
        known = dataclasses.replace(known, cuda=dataclasses.replace(facts(2), power_limit_w=None))
        device = calibrated_device(known, written(tmp_path, known))
        assert device.power_w == power_w
    said = dict(device.sources)
    assert said["power_w"] == "unknown: not in the table, and the driver names no limit"
    assert (device.usd_per_hour, said["usd_per_hour"]) == (None, "no public price")


def test_only_the_tables_own_products_are_in_it() -> None:
    assert shipped_device("NVIDIA H100 80GB HBM3") is DEVICES["h100-sxm"]
    assert shipped_device("Tesla V100-SXM2-16GB") is DEVICES["v100-16"]
    assert shipped_device("NVIDIA H200 NVL") is None
    assert cuda_file("NVIDIA H200").name == "this-cuda-nvidia-h200.json"


def test_links_of_two_kinds_are_two_tiers() -> None:
    (one,) = cuda_tiers(facts(8))
    assert (one.devices, round(one.bytes_per_s / 1e9)) == (8, 100)
    near, far = cuda_tiers(facts(8, near=2))
    assert (near.devices, far.devices) == (2, 8)
    assert far.bytes_per_s == pytest.approx(10e9)
    assert cuda_tiers(facts(1)) == ()
    assert [tier.devices for tier in cuda_tiers(facts(6, near=2))] == [2, 6]


def test_a_node_has_the_measured_links(tmp_path: Path) -> None:
    file = written(tmp_path, cuda_device_file(8, near=2))
    device = this_cuda(file, devices(8))
    tiers = own_cluster(device, 8).classes[0].tiers
    assert [(tier.devices, tier.link.curve) for tier in tiers] == [(2, str(file)), (8, None)]
    assert [tier.devices for tier in own_cluster(device, 2).classes[0].tiers] == [2]
    assert [tier.devices for tier in own_cluster(device, 1).classes[0].tiers] == [1]
    with pytest.raises(SpecError) as refused:
        own_cluster(device, 16)
    assert str(refused.value) == (
        "16 devices of this-cuda are more than the 8 that were measured here. Give 8 or fewer, or "
        'a cluster.toml of several nodes with device = "this-cuda" and the network card between '
        "them."
    )


def test_a_damaged_file_is_refused_by_name(tmp_path: Path) -> None:
    whole = cuda_device_file(2)
    for changes, said in (
        ({"devices": 0}, "cuda.0: 0 must be above 0"),
        ({"pairs": ()}, "cuda.pairs: there is not one point"),
    ):
        damaged = dataclasses.replace(whole, cuda=dataclasses.replace(facts(2), **changes))
        file = written(tmp_path, damaged)
        with pytest.raises(SpecError) as refused:
            read_device_file(file)
        assert str(refused.value) == (
            f'{file} is not a device file: {said}. Measure again: "equipoise calibrate".'
        )
    one = written(tmp_path, cuda_device_file(1))
    assert read_device_file(one).collectives == ()


def test_a_file_reads_back_and_a_file_of_cores_keeps_its_keys(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = calibrated_machine(monkeypatch, tmp_path, 8)
    assert read_device_file(file) == cuda_device_file(8)
    assert find_device("this-cuda").curve_file == file
    cores = tmp_path / "cores.json"
    write_device_file(cores, A_FILE)
    assert "cuda" not in json.loads(cores.read_text())
    assert set(json.loads(cores.read_text())["attention"][0]) == {
        *("dtype", "tokens", "head_width", "forward_s", "backward_s")
    }
