"""Run a part of a layer again in the backward instead of keeping its activations.

What it decides
    How, not what: ``spec.recompute`` chooses the parts and layers. A part keeps its arguments; in
    the backward it runs again, with the same operations in the same order, so that every gradient
    has the same bits. Ranks that communicate inside it do so again, each at the same point of its
    backward. ZeRO has gathered the layer's weights for its backward by then. A router chooses
    the same experts, because its biases change only between steps, and counts them once
    (``nn.moe.balance``).

Kept true (tests/unit/nn/test_decoder.py, tests/multi/train/test_recompute.py)
    Loss and all gradients equal those without recomputation, bitwise.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.utils.checkpoint import checkpoint

Out = TypeVar("Out")


def again(part: Callable[..., Out], *args: object) -> Out:
    """Call ``part``, keeping only its arguments for the backward.

    Nothing in ``nn`` draws random numbers, so no generator's state is kept.
    """
    if not torch.is_grad_enabled():
        return part(*args)
    out: Out = checkpoint(part, *args, use_reentrant=False, preserve_rng_state=False)
    return out
