"""What the executor hands to whoever moves its messages, and how messages are laid out.

Why
    Whether a process group moves the messages or a loop over ranks in one process, the
    computing is the same. So the executor is a coroutine: it hands out what to post and says
    when that must have arrived, and computes in between.

Kept true (tests/unit/parallel/test_context.py)
    A message has exactly the bytes of its tensors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from equipoise.comm.mail import Parcel


@dataclass(frozen=True, slots=True, eq=False)
class Post:
    """Start these messages, and go on at once."""

    sends: list[Parcel]
    receives: list[Parcel]


@dataclass(frozen=True, slots=True)
class Await:
    """Go on when all messages that are due then have left and arrived."""

    due: int


Steps = Iterator[Post | Await]

Sections = Sequence[tuple[tuple[int, ...], torch.dtype]]
"""Shapes and dtypes of the tensors in a message, those of the wider dtype first."""


def pack(parts: Sequence[Tensor]) -> Tensor:
    """Tensors as the bytes of one message."""
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])


def allocate(sections: Sections, device: torch.device) -> Tensor:
    """Room for a message."""
    size = sum(prod(shape) * dtype.itemsize for shape, dtype in sections)
    return torch.empty(size, dtype=torch.uint8, device=device)


def unpack(data: Tensor, sections: Sections) -> list[Tensor]:
    """The tensors of a message, as views of it."""
    parts, at = [], 0
    for shape, dtype in sections:
        size = prod(shape) * dtype.itemsize
        parts.append(data[at : at + size].view(dtype).view(shape))
        at += size
    return parts
