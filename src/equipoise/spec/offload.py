"""What a step keeps in host memory instead of on the device.

What it decides
    The settings, and how much stays on the device:

    ===========  ==================================================================================
    optimizer    master weights and moments are in host memory, where the host updates them
    activations  what a layer keeps goes to the host behind its forward and comes back before its
                 backward; of ``KEPT_LAYERS`` layers it stays, or is on its way
    both         both
    ===========  ==================================================================================

Kept true (tests/unit/cost/test_offload.py)
    The settings are all combinations of the two.

Sources
    Optimizer: ZeRO-Offload, arXiv:2101.06840. All activations but those of two layers: ByteScale,
    arXiv:2502.21231, equation 3.
"""

from typing import Literal

Offload = Literal["none", "optimizer", "activations", "both"]

OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "activations", "both")

KEPT_LAYERS = 2
"""Layers whose activations are on the device while a micro-batch is copied out or in."""


def offloads_optimizer(setting: Offload) -> bool:
    """Whether the host updates the weights.

    >>> [offloads_optimizer(setting) for setting in OFFLOADS]
    [False, True, False, True]
    """
    return setting in ("optimizer", "both")


def offloads_activations(setting: Offload) -> bool:
    """Whether activations wait in host memory.

    >>> [offloads_activations(setting) for setting in OFFLOADS]
    [False, False, True, True]
    """
    return setting in ("activations", "both")


def resident_layers(pp: int) -> int:
    """Layers of a rank whose activations are on the device at once.

    In a pipeline one micro-batch is copied out while another is copied in.

    >>> resident_layers(1), resident_layers(8)
    (2, 4)
    """
    return KEPT_LAYERS * (1 if pp == 1 else 2)
