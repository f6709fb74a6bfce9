"""Send a tensor from the host to a rank's device, without waiting for the device.

Why
    A copy from ordinary memory makes the host wait until the device has come to it, with everything
    that was launched before: a micro-batch's tokens would stop the launching of its kernels.

What it decides
    Tensors go through pinned memory, which torch keeps and uses again; on a CPU nothing is copied.

Kept true (tests/multi/train/test_waits.py)
    No step of a training copies to its device in any other way.

Sources
    ``Tensor.to``: with ``non_blocking`` a copy from pinned memory does not block the host. torch
    gives the pinned memory away again only when the copy is over.
"""

import torch
from torch import Tensor


def send(host: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, in the order of what is launched there.

    Args:
        host: In the host's memory, or on the device already.
        device: Where it is used.
    """
    if device.type != "cuda" or not host.is_cpu or not host.numel():
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
