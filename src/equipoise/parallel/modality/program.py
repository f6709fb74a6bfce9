"""Ranks agree on who encodes the items of a step, before a byte is sent.

What it decides
    Nothing: every rank computes the same plan from the pack, by integers
    (``balance.modality.step``), and compares its digest with the others'.

Kept true (tests/multi/parallel/test_modality.py)
    Ranks whose plans differ are named on every rank, and nothing is sent.
"""

import numpy as np

from equipoise.base.errors import LayoutError
from equipoise.comm.group import Ranks
from equipoise.comm.meet import name_ranks
from equipoise.schedule.modality.bridge import BridgePlan


def require_one_bridge(plan: BridgePlan, step: int, ranks: Ranks) -> None:
    """Refuse a step whose items ranks have dealt otherwise; every rank calls it.

    Raises:
        LayoutError: on every rank; names those that differ from rank 0.
    """
    numbers = ranks.gather_integers([int(plan.digest[:15], 16)]).flatten()
    differing = np.flatnonzero(numbers.numpy() != int(numbers[0])).tolist()
    if differing:
        named = name_ranks(differing)
        raise LayoutError(
            f"{named[0].upper()}{named[1:]} dealt the images and sound of step {step} otherwise "
            f"than rank 0. Nothing was sent or changed by it. Give every machine the same corpus "
            f"and the same version of equipoise and of NumPy."
        )
