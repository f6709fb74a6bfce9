"""Pack and unpack parts of tensors in few large copies.

Why
    The parts of a tensor that several ranks get are rarely contiguous. Copying piece by piece
    costs a call each; a canonical block (``schedule.boxing``) says which pieces one copy can take.

What it decides
    Equal pieces at equal distances are packed together. A contiguous run needs no copy: it is
    sent as a view.

Kept true (tests/unit/parallel/boxing/test_blocks.py, by Hypothesis)
    Packing keeps the parts' elements in order; unpacking what was packed is the identity.

Sources
    TEMPI: arXiv:2012.14363.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from equipoise.schedule.block import Block, Box, block_in, join_blocks

How = Literal["copy", "sum", "max"]
"""What happens to existing elements: replaced, added to, or kept where larger."""


def block_of(tensor: Tensor, box: Box) -> Block:
    """A part of a tensor, as a canonical block of its storage."""
    return block_in(box, tensor.stride(), int(tensor.storage_offset()))


def view_of(memory: Tensor, block: Block) -> Tensor:
    """A block as a tensor of its counts, without a copy.

    ``memory`` is any tensor on the block's storage.
    """
    counts, strides = block.counts or (1,), block.strides or (1,)
    return memory.as_strided(counts, strides, block.offset)


def pack(memory: Tensor, blocks: Sequence[Block]) -> Tensor:
    """The elements of blocks, one after another [elements]; a view if they are one run."""
    joined = join_blocks(blocks)
    if len(joined) == 1 and joined[0].is_run:
        return view_of(memory, joined[0])
    packed = memory.new_empty(sum(each.elements for each in joined))
    at = 0
    for each in joined:
        view = view_of(memory, each)
        packed[at : at + each.elements].view(view.shape).copy_(view)
        at += each.elements
    return packed


def unpack(
    packed: Tensor,
    memory: Tensor,
    blocks: Sequence[Block],
    how: How = "copy",
) -> None:
    """Write packed elements into blocks, or combine them with what is there.

    Blocks are disjoint, and lie in the storage of ``memory``.

    >>> memory = torch.ones(2, 3)
    >>> unpack(torch.tensor([4.0, 5.0]), memory, [block_of(memory, [(0, 2), (1, 2)])], "sum")
    >>> memory.tolist()
    [[1.0, 5.0, 1.0], [1.0, 6.0, 1.0]]
    """
    at = 0
    for each in join_blocks(blocks):
        view = view_of(memory, each)
        put(packed[at : at + each.elements].view(view.shape), view, how)
        at += each.elements


def put(part: Tensor, view: Tensor, how: How) -> None:
    """Write a tensor into a view, or combine it with what is there."""
    if how == "copy":
        view.copy_(part)
    elif how == "sum":
        view.add_(part)
    else:
        torch.maximum(view, part, out=view)
