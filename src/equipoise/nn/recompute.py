"""Run a part of a layer again in the backward instead of keeping what it made.

What it decides
    How, not what: ``spec.recompute`` says which parts of which layers. A part keeps its
    arguments; in the backward it runs again, with the same operations in the same order, so that
    every gradient has the same bits. Ranks that exchange something inside of it do so again, each
    at the same place of its backward. Gathered weights are those of the layer, which ZeRO has
    gathered for its backward by then. A router chooses the same experts, because the biases of its
    scores change between steps alone, and counts them once (``nn.moe.balance``).

Kept true (tests/unit/nn/test_decoder.py, tests/multi/train/test_recompute.py)
    Loss and all gradients equal those without recomputation, bitwise.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.utils.checkpoint import checkpoint

Out = TypeVar("Out")


def again(part: Callable[..., Out], *args: object) -> Out:
    """What ``part`` returns for these arguments, of which alone is kept for the backward.

    Nothing in ``nn`` draws random numbers, so no generator's state is kept.
    """
    if not torch.is_grad_enabled():
        return part(*args)
    out: Out = checkpoint(part, *args, use_reentrant=False, preserve_rng_state=False)
    return out
