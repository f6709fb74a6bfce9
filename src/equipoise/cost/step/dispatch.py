"""Seconds in which rows reach their experts and come back: one copy a node, then one a device.

Why
    A row that eight experts want is not sent eight times. What crosses the network is one copy for
    each node that holds any of them, and inside the node one copy for each device, so a price by
    experts is two to four times too high.

What it decides
    Experts are drawn evenly, so a row with ``k`` of them reaches ``n (1 - (1 - 1/n)^k)`` of ``n``
    nodes, or of all devices. Copies cross ports and links at once; what both take is a power mean,
    whose power says how well they run beside each other. Rows go out in 8 bits where the program
    says so, with a scale for each 128 elements, and come back in 16.

Kept true (tests/unit/cost/step/test_dispatch.py; points: bench/published/dispatch.py)
    Never more bytes than a copy for each expert; more nodes, more rows and wider rows take longer.

Sources
    What is sent: DeepSeek-V3, arXiv:2412.19437, section 3.2.2. Rates: DeepEP's normal kernels on 1
    to 4 nodes of 8 H100, from the wheel of aiconfigurator-core 0.12.0,
    systems/data/h100_sxm/comm/sglang/0.5.6.post2/wideep_deepep_normal_perf.parquet, beside
    DeepEP's own points on H800 (docs/legacy.md of its repository); Hybrid-EP on GB200: the same
    repository at 41cad944, docs/README_Hybrid-EP.md.
"""

from dataclasses import dataclass

_SM_BYTES_PER_S = (283e9, 300e9)
"""What the 20 to 24 multiprocessors of the kernels carry, out and back."""
_FAST_LINK, _FAST_SM_BYTES_PER_S = 900e9, (500e9, 500e9)
"""The same of the 32 that Hybrid-EP's kernels take on links as fast as GB200's, where copies are
the memory engine's: its calls for 4,096 rows of 7,168 over 8 to 36 ranks."""
_LINK_SHARE = 0.7
"""What a link inside a node carries at most: 140 of the 200 GB/s of H800's."""
_PORT_SHARE = (0.92, 0.95)
"""What a network port carries: 46 and 47.5 of 50 GB/s."""
_START_S = (35e-6, 60e-6)
"""What the kernels take for few rows."""
_POWER = (6.0, 2.5)
"""The mean of ports and links has this power: the way back also adds rows up."""
_SCALE_BYTES = 4.0 / 128
"""A scale for each 128 elements of 8 bits."""


def carried_bytes_per_s(link_bytes_per_s: float) -> tuple[float, float]:
    """What a device's kernels carry over a link of this rate in its node, out and back [bytes/s].

    >>> carried_bytes_per_s(450e9), carried_bytes_per_s(900e9)
    ((283000000000.0, 300000000000.0), (500000000000.0, 500000000000.0))
    """
    return _FAST_SM_BYTES_PER_S if link_bytes_per_s >= _FAST_LINK else _SM_BYTES_PER_S


@dataclass(frozen=True, slots=True)
class ExpertRoutes:
    """What connects the ranks that share a layer's experts."""

    ranks: int
    nodes: int
    near_bytes_per_s: float
    """Peak of a device's link inside its node, one direction."""
    far_bytes_per_s: float
    """Peak of a device's share of its node's ports; 0 on one node."""
    most_nodes: int = 0
    """Nodes that a row is sent to at most; 0 for any."""
    carried_bytes_per_s: tuple[float, float] = _SM_BYTES_PER_S
    """What a device's kernels carry, out and back."""

    def _nodes(self, top_k: float) -> float:
        """Nodes that a row reaches."""
        reached = self._copies(top_k, self.nodes)
        return min(reached, self.most_nodes) if self.most_nodes else reached

    def _devices(self, top_k: float) -> float:
        """Devices that a row reaches."""
        if not self.most_nodes or self.most_nodes >= self.nodes:
            return self._copies(top_k, self.ranks)
        inside = max(1, self.ranks // self.nodes)
        return self._copies(top_k, self.most_nodes * inside)

    def _copies(self, top_k: float, places: int) -> float:
        missed = float((1.0 - 1.0 / places) ** top_k)
        return places * (1.0 - missed)

    def travel_s(
        self, rows: float, top_k: float, hidden: int, *, is_return: bool, fp8: bool, skew: float
    ) -> float:
        """Time of one way, of the rank with most rows [s].

        Args:
            rows: Tokens that this rank routes.
            top_k: Experts of each.
            hidden: Width of a row.
            is_return: Whether results come back.
            fp8: Whether rows travel in 8 bits.
            skew: Rows of the fullest rank over the mean.

        >>> routes = ExpertRoutes(32, 4, 450e9, 50e9)
        >>> out = routes.travel_s(4096, 8, 7168, is_return=False, fp8=True, skew=1.0)
        >>> round(1e6 * out)  # measured: 1,791
        1813
        """
        width = 1.0 + _SCALE_BYTES if fp8 else 2.0
        inside = max(1, self.ranks // self.nodes)
        row = rows * hidden * width * skew
        near = row * self._devices(top_k) * (1.0 - 1.0 / inside)
        far = row * self._nodes(top_k) * (1.0 - 1.0 / self.nodes)
        way = int(is_return)
        near_s = near / min(self.carried_bytes_per_s[way], _LINK_SHARE * self.near_bytes_per_s)
        far_s = far / (_PORT_SHARE[way] * self.far_bytes_per_s) if far else 0.0
        power = _POWER[way]
        return float((near_s**power + far_s**power) ** (1.0 / power)) + _START_S[way]
