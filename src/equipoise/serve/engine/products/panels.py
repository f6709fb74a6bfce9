"""How weights lie in memory for the products: panels of outputs, two inputs to a word.

::

    panel of some outputs   word [pair of inputs][output]
"""

import torch
from torch import Tensor


def panels_of(weight: Tensor, lanes: int) -> Tensor:
    """A bf16 weight [outputs, inputs] as uint32 [panels, inputs / 2, lanes], zeros at the end."""
    outputs, inputs = weight.shape
    padded = weight.new_zeros(-(-outputs // lanes) * lanes, inputs)
    padded[:outputs] = weight
    words = padded.view(torch.int32).view(-1, lanes, inputs // 2)
    return words.transpose(1, 2).contiguous().view(torch.uint32)


def added_rows(x: Tensor, added: Tensor | None, outputs: int) -> tuple[Tensor, int]:
    """What is added to products [rows or 1, outputs], and its rows from one row to the next.

    Args:
        x: Rows of the product.
        added: A bias [outputs], rows [rows, outputs], or nothing.
        outputs: Of the product.
    """
    if added is None:
        return x.new_zeros(1, outputs), 0
    return added.contiguous().view(-1, outputs), added.dim() - 1
