"""What the executor yields to whoever moves its messages, and how messages are laid out.

Why
    A process group or a loop over ranks in one process may move the messages; the compute is the
    same. So the executor is a coroutine: it yields what to post and what must have arrived, and
    computes in between.

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
    """Start these messages without waiting."""

    sends: list[Parcel]
    receives: list[Parcel]


@dataclass(frozen=True, slots=True)
class Await:
    """Wait until all messages due then have been sent and received."""

    due: int


Steps = Iterator[Post | Await]

Sections = Sequence[tuple[tuple[int, ...], torch.dtype]]
"""Shapes and dtypes of the tensors in a message, those of the wider dtype first."""


def pack(parts: Sequence[Tensor]) -> Tensor:
    """Pack tensors into the bytes of one message."""
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])


def allocate(sections: Sections, device: torch.device) -> Tensor:
    """Allocate the bytes of a message."""
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
