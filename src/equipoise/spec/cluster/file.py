"""cluster.toml: nodes of several classes, custom devices and links, and measured pairs of nodes.

Why
    Real clusters grow: two kinds of network card, one slow pair of nodes, a card held to less
    power, an accelerator that is in no table. What the shipped tables lack is written down once,
    and all its faults are reported at once with their lines.

What it decides
    The file's form::

        name = "grown"
        between = "ethernet-25"                  # between nodes of different classes
        trunk_gbit_per_s = 400                   # one pipe that all of them share, if they are far

        [[nodes]]
        device = "a100-80"
        nodes = 4
        nic = "lab-roce"                         # else that of the shipped node
        nics = 4

        [[nodes]]
        device = "h100-sxm"
        nodes = 2
        usd_per_hour = 2.5                       # of a device

        [links.lab-roce]
        like = "roce-200"                        # what is not given here
        gbit_per_s = 180

        [devices.tpu-v5p]                        # for device = "tpu-v5p"
        like = "h100-sxm"                        # kernels reach its share of their roofline
        source = "Google Cloud, TPU v5p"
        tflops = {bf16 = 459}                    # dense; also fp8, fp16, tf32, fp32
        memory_gib = 95
        memory_gbyte_per_s = 2765

    ``node_gbyte_per_s`` may hold what each node can send to each other node, one row per node.

Kept true (tests/unit/spec/cluster/test_file.py)
    A shipped cluster written as a file has equal prices; each fault is reported once, with its
    line.
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from equipoise.base.errors import SpecError
from equipoise.base.nearest import nearest
from equipoise.base.read import read_bytes
from equipoise.spec.cluster.devices import (
    LEAST,
    MOST,
    STRICT,
    GivenDevice,
    GivenPeaks,
    Positive,
    own_device,
)
from equipoise.spec.cluster.link import LINKS, LinkSpec
from equipoise.spec.cluster.spec import (
    MOST_DEVICES,
    ClusterSpec,
    NodeClass,
    Tier,
    find_cluster,
    node_class,
    node_size,
)
from equipoise.spec.device.by_name import (
    DEVICES,
    OWN,
    DeviceSpec,
    find_device,
    is_device,
)
from equipoise.spec.file_faults import explain_file_fault
from equipoise.spec.run.load import TomlPath, parse_toml

_Count = Annotated[int, Field(ge=1)]


class _Link(BaseModel):
    model_config = STRICT
    like: str = "roce-400"
    gbit_per_s: Positive | None = None
    latency_us: Positive | None = None
    efficiency: Annotated[float, Field(ge=LEAST, le=1)] | None = None


class _Nodes(BaseModel):
    model_config = STRICT
    device: str
    nodes: _Count
    name: str | None = None
    devices_per_node: _Count | None = None
    inside: str | None = None
    nic: str | None = None
    nics: _Count | None = None
    power_w: Positive | None = None
    usd_per_hour: Positive | None = None


class _File(BaseModel):
    model_config = STRICT
    name: str
    nodes: Annotated[list[_Nodes], Field(min_length=1)]
    between: str | None = None
    trunk_gbit_per_s: Positive | None = None
    links: dict[str, _Link] = {}
    devices: dict[str, GivenDevice] = {}
    node_gbyte_per_s: list[list[float]] | None = None


class _Faults:
    """Faults of one file, each with its line."""

    def __init__(self, label: str, lines: dict[TomlPath, int]) -> None:
        self._label, self._lines = label, lines
        self._found: list[tuple[int, str]] = []

    def add(self, path: TomlPath, message: str) -> None:
        # A missing key is reported where its table begins.
        known = next((path[:n] for n in range(len(path), 0, -1) if path[:n] in self._lines), None)
        line = 1 if known is None else self._lines[known]
        # The line says which item of a list it is.
        name = ".".join(part for part in path if isinstance(part, str))
        self._found.append((line, f"{self._label}:{line}  {name}: {message}"))

    def raise_any(self) -> None:
        if self._found:
            raise SpecError("\n".join(text for _, text in sorted(self._found)))


def read_cluster(text: str) -> ClusterSpec:
    """The cluster that a command line names: ``NAME:DEVICES``, or a cluster.toml.

    Raises:
        SpecError: no such cluster or file, or all faults of the file, one line each.
    """
    return read_cluster_file(Path(text)) if text.endswith(".toml") else find_cluster(text)


def read_cluster_file(path: Path) -> ClusterSpec:
    """Read a cluster.toml.

    Raises:
        SpecError: no such file, or all its faults, one line each.
    """
    try:
        data = read_bytes(path)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise SpecError(
            f"Cannot read the cluster file {path}: {reason}. Shipped clusters need no file: "
            f"h100-sxm:8192."
        ) from None
    table, lines = parse_toml(data, path.name)
    faults = _Faults(path.name, lines)
    try:
        file = _File.model_validate(table)
    except ValidationError as error:
        for each in error.errors(include_url=False):
            faults.add(each["loc"], _explain(each["loc"], dict(each)))
        faults.raise_any()
        raise AssertionError("a faulty file has faults") from None
    cluster = _build(file, faults)
    if cluster.devices > MOST_DEVICES:
        too_many = f"{cluster.devices:,} devices are too many"
        faults.add(("nodes",), f"{too_many}. Give {MOST_DEVICES:,} or fewer.")
    faults.raise_any()
    return cluster


_OWN_FAULTS = {
    "missing": "is missing. Every cluster needs a name, and nodes with a device and a number.",
    "too_short": "is empty. Give at least one [[nodes]].",
}
_DEVICE_FAULTS = {
    "missing": "is missing. Every device needs like, source, tflops, memory_gib and "
    "memory_gbyte_per_s.",
    "string_too_short": "is empty. Say where the numbers are from.",
}


def _explain(path: TomlPath, fault: dict[str, Any]) -> str:
    is_device = path[0] == "devices"
    tables: dict[str, type[BaseModel]] = {
        "nodes": _Nodes,
        "links": _Link,
        "devices": GivenPeaks if "tflops" in path[2:-1] else GivenDevice,
    }
    own = _DEVICE_FAULTS if is_device else _OWN_FAULTS
    return explain_file_fault(path, fault, file=_File, tables=tables, own=own)


def _build(file: _File, faults: _Faults) -> ClusterSpec:
    links = dict(LINKS)
    for name, given in file.links.items():
        base = _find(given.like, LINKS, ("links", name, "like"), "link", faults)
        if base is not None:
            links[name] = _own_link(name, given, base)
    devices = {name: own_device(name, given, faults.add) for name, given in file.devices.items()}
    classes = [
        each
        for index, nodes in enumerate(file.nodes)
        if (each := _node_class(nodes, index, links, devices, faults)) is not None
    ]
    between = None
    if file.between is not None:
        between = _find(file.between, links, ("between",), "link", faults)
    elif len(file.nodes) > 1:
        faults.add(
            ("between",),
            f"is missing, and nodes of {len(file.nodes)} classes must meet over some link. Name "
            f"it: between = {next(iter(file.links), 'ethernet-25')!r}.".replace("'", '"'),
        )
    rates = _matrix(file, faults)
    trunk = _trunk(file, between, faults)
    return ClusterSpec(file.name, tuple(classes), between, rates, trunk)


def _trunk(file: _File, between: LinkSpec | None, faults: _Faults) -> float | None:
    """Bytes per second of the pipe between sites."""
    if file.trunk_gbit_per_s is None:
        return None
    trunk, path = file.trunk_gbit_per_s * 1e9 / 8, ("trunk_gbit_per_s",)
    if len(file.nodes) == 1:
        faults.add(path, "joins nodes of different classes, and there is one. Leave it out.")
    elif between is not None and trunk < between.bytes_per_s:
        port = between.bytes_per_s * 8 / 1e9
        faults.add(
            path,
            f"{file.trunk_gbit_per_s:g} Gb/s is narrower than one message, which leaves a node at "
            f'the {port:g} Gb/s of between = "{between.name}". Give {port:g} or more, or a slower '
            f"link as between.",
        )
    return trunk


def _own_link(name: str, given: _Link, base: LinkSpec) -> LinkSpec:
    # A curve has an efficiency and a latency of its own, and is read in place of any given here.
    is_measured = given.efficiency is None and given.latency_us is None
    return dataclasses.replace(
        base,
        name=name,
        bytes_per_s=base.bytes_per_s if given.gbit_per_s is None else given.gbit_per_s * 1e9 / 8,
        latency_s=base.latency_s if given.latency_us is None else given.latency_us * 1e-6,
        efficiency=base.efficiency if given.efficiency is None else given.efficiency,
        source=f"the cluster file; what it leaves out as {base.name}: {base.source}",
        curve=base.curve if is_measured else None,
    )


def _find(
    name: str, known: dict[str, LinkSpec], path: TomlPath, kind: str, faults: _Faults
) -> LinkSpec | None:
    if name not in known:
        faults.add(path, f'there is no {kind} "{name}". Nearest: {nearest(name, known)}')
    return known.get(name)


def _node_class(
    nodes: _Nodes,
    index: int,
    links: dict[str, LinkSpec],
    devices: dict[str, DeviceSpec | None],
    faults: _Faults,
) -> NodeClass | None:
    at: TomlPath = ("nodes", index)
    declared = devices.get(nodes.device)
    if nodes.device in devices and declared is None:  # its own table is at fault
        return None
    name = nodes.device if declared is None or declared.like is None else declared.like
    try:
        device = find_device(name)
    except SpecError as error:
        meant = nearest(name, [*DEVICES, *OWN, *devices])
        unknown = f'there is no device "{name}". Nearest: {meant}'
        faults.add((*at, "device"), str(error) if is_device(name) else unknown)
        return None
    wanted = nodes.devices_per_node or node_size(device)
    shipped = node_class(name, wanted if device.is_here else min(wanted, node_size(device)))
    device = declared or device
    tiers = shipped.tiers
    if nodes.devices_per_node is not None or nodes.inside is not None:
        size = nodes.devices_per_node or shipped.devices_per_node
        link = shipped.tiers[-1].link
        if nodes.inside is not None:
            link = _find(nodes.inside, links, (*at, "inside"), "link", faults) or link
        tiers = (Tier(size, link),)
    nic, nics = shipped.nic, shipped.nics
    if nodes.nic is not None:
        nic, nics = _find(nodes.nic, links, (*at, "nic"), "link", faults), max(1, shipped.nics)
    elif nic is None and nodes.nodes > 1:
        faults.add(
            (*at, "nic"),
            f'is missing, and {nodes.nodes} nodes of "{nodes.device}" must meet over some link. '
            f'Name it: nic = "ethernet-25".',
        )
    if nodes.power_w is not None and nodes.power_w <= device.idle_power_w:
        faults.add(
            (*at, "power_w"),
            f"{nodes.power_w:g} W is what {device.name} takes at rest, {device.idle_power_w:g} W, "
            f"or less. Give more.",
        )
    own = {
        key: value
        for key in ("power_w", "usd_per_hour")
        if (value := getattr(nodes, key)) is not None
    }
    if own:
        sources = tuple((k, "the cluster file" if k in own else v) for k, v in device.sources)
        device = dataclasses.replace(device, **own, sources=sources)
    return NodeClass(
        nodes.name or nodes.device, device, nodes.nodes, tiers, nic, nodes.nics or nics
    )


def _matrix(file: _File, faults: _Faults) -> np.ndarray[Any, np.dtype[np.float64]] | None:
    if file.node_gbyte_per_s is None:
        return None
    rows, nodes = file.node_gbyte_per_s, sum(each.nodes for each in file.nodes)
    if len(rows) != nodes or any(len(row) != nodes for row in rows):
        shape = f"{len(rows)} rows of {', '.join(str(n) for n in sorted({*map(len, rows)}))}"
        faults.add(
            ("node_gbyte_per_s",),
            f"has {shape}, and there are {nodes} nodes. Give {nodes} rows of {nodes}.",
        )
        return None
    for row, values in enumerate(rows):
        for column, value in enumerate(values):
            if row != column and not LEAST <= value <= MOST:
                faults.add(
                    ("node_gbyte_per_s", row),
                    f"from node {row} to node {column} is {value:g}. Give the measured rate, "
                    f"from {LEAST:g} to {MOST:g}.",
                )
    return np.array(rows, dtype=np.float64) * 1e9
