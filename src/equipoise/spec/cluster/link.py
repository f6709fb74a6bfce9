"""Links between devices: bandwidth, latency, and the efficiency of collectives.

Why
    A collective is as slow as the slowest link it crosses, and links differ a hundredfold
    between two dies of one package and two buildings. Each is a row with its source.

What it decides
    ``bytes_per_s`` is the datasheet's, for one port and one direction. ``efficiency`` is the
    share that large collectives reach, used if no curve was measured; ``curve`` names the
    measured one.

Kept true (tests/unit/spec/cluster/test_spec.py)
    Every link has a source, and an efficiency of at most one.
"""

from dataclasses import dataclass

from equipoise.base.errors import SpecError
from equipoise.base.nearest import nearest


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """One kind of link."""

    name: str
    bytes_per_s: float
    """Peak of one port, one direction."""
    efficiency: float
    """Share of the peak that large collectives reach."""
    latency_s: float
    """Latency of one message over one hop, with software."""
    source: str
    curve: str | None = None
    """Measured collectives of a node joined by this link, or by a faster or slower one of its
    kind: a shipped table, or the path of a device file."""


_NDR = "NVIDIA ConnectX-7: 400 Gb/s. Efficiency: DeepEP reports 43 of 50 GB/s between nodes"
_HOP = "latency: NCCL between two nodes, about"
_CURVE = "efficiency and latency a guess, read where no curve is"
_GUESS = "efficiency and latency a guess"

_TABLE = (
    LinkSpec("nvlink5", 900e9, 0.75, 2e-6, f"NVIDIA GB200: 1.8 TB/s both ways; {_CURVE}", "h100"),
    LinkSpec("nvlink4", 450e9, 0.75, 2e-6, f"NVIDIA H100: 900 GB/s both ways; {_CURVE}", "h100"),
    LinkSpec(
        "nvlink4-h800",
        200e9,
        0.75,
        2e-6,
        f"NVIDIA H800: 400 GB/s both ways (DeepEP measures 160); {_CURVE}",
        "h100",
    ),
    LinkSpec("nvlink3", 300e9, 0.75, 2e-6, f"NVIDIA A100: 600 GB/s both ways; {_CURVE}", "a100"),
    LinkSpec("nvlink2", 150e9, 0.75, 2e-6, f"NVIDIA V100: 300 GB/s both ways; {_CURVE}", "a100"),
    LinkSpec("xgmi-package", 200e9, 0.75, 3e-6, f"OLCF Frontier user guide: 4 x 50 GB/s; {_GUESS}"),
    LinkSpec("xgmi-node", 50e9, 0.75, 3e-6, f"OLCF Frontier user guide: 1 x 50 GB/s; {_GUESS}"),
    LinkSpec("xgmi-mi300x", 448e9, 0.7, 3e-6, f"AMD MI300X: 7 links of 64 GB/s; {_GUESS}"),
    LinkSpec("xgmi-mi355x", 537.6e9, 0.7, 3e-6, f"AMD MI355X: 7 links of 76.8 GB/s; {_GUESS}"),
    LinkSpec("pcie5", 64e9, 0.8, 5e-6, f"PCI Express 5.0 x16, one direction; {_GUESS}"),
    LinkSpec("pcie4", 32e9, 0.8, 5e-6, f"PCI Express 4.0 x16, one direction; {_GUESS}"),
    LinkSpec("pcie3", 16e9, 0.8, 5e-6, f"PCI Express 3.0 x16, one direction; {_GUESS}"),
    LinkSpec(
        "ib-xdr", 100e9, 0.86, 5e-6, f"NVIDIA ConnectX-8: 800 Gb/s. Efficiency as ib-ndr; {_HOP}"
    ),
    LinkSpec("ib-ndr", 50e9, 0.86, 5e-6, f"{_NDR}; {_HOP}"),
    LinkSpec(
        "ib-hdr", 25e9, 0.86, 5e-6, f"NVIDIA ConnectX-6: 200 Gb/s. Efficiency as ib-ndr; {_HOP}"
    ),
    LinkSpec(
        "ib-edr", 12.5e9, 0.86, 5e-6, f"NVIDIA ConnectX-5: 100 Gb/s. Efficiency as ib-ndr; {_HOP}"
    ),
    LinkSpec("slingshot", 25e9, 0.7, 8e-6, f"HPE Slingshot 11: 200 Gb/s; {_GUESS}"),
    LinkSpec("roce-400", 50e9, 0.8, 7e-6, f"400 Gb/s Ethernet with RDMA; {_GUESS}"),
    LinkSpec("roce-200", 25e9, 0.8, 7e-6, f"200 Gb/s Ethernet with RDMA; {_GUESS}"),
    LinkSpec("roce-100", 12.5e9, 0.8, 7e-6, f"100 Gb/s Ethernet with RDMA; {_GUESS}"),
    LinkSpec("ethernet-100", 12.5e9, 0.6, 40e-6, f"100 Gb/s Ethernet, TCP; {_GUESS}"),
    LinkSpec("ethernet-25", 3.125e9, 0.8, 40e-6, f"25 Gb/s Ethernet, TCP; {_GUESS}"),
    LinkSpec("ethernet-10", 1.25e9, 0.9, 40e-6, f"10 Gb/s Ethernet, TCP; {_GUESS}"),
    LinkSpec(
        "gloo",
        2e9,
        0.5,
        1e-4,
        'rate, efficiency and latency a guess; "equipoise calibrate" measures',
    ),
)

LINKS: dict[str, LinkSpec] = {link.name: link for link in _TABLE}
"""Links by name."""


def find_link(name: str) -> LinkSpec:
    """The link of this name.

    Raises:
        SpecError: no such link; names the nearest.

    >>> find_link("ib-ndr").bytes_per_s
    50000000000.0
    """
    if name not in LINKS:
        raise SpecError(
            f'No link is called "{name}". Nearest: {nearest(name, LINKS)}. '
            f"Known: {', '.join(LINKS)}."
        )
    return LINKS[name]
