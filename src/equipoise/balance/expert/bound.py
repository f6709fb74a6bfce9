"""What no plan of experts can beat: the fullest rank, and the rows worth a copy.

What it decides
    ``lower_bound``: ranks together compute all rows. A rank computes at most the target, and at
    most its own experts' rows and those of the largest other experts that its slots hold. The
    lowest target at which these sum to all rows is below every plan's fullest rank.

    ``break_even_rows``: a copy moves ``3 h f b`` bytes of weights, ``rm`` more times if the
    backward fetches them again, and ``3 h f bg`` bytes of gradients back. A row saves ``18 h f``
    FLOP in forward and backward, so h and f cancel: ``m* = F (b (1 + rm) + bg) / (6 B)``.

Kept true (tests/unit/balance/expert/test_exact.py)
    No plan is below the bound, by trying all; at a bandwidth of 0 nothing is worth a copy.

Sources
    Derived here; the pieces are counted in ``schedule.expert.schedule``.
"""

import math

import numpy as np

from equipoise.balance.expert.request import ExpertRequest
from equipoise.base.arrays import Ints
from equipoise.base.errors import SpecError
from equipoise.schedule.expert.schedule import add_by


def lower_bound(request: ExpertRequest, loads: Ints) -> int:
    """Rows of the fullest rank in any plan within the slots.

    Args:
        request: For its owners and slots.
        loads: Rows of each expert, int64 [X].
    """
    total, ranks = int(loads.sum()), request.ranks
    heights = add_by(request.owners, loads, ranks)
    slots = min(request.slots, len(loads))
    # The largest loads wherever they lie: a rank's own among them only raise what it may compute.
    most = heights + int(np.sort(loads)[len(loads) - slots :].sum()) if slots else heights
    low, high = -(-total // ranks), max(int(heights.max()), -(-total // ranks))
    while low < high:
        middle = (low + high) // 2
        if int(np.minimum(most, middle).sum()) >= total:
            high = middle
        else:
            low = middle + 1
    if not slots:
        return int(heights.max())
    return low


def break_even_rows(
    flop_per_s: float,
    bytes_per_s: float,
    *,
    weight_bytes: int,
    gradient_bytes: int,
    remakes: bool = True,
) -> float:
    """Rows above which a copy saves more time than its bytes take; infinite without a link.

    Args:
        flop_per_s: Speed of a rank.
        bytes_per_s: Of the link between two ranks.
        weight_bytes: Bytes of a weight's element.
        gradient_bytes: Bytes of a gradient's element.
        remakes: Whether the backward fetches the weights again.

    Raises:
        SpecError: a speed that is negative or not a number.

    >>> round(break_even_rows(4e14, 4e11, weight_bytes=2, gradient_bytes=4))
    1333
    """
    for name, value in (("speed", flop_per_s), ("bandwidth", bytes_per_s)):
        if not value >= 0 or math.isinf(value):
            raise SpecError(f"A {name} of {value} per second must be a number of at least 0.")
    moved = weight_bytes * (1 + remakes) + gradient_bytes
    return math.inf if not bytes_per_s else flop_per_s * moved / (6 * bytes_per_s)
