r"""Clusters: which devices, in which nodes, joined by which links.

Why
    The placement of a group of ranks decides which links its collectives cross. Flat bandwidth
    is the commonest lie of planners, so nodes, blocks inside a node, network cards and node
    classes are explicit, and a measured matrix between nodes may override them.

What it decides
    Devices are numbered by class, then by node; rank ``r`` is device ``r`` unless a placement
    says otherwise. Inside a node *tiers* join growing blocks of neighbours::

        mi250x node     [0 1] [2 3] [4 5] [6 7]    tier of 2: the dies of a package
                        [0 1 2 3 4 5 6 7]          tier of 8: the node

    A node's devices share its network cards evenly, since in training all communicate at once.
    Nodes of different classes communicate over ``between``, a port a node, and where they are
    different sites over one *trunk* that all of them share::

        site  [node] [node] [node]            a port a node: between
                 \______|______/
                        trunk                 one pipe for all ports
                  ______|______
                 /      |      \
        site  [node] [node] [node]

Kept true (tests/unit/spec/cluster/test_spec.py)
    Every device has one node and one class; an unknown name gets its nearest.

Sources
    Node classes by network card: Holmes, arXiv:2312.03549. Matrix of links: Pipette,
    arXiv:2405.18093.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from equipoise.base.arrays import Ints
from equipoise.base.errors import SpecError
from equipoise.base.nearest import nearest
from equipoise.spec.cluster.link import LinkSpec, find_link
from equipoise.spec.device.by_name import DeviceSpec, find_device, is_device, own_name
from equipoise.spec.device.cuda import cuda_tiers
from equipoise.spec.device.file import CudaFacts, read_device_file
from equipoise.spec.device.spec import THIS_CPU, THIS_CUDA

MOST_DEVICES = 1 << 20
"""Most devices of a cluster: every rank is a number in some array."""


@dataclass(frozen=True, slots=True)
class Tier:
    """A link that joins every block of ``devices`` neighbouring devices of a node."""

    devices: int
    link: LinkSpec


@dataclass(frozen=True, slots=True)
class NodeClass:
    """Identical nodes."""

    name: str
    device: DeviceSpec
    nodes: int
    tiers: tuple[Tier, ...]
    """Links inside the node, by growing block; the last block is the node."""
    nic: LinkSpec | None
    """Network card between nodes of this class; None for a single node."""
    nics: int
    """Network cards of a node."""

    @property
    def devices_per_node(self) -> int:
        """Devices of a node."""
        return self.tiers[-1].devices

    @property
    def devices(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.devices_per_node

    @property
    def nic_bytes_per_s(self) -> float:
        """Peak rate at which each device can send out of its node while all of them send."""
        if self.nic is None:
            return 0.0
        return self.nic.bytes_per_s * self.nics / self.devices_per_node


@dataclass(frozen=True, slots=True, eq=False)
class ClusterSpec:
    """All devices of a job."""

    name: str
    classes: tuple[NodeClass, ...]
    between: LinkSpec | None = None
    """Link between nodes of different classes: one port per node."""
    node_bytes_per_s: npt.NDArray[np.float64] | None = None
    """Measured rate from all devices of a node to another node, [nodes, nodes]."""
    trunk_bytes_per_s: float | None = None
    """What all nodes of a class together send to those of others, one pipe for all; None where
    ports are the only limit."""

    @property
    def devices(self) -> int:
        """Devices of all classes."""
        return sum(each.devices for each in self.classes)

    @property
    def nodes(self) -> int:
        """Nodes of all classes."""
        return sum(each.nodes for each in self.classes)

    @property
    def device(self) -> DeviceSpec:
        """The device of the first class; with one class, every device."""
        return self.classes[0].device

    @property
    def is_uniform(self) -> bool:
        """Whether all nodes are alike and there is no matrix."""
        return len(self.classes) == 1 and self.node_bytes_per_s is None

    def class_of(self, devices: npt.ArrayLike) -> Ints:
        """Index of the class of each device.

        >>> find_cluster("h100-sxm:16").class_of([0, 15]).tolist()
        [0, 0]
        """
        ends = np.cumsum([each.devices for each in self.classes])
        return np.searchsorted(ends, self._known(devices), side="right").astype(np.int64)

    def node_of(self, devices: npt.ArrayLike) -> Ints:
        """Node of each device, over all classes.

        >>> find_cluster("h100-sxm:16").node_of([0, 7, 8]).tolist()
        [0, 0, 1]
        """
        ids, classes = self._known(devices), self.class_of(devices)
        sizes = np.array([each.devices_per_node for each in self.classes])
        firsts = np.cumsum([0, *(each.devices for each in self.classes)])[:-1]
        first_nodes = np.cumsum([0, *(each.nodes for each in self.classes)])[:-1]
        nodes: Ints = first_nodes[classes] + (ids - firsts[classes]) // sizes[classes]
        return nodes

    def place_in_node(self, devices: npt.ArrayLike) -> Ints:
        """Place of each device within its node."""
        ids, classes = self._known(devices), self.class_of(devices)
        sizes = np.array([each.devices_per_node for each in self.classes])
        firsts = np.cumsum([0, *(each.devices for each in self.classes)])[:-1]
        places: Ints = (ids - firsts[classes]) % sizes[classes]
        return places

    def _known(self, devices: npt.ArrayLike) -> Ints:
        ids = np.asarray(devices, dtype=np.int64)
        if ids.size and (ids.min() < 0 or ids.max() >= self.devices):
            worst = int(ids.min() if ids.min() < 0 else ids.max())
            raise SpecError(
                f"{self.name} has {self.devices:,} devices, numbered from 0, but no device "
                f"{worst:,}. Give a cluster of {max(worst + 1, 1):,} or more, or other ranks."
            )
        return ids


@dataclass(frozen=True, slots=True)
class _Shape:
    """A node of the shipped clusters, and its source."""

    tiers: tuple[tuple[int, str], ...]
    nic: str | None
    nics: int
    source: str
    in_use: int = 0
    """Devices that a job takes of a node where the others are spare; 0 for all."""


_SHAPES = {
    "h100-sxm": _Shape(((8, "nvlink4"),), "ib-ndr", 8, "NVIDIA DGX H100: 8 x ConnectX-7"),
    "h100-sxm-500w": _Shape(((8, "nvlink4"),), "roce-400", 8, "Meta Grand Teton: 8 x 400 Gb/s"),
    "h200": _Shape(((8, "nvlink4"),), "ib-ndr", 8, "NVIDIA DGX H200: 8 x ConnectX-7"),
    "a100-80": _Shape(((8, "nvlink3"),), "ib-hdr", 8, "NVIDIA DGX A100: 8 x ConnectX-6"),
    "a100-40": _Shape(((8, "nvlink3"),), "ib-hdr", 8, "NVIDIA DGX A100: 8 x ConnectX-6"),
    "v100-32": _Shape(((8, "nvlink2"),), "ib-edr", 4, "NVIDIA DGX-1: 4 x EDR"),
    "v100-16": _Shape(((8, "nvlink2"),), "ib-edr", 4, "NVIDIA DGX-1: 4 x EDR"),
    "mi250x": _Shape(
        ((2, "xgmi-package"), (8, "xgmi-node")), "slingshot", 4, "OLCF Frontier: 4 x Slingshot 11"
    ),
    "h800": _Shape(((8, "nvlink4-h800"),), "ib-ndr", 8, "arXiv:2412.19437, section 3.1"),
    "h20": _Shape(((8, "nvlink4"),), "ib-ndr", 8, "NVIDIA HGX H20, with 8 x ConnectX-7"),
    "b200": _Shape(((8, "nvlink5"),), "ib-ndr", 8, "NVIDIA DGX B200: 8 x ConnectX-7"),
    "b300": _Shape(((8, "nvlink5"),), "ib-xdr", 8, "NVIDIA DGX B300: 8 x ConnectX-8"),
    "gb200": _Shape(((72, "nvlink5"),), "ib-ndr", 72, "NVIDIA GB200 NVL72: 72 x ConnectX-7", 64),
    "gb300": _Shape(((72, "nvlink5"),), "ib-xdr", 72, "NVIDIA GB300 NVL72: 72 x ConnectX-8", 64),
    "l40s": _Shape(((8, "pcie4"),), "ib-ndr", 4, "a guess: 8 devices on PCIe, 4 x ConnectX-7"),
    "mi300x": _Shape(((8, "xgmi-mi300x"),), "roce-400", 8, "AMD Instinct platform: 8 x 400 Gb/s"),
    "mi355x": _Shape(((8, "xgmi-mi355x"),), "roce-400", 8, "AMD Instinct platform: 8 x 400 Gb/s"),
}

CLUSTERS: dict[str, str] = {name: shape.source for name, shape in _SHAPES.items()} | {
    THIS_CPU: "this machine, one rank a core",
    THIS_CUDA: "this machine, one rank a CUDA device",
}
"""Shipped clusters, with the sources of their nodes."""


def node_class(name: str, devices: int) -> NodeClass:
    """Nodes of a shipped cluster that hold ``devices`` devices.

    Raises:
        SpecError: no such cluster, or devices that do not fill whole nodes.
    """
    device = find_device(name)
    if device.is_here:
        return _own_nodes(device, devices)
    shape = _SHAPES[device.name]
    size = shape.tiers[-1][0]
    if devices % size and shape.in_use and devices % shape.in_use == 0:
        size = shape.in_use
    if devices % size and devices > size:
        less = devices // size * size
        raise SpecError(
            f"{devices:,} devices of {device.name} do not fill whole nodes of {size}. "
            f"Give {less:,} or {less + size:,}."
        )
    most = min(devices, size)
    inside = [Tier(min(count, most), find_link(link)) for count, link in shape.tiers]
    kept = [tier for i, tier in enumerate(inside) if i == 0 or tier.devices > inside[i - 1].devices]
    return NodeClass(
        device.name,
        device,
        max(1, devices // size),
        tuple(kept),
        find_link(shape.nic) if shape.nic else None,
        # Part of a node has its share of the cards.
        max(1, shape.nics * min(devices, size) // shape.tiers[-1][0]),
    )


def node_size(device: DeviceSpec) -> int:
    """Devices of a node as shipped, or as measured here; 1 of cores, which make nodes of any size.

    >>> node_size(find_device("h100-sxm"))
    8
    """
    facts = _cuda_facts(device)
    if facts is not None:
        return facts.devices
    return 1 if device.is_here else _SHAPES[device.name].tiers[-1][0]


def _cuda_facts(device: DeviceSpec) -> CudaFacts | None:
    """What was measured of this machine's CUDA devices; None for any other device."""
    return None if device.curve_file is None else read_device_file(device.curve_file).cuda


def _own_nodes(device: DeviceSpec, devices: int) -> NodeClass:
    """This machine as one node of ``devices`` of its cores, or of its CUDA devices."""
    facts = _cuda_facts(device)
    if facts is None:
        tiers: tuple[Tier, ...] = (Tier(devices, _gloo(device)),)
    else:
        tiers = _cuda_links(device, facts, devices)
    return NodeClass(device.name, device, 1, tiers, None, 0)


def _gloo(device: DeviceSpec) -> LinkSpec:
    file, gloo = device.curve_file, find_link("gloo")
    if file is None:
        return gloo
    source = "rate, efficiency and latency a guess, read where no curve is"
    return dataclasses.replace(gloo, curve=str(file), source=source)


def _cuda_links(device: DeviceSpec, facts: CudaFacts, devices: int) -> tuple[Tier, ...]:
    """The links between the first devices; collectives over the innermost have a curve."""
    if devices > facts.devices:
        raise SpecError(
            f"{devices:,} devices of {THIS_CUDA} are more than the {facts.devices} that were "
            f"measured here. Give {facts.devices} or fewer, or a cluster.toml of several nodes "
            f'with device = "{THIS_CUDA}" and the network card between them.'
        )
    source = dict(device.sources)["peaks"]
    if devices == 1:  # nobody to send to
        return (Tier(1, LinkSpec(THIS_CUDA, device.host_bytes_per_s, 1.0, 0.0, source)),)
    links = [
        LinkSpec(f"{THIS_CUDA} of {tier.devices}", tier.bytes_per_s, 1.0, tier.latency_s, source)
        for tier in cuda_tiers(facts)
    ]
    links[0] = dataclasses.replace(links[0], curve=str(device.curve_file))
    sizes = [min(tier.devices, devices) for tier in cuda_tiers(facts)]
    return tuple(
        Tier(size, link)
        for at, (size, link) in enumerate(zip(sizes, links, strict=True))
        if at == 0 or size > sizes[at - 1]
    )


def own_cluster(device: DeviceSpec, devices: int) -> ClusterSpec:
    """A cluster of this machine's cores or devices, which may come from any device file.

    >>> from equipoise.spec.device.here import this_cpu
    >>> own_cluster(this_cpu(), 2).devices
    2
    """
    return ClusterSpec(f"{device.name}:{devices}", (_own_nodes(device, devices),))


def this_machine(ranks: int) -> ClusterSpec:
    """What ``ranks`` ranks started here compute on: CUDA devices, or cores if there are none.

    Raises:
        SpecError: the devices were never measured, or are fewer.
    """
    return find_cluster(f"{own_name()}:{ranks}")


def find_cluster(text: str) -> ClusterSpec:
    """A shipped cluster, ``NAME:DEVICES``.

    Raises:
        SpecError: not of that form, no such name, or devices that do not fill whole nodes.

    >>> cluster = find_cluster("h100-sxm:8192")
    >>> cluster.nodes, cluster.devices, cluster.classes[0].nic_bytes_per_s
    (1024, 8192, 50000000000.0)
    """
    name, colon, count = text.partition(":")
    devices = int(count.replace("_", "").replace(",", "")) if _is_count(count) else 0
    if devices > MOST_DEVICES:
        raise SpecError(f"{devices:,} devices are too many. Give {MOST_DEVICES:,} or fewer.")
    if not colon or devices < 1:
        raise SpecError(
            f'"{text}" is neither NAME:DEVICES, as in h100-sxm:8192, nor a cluster file that ends '
            f"in .toml. Names: {', '.join(CLUSTERS)}."
        )
    try:
        nodes = node_class(name, devices)
    except SpecError:
        if is_device(name):
            raise
        raise SpecError(
            f'No cluster is called "{name}". Nearest: {nearest(name.casefold(), CLUSTERS)}. '
            f"Known: {', '.join(CLUSTERS)}; any other is a cluster.toml."
        ) from None
    return ClusterSpec(f"{nodes.name}:{devices}", (nodes,))


def _is_count(text: str) -> bool:
    digits = text.replace("_", "").replace(",", "")
    return digits.isascii() and digits.isdecimal() and len(digits) < 20
