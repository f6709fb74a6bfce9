"""What ranks run in the tests of balancing."""

import numpy as np
import torch.distributed as dist

from equipoise.base.errors import LayoutError
from equipoise.comm.group import Ranks
from equipoise.data.adapters.verl import Balancer


def split_own_batch(
    ranks: Ranks, lengths: list[list[int]], cap: int, multiple: int
) -> list[list[int]] | str:
    """This rank's micro-batches, or the refusal."""
    try:
        return Balancer("7m").split(
            np.array(lengths[ranks.rank]), cap, group=dist.group.WORLD, multiple_of=multiple
        )
    except LayoutError as error:
        return str(error)
