"""The memory of tensors as arrays that compiled code takes."""

from typing import Any

import torch
from torch import Tensor


def bits_of(x: Tensor) -> Any:
    """A CPU tensor's memory as an array: bf16 as the uint16 of its bits."""
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()
