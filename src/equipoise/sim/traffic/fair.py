"""What concurrent rings get of shared links: max-min fair rates.

Why
    A ring is as fast as its slowest hop, and two flows that meet on one cable halve each other. A
    ring that is held up there leaves room on all its other cables, which others take.

What it decides
    All rings get faster alike until a link is full; those that cross it stay as they are, and the
    others go on. No ring can then get more without a slower one, or an equal one, getting less.

Kept true (tests/unit/sim/test_traffic.py)
    Equal to the answer of linear programs, one after the other, on small graphs; no link is
    overfull; every ring crosses a full link on which nobody is faster.

Sources
    Progressive filling: Bertsekas and Gallager, Data Networks, section 6.5.2.
"""

import numpy as np

from equipoise.base.arrays import Floats

_FULL = 1e-9
"""Share of a link's rate that counts as nothing."""


def fair_rates(uses: Floats, capacity: Floats) -> Floats:
    """The max-min fair rate of each ring.

    Args:
        uses: float64[links, rings], the share of a ring's rate that it sends over each link: 2
            where two of its hops cross it; every ring crosses one at least.
        capacity: float64[links], what each link carries [bytes/s].

    Returns:
        float64[rings], [bytes/s].

    >>> fair_rates(np.array([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]]), np.array([6.0, 10.0])).tolist()
    [3.0, 3.0, 7.0]
    """
    rates = np.zeros(uses.shape[1])
    left, is_open = capacity.astype(np.float64), np.ones(len(rates), dtype=bool)
    while is_open.any():
        pull = uses[:, is_open].sum(axis=1)
        room = np.divide(left, pull, out=np.full(len(left), np.inf), where=pull > 0)
        more = room.min()
        rates[is_open] += more
        left = np.maximum(0.0, left - more * pull)
        full = (pull > 0) & (left <= _FULL * capacity)
        is_open &= ~(uses[full] > 0).any(axis=0)
    return rates
