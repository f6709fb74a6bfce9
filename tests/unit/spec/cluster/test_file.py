"""cluster.toml: what it describes, and each fault once with its line."""

import re
from pathlib import Path

import numpy as np
import pytest

from equipoise.base.errors import SpecError
from equipoise.cost.curves.sources import sources_of
from equipoise.cost.kernel import gemm_s
from equipoise.cost.link import collective_s, group_of, strided_group
from equipoise.spec.cluster.file import __doc__ as page
from equipoise.spec.cluster.file import read_cluster
from equipoise.spec.cluster.spec import find_cluster
from equipoise.spec.device.by_name import find_device

GROWN = "\n".join(
    line[8:] for line in page.split("::\n\n")[1].split("\n\n    ``node")[0].split("\n")
)


def _read(folder: Path, text: str):
    file = folder / "cluster.toml"
    file.write_text(text)
    return read_cluster(str(file))


def _refused(folder: Path, text: str, message: str) -> None:
    with pytest.raises(SpecError, match=f"^{re.escape(message)}$"):
        _read(folder, text)


def test_the_example_of_the_page(tmp_path: Path) -> None:
    cluster = _read(tmp_path, GROWN)
    old, new = cluster.classes
    assert (cluster.name, cluster.devices, cluster.nodes) == ("grown", 48, 6)
    assert old.nic.name == "lab-roce"
    assert old.nic_bytes_per_s == 180e9 / 8 * 4 / 8
    assert old.nic.efficiency == 0.8
    assert old.nic.source == (
        "the cluster file; what it leaves out as roce-200: 200 Gb/s Ethernet with RDMA; efficiency "
        "and latency a guess"
    )
    assert new.device.usd_per_hour == 2.5
    assert dict(new.device.sources)["usd_per_hour"] == "the cluster file"
    assert cluster.between.name == "ethernet-25"
    assert collective_s("all_reduce", 1e9, group_of(cluster, [0, 32])).s > 0.5


TPU = (
    'name = "pod"\n[[nodes]]\ndevice = "tpu-v5p"\nnodes = 2\ndevices_per_node = 4\n'
    '[devices.tpu-v5p]\nlike = "h100-sxm"\nsource = "Google Cloud, TPU v5p"\n'
    "tflops = {bf16 = 459}\nmemory_gib = 95\nmemory_gbyte_per_s = 2765\n"
)


def test_a_device_of_the_file_is_as_far_below_its_roofline_as_the_one_it_is_like(
    tmp_path: Path,
) -> None:
    cluster = _read(tmp_path, TPU)
    device, h100 = cluster.device, find_device("h100-sxm")
    assert (device.name, device.like, cluster.devices) == ("tpu-v5p", "h100-sxm", 8)
    assert (device.memory_bytes, device.usd_per_hour) == (95 * 2**30, None)
    sources = sources_of(cluster, "bf16")
    assert sources["peaks"] == "the cluster file: Google Cloud, TPU v5p"
    assert sources["power_w"].startswith("as h100-sxm: NVIDIA H100")
    assert sources["matrix products"].endswith("; taken over to tpu-v5p by its roofline")
    own, theirs = (float(gemm_s(each, 8192, 8192, 8192, "bf16").s) for each in (device, h100))
    assert own / theirs == pytest.approx(989.4 / 459)
    assert gemm_s(device, 8192, 8192, 8192, "bf16").extrapolated


def test_a_card_held_to_less_power_loses_clock(tmp_path: Path) -> None:
    text = 'name = "x"\n[[nodes]]\ndevice = "h100-sxm"\nnodes = 1\npower_w = {}\n'
    held, more, plain = (
        float(gemm_s(device, 8192, 8192, 8192, "bf16").s)
        for device in (
            _read(tmp_path, text.format("500.0")).device,
            _read(tmp_path, text.format("900.0")).device,
            find_device("h100-sxm"),
        )
    )
    assert held / plain == pytest.approx((630 / 430) ** (1 / 3))
    assert more == plain
    _refused(
        tmp_path,
        text.format("70.0"),
        "cluster.toml:5  nodes.power_w: 70 W is what h100-sxm takes at rest, 70 W, or less. Give "
        "more.",
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "memory_gib = 95",
            "memory_gib = 0.5",
            "cluster.toml:10  devices.tpu-v5p.memory_gib: 0.5 is too small; it must be at least 1.",
        ),
        (
            "bf16 = 459",
            "bf17 = 459",
            "cluster.toml:9  devices.tpu-v5p.tflops.bf17: no such key. Nearest: bf16",
        ),
        (
            "bf16 = 459",
            "fp32 = 459",
            "cluster.toml:9  devices.tpu-v5p.tflops: has neither bf16 nor fp16, in which attention "
            "is computed. Give one.",
        ),
        (
            "memory_gbyte_per_s = 2765",
            "",
            "cluster.toml:6  devices.tpu-v5p.memory_gbyte_per_s: is missing. Every device needs "
            "like, source, tflops, memory_gib and memory_gbyte_per_s.",
        ),
        (
            'like = "h100-sxm"',
            'like = "h1000"',
            'cluster.toml:7  devices.tpu-v5p.like: there is no device "h1000". Nearest: h200',
        ),
        (
            "tpu-v5p",
            "h100-sxm",
            'cluster.toml:6  devices.h100-sxm: "h100-sxm" is a device already. Give this one '
            "another name.",
        ),
        (
            'source = "Google Cloud, TPU v5p"',
            'source = ""',
            "cluster.toml:8  devices.tpu-v5p.source: is empty. Say where the numbers are from.",
        ),
        (
            'device = "tpu-v5p"',
            'device = "tpu-v6"',
            'cluster.toml:3  nodes.device: there is no device "tpu-v6". Nearest: tpu-v5p',
        ),
    ],
)
def test_faults_of_a_device_are_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    _refused(tmp_path, TPU.replace(old, new), message)


def test_a_shipped_cluster_written_out_prices_alike(tmp_path: Path) -> None:
    cluster = _read(tmp_path, 'name = "dgx"\n[[nodes]]\ndevice = "h100-sxm"\nnodes = 4\n')
    for size, stride in ((8, 1), (16, 1), (4, 8)):
        own = collective_s("all_gather", 1e8, strided_group(cluster, size, stride))
        shipped = strided_group(find_cluster("h100-sxm:32"), size, stride)
        assert own.s == collective_s("all_gather", 1e8, shipped).s


def test_a_matrix_of_nodes(tmp_path: Path) -> None:
    text = (
        'name = "m"\nnode_gbyte_per_s = [[0, 300], [100.0, 0]]\n'
        '[[nodes]]\ndevice = "h100-sxm"\nnodes = 2\n'
    )
    cluster = _read(tmp_path, text)
    assert np.array_equal(cluster.node_bytes_per_s, [[0, 300e9], [100e9, 0]])
    assert not cluster.is_uniform


def test_names_pass_through_and_nodes_of_another_shape(tmp_path: Path) -> None:
    assert read_cluster("a100-80:8").devices == 8
    text = (
        'name = "pcie"\n[[nodes]]\nname = "box"\ndevice = "a100-40"\nnodes = 2\n'
        'devices_per_node = 4\ninside = "pcie4"\nnic = "ethernet-100"\nnics = 1\n'
    )
    box = _read(tmp_path, text).classes[0]
    assert (box.name, box.devices_per_node, box.devices) == ("box", 4, 8)
    assert box.tiers[0].link.name == "pcie4"
    assert box.nic_bytes_per_s == 12.5e9 / 4


def test_every_fault_of_form_at_once(tmp_path: Path) -> None:
    _refused(
        tmp_path,
        'nam = "x"\n[[nodes]]\ndevice = 3\nnodes = 0\nnic = "ib-ndr"\ndevices = 8\n',
        "cluster.toml:1  nam: no such key. Nearest: name\n"
        "cluster.toml:1  name: is missing. Every cluster needs a name, and nodes with a device "
        "and a number.\n"
        "cluster.toml:3  nodes.device: needs text, got 3 (a whole number).\n"
        "cluster.toml:4  nodes.nodes: 0 is too small; it must be at least 1.\n"
        "cluster.toml:6  nodes.devices: no such key. Nearest: device",
    )


def test_every_fault_of_meaning_at_once(tmp_path: Path) -> None:
    _refused(
        tmp_path,
        'name = "x"\n[[nodes]]\ndevice = "h1000"\nnodes = 1\n[[nodes]]\ndevice = "this-cpu"\n'
        'nodes = 2\n[[nodes]]\ndevice = "h200"\nnodes = 1\ninside = "nvlink6"\n'
        '[links.lab]\nlike = "roce-300"\n',
        "cluster.toml:1  between: is missing, and nodes of 3 classes must meet over some link. "
        'Name it: between = "lab".\n'
        'cluster.toml:3  nodes.device: there is no device "h1000". Nearest: h200\n'
        'cluster.toml:5  nodes.nic: is missing, and 2 nodes of "this-cpu" must meet over some '
        'link. Name it: nic = "ethernet-25".\n'
        'cluster.toml:11  nodes.inside: there is no link "nvlink6". Nearest: nvlink5\n'
        'cluster.toml:13  links.lab.like: there is no link "roce-300". Nearest: roce-400',
    )


def test_what_is_given_of_a_link_counts_where_another_is_measured(tmp_path: Path) -> None:
    def took_s(*lines: str) -> float:
        text = 'name = "x"\n[[nodes]]\ndevice = "h100-sxm"\nnodes = 1\ninside = "lab"\n'
        file = tmp_path / "cluster.toml"
        file.write_text("\n".join([text, "[links.lab]", 'like = "nvlink4"', *lines]))
        group = group_of(read_cluster(str(file)), range(8))
        return float(collective_s("all_reduce", 1 << 30, group).s)

    node = group_of(find_cluster("h100-sxm:8"), range(8))
    assert took_s() == float(collective_s("all_reduce", 1 << 30, node).s)
    half, quarter = took_s("efficiency = 0.5"), took_s("efficiency = 0.25")
    assert quarter == pytest.approx(2 * half, rel=0.01)
    assert took_s("efficiency = 0.5", "latency_us = 1000") > half + 4e-3


def test_nodes_may_hold_more_devices_than_those_shipped(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('name = "x"\n[[nodes]]\ndevice = "l40s"\nnodes = 2\ndevices_per_node = 10\n')
    [nodes] = read_cluster(str(file)).classes
    assert (nodes.devices_per_node, nodes.devices, nodes.nics) == (10, 20, 4)
    assert nodes.nic_bytes_per_s == find_cluster("l40s:16").classes[0].nic_bytes_per_s * 8 / 10


def test_a_matrix_with_a_missing_link_or_of_another_shape(tmp_path: Path) -> None:
    nodes = '[[nodes]]\ndevice = "h100-sxm"\nnodes = 2\n'
    _refused(
        tmp_path,
        f'name = "m"\nnode_gbyte_per_s = [[0, 0],\n [100.0, 0]]\n{nodes}',
        "cluster.toml:2  node_gbyte_per_s: from node 0 to node 1 is 0. Give the measured "
        "rate, from 1e-09 to 1e+12.",
    )
    _refused(
        tmp_path,
        f'name = "m"\nnode_gbyte_per_s = [[0, 1, 2]]\n{nodes}',
        "cluster.toml:2  node_gbyte_per_s: has 1 rows of 3, and there are 2 nodes. Give 2 rows "
        "of 2.",
    )


@pytest.mark.parametrize(
    ("rate", "fault"),
    [
        ("1e-320", "1e-320 is too small; it must be at least 1e-09."),
        ("1e308", "1e+308 is too large; it must be at most 1000000000000."),
        ("nan", "nan is not a finite number."),
    ],
)
def test_a_rate_that_no_link_has(rate: str, fault: str, tmp_path: Path) -> None:
    nodes = '[[nodes]]\ndevice = "h100-sxm"\nnodes = 2\nnic = "lab"\n'
    _refused(
        tmp_path,
        f'name = "x"\n{nodes}[links.lab]\ngbit_per_s = {rate}\n',
        f"cluster.toml:7  links.lab.gbit_per_s: {fault}",
    )


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("nodes = true", "nodes: needs a list, got true (true or false)."),
        ("nodes = [true]", "nodes: needs a table, got true (true or false)."),
        ("nodes = [['a']]", "nodes: needs a table, got a list."),
        ("nodes = [{device = ['a'], nodes = 1}]", "nodes.device: needs text, got a list."),
        (
            "nodes = [{device = 'h200', nodes = true}]",
            "nodes.nodes: needs a whole number, got true (true or false).",
        ),
        ("links = 2020-01-01", "links: needs a table, got 2020-01-01 (a date or a time)."),
        ("node_gbyte_per_s = [inf]", "node_gbyte_per_s: needs a list, got inf (a number)."),
        ("node_gbyte_per_s = [['x']]", 'node_gbyte_per_s: needs a number, got "x" (text).'),
        ("links = {lab = 'x'}", 'links.lab: needs a table, got "x" (text).'),
        ("trunk_gbit_per_s = [1]", "trunk_gbit_per_s: needs a number, got a list."),
    ],
)
def test_values_are_shown_as_toml_writes_them(line: str, fault: str, tmp_path: Path) -> None:
    nodes = "" if line.startswith("nodes") else '[[nodes]]\ndevice = "h100-sxm"\nnodes = 2\n'
    _refused(tmp_path, f'name = "x"\n{line}\n{nodes}', f"cluster.toml:2  {fault}")


def test_files_that_are_missing_or_wrong_altogether(tmp_path: Path) -> None:
    file = tmp_path / "none.toml"
    message = (
        f"Cannot read the cluster file {file}: no such file or directory. Shipped clusters need "
        "no file: h100-sxm:8192."
    )
    with pytest.raises(SpecError, match=f"^{re.escape(message)}$"):
        read_cluster(str(file))
    _refused(
        tmp_path,
        'name = "x"\nnodes = []\n',
        "cluster.toml:2  nodes: is empty. Give at least one [[nodes]].",
    )
    _refused(
        tmp_path,
        'name = "x"\n[[nodes]]\ndevice = "h100-sxm"\nnodes = 999999999\n',
        "cluster.toml:2  nodes: 7,999,999,992 devices are too many. Give 1,048,576 or fewer.",
    )
    _refused(
        tmp_path,
        'name = "x"\nnodes = 4\n',
        "cluster.toml:2  nodes: needs a list, got 4 (a whole number).",
    )
    _refused(
        tmp_path,
        "name = x\n",
        "cluster.toml:1  not TOML: Invalid value (column 8).",
    )


SITES = """name = "s"
between = "ethernet-25"
trunk_gbit_per_s = {trunk}
[[nodes]]
name = "a"
device = "h100-sxm"
nodes = 4
[[nodes]]
name = "b"
device = "h100-sxm"
nodes = 4
"""


def test_a_trunk_is_one_pipe_for_all_ports(tmp_path: Path) -> None:
    narrow, wide = (_read(tmp_path, SITES.format(trunk=trunk)) for trunk in (50, 1e6))
    ports = _read(tmp_path, SITES.format(trunk=1).replace("trunk_gbit_per_s = 1\n", ""))
    assert narrow.trunk_bytes_per_s == 50e9 / 8 and ports.trunk_bytes_per_s is None
    whole = list(range(64))
    slow, fast, free = (
        float(collective_s("all_reduce", 1e10, group_of(each, whole)).s)
        for each in (narrow, wide, ports)
    )
    # Four ports of 25 Gb/s are twice the trunk.
    assert fast == free and slow == pytest.approx(2 * free, rel=1e-2)
    one, many = (
        float(collective_s("send", 1e8, group_of(narrow, [0, 32], at_once=count)).s)
        for count in (1, 32)
    )
    assert many > one == float(collective_s("send", 1e8, group_of(ports, [0, 32])).s)


def test_a_trunk_that_no_message_fits_or_that_joins_nothing(tmp_path: Path) -> None:
    _refused(
        tmp_path,
        SITES.format(trunk=10),
        "cluster.toml:3  trunk_gbit_per_s: 10 Gb/s is narrower than one message, which leaves a "
        'node at the 25 Gb/s of between = "ethernet-25". Give 25 or more, or a slower link as '
        "between.",
    )
    alone = 'name = "s"\ntrunk_gbit_per_s = 10\n[[nodes]]\ndevice = "h100-sxm"\nnodes = 4\n'
    _refused(
        tmp_path,
        alone,
        "cluster.toml:2  trunk_gbit_per_s: joins nodes of different classes, and there is one. "
        "Leave it out.",
    )
