"""Fingerprints of weights and moments: 64 bits of each tensor that a rank holds.

Why
    A flipped bit in memory raises no error. It trains on, and is in every later checkpoint.

What it decides
    On a processor a fingerprint is xxh3, the fastest hash that reads every byte; on a device it is
    a sum of all words, each times an odd number of its place, modulo 2**64. Either changes with
    any bit, the sign of a zero, the payload of a NaN, and with two equal flips or two values that
    swap places, which an XOR or a plain sum would not see.

    A weight that is split has a fingerprint of the part that this rank holds. Ranks along the
    replicating axis of its mesh hold the same part (``copies``).

Kept true (tests/unit/fault/test_fingerprint.py)
    Every single flip changes either fingerprint; so do swaps, double flips, negated pairs.

Sources
    xxh3: Y. Collet, https://github.com/Cyan4973/xxHash.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from equipoise.base.axes import REPLICATE_AXIS

_CHUNK = 1 << 16
"""Words that a device sums at once, times one table of odd numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldTensor:
    """A tensor of this rank's state."""

    name: str
    tensor: Tensor
    """Its local part."""
    copies: tuple[int, ...]
    """All ranks that hold the same bytes, this one among them."""


class HeldState:
    """Everything that outlives a step on one rank: weights, trained or not, and their moments.

    Args:
        module: Sharded weights, as they are between steps.
        optimizer: Its moments, as far as there are any.
        rank: This rank.
        beside: Weights that lie in a file, whose blocks have sums of their own.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        rank: int,
        *,
        beside: Collection[nn.Parameter] | None = None,
    ) -> None:
        left = set(beside or ())
        self._weights = [each for each in module.named_parameters() if each[1] not in left]
        self._optimizer, self._rank = optimizer, rank
        self._known: list[int] = []
        self._held: list[HeldTensor] = []

    def held(self) -> list[HeldTensor]:
        """All tensors as they are now, in one order on every rank."""
        tensors = list(self._tensors())
        addresses = [_local(tensor).data_ptr() for _, tensor in tensors]
        if addresses != self._known:  # an optimizer has made or loaded moments
            self._known = addresses
            self._held = [
                HeldTensor(name, _local(tensor), _copies(tensor, self._rank))
                for name, tensor in tensors
            ]
        return self._held

    @torch.no_grad()
    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self._weights:
            yield name, weight.detach()
            for moment, value in self._optimizer.state.get(weight, {}).items():
                if isinstance(value, Tensor):
                    yield f"{moment} of {name}", value


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def fingerprints(held: Sequence[HeldTensor]) -> list[int]:
    """A fingerprint of each tensor; reads their bytes once."""
    if all(each.tensor.device.type == "cpu" for each in held):
        return [_digest(each.tensor) for each in held]
    numbers: list[int] = torch.stack([weighted_sum(each.tensor) for each in held]).tolist()
    return numbers


def _digest(tensor: Tensor) -> int:
    view = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return xxhash.xxh3_64_intdigest(view.data)


def _copies(tensor: Tensor, rank: int) -> tuple[int, ...]:
    """The ranks that hold the same part of a tensor; counters of steps are each rank's own."""
    if not isinstance(tensor, DTensor):
        return (rank,)
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or ()
    place = mesh.get_coordinate()
    if REPLICATE_AXIS not in names or place is None:
        return (rank,)
    axis = names.index(REPLICATE_AXIS)
    at = tuple(slice(None) if dim == axis else index for dim, index in enumerate(place))
    ranks: list[int] = mesh.mesh[at].tolist()
    return tuple(sorted(ranks))


def fold_sums(sums: Sequence[int]) -> int:
    """One number of several fingerprints, below 2**63.

    >>> fold_sums([1, 2]) == fold_sums([2, 1])
    False
    """
    data = b"".join((value % (1 << 64)).to_bytes(8, "little") for value in sums)
    return xxhash.xxh3_64_intdigest(data) >> 1


def weighted_sum(tensor: Tensor) -> Tensor:
    """The sum of a tensor's 32-bit words, each times an odd number of its place; int64 scalar.

    One changed bit changes the sum by a power of two below 2**32 times an odd number, which is
    never 0 modulo 2**64.

    Args:
        tensor: Of any dtype; widths that do not divide four bytes are summed byte by byte.
    """
    flat = tensor.detach().contiguous().view(-1)
    words = flat.view(torch.uint8)
    if words.numel() % 4 == 0 and words.data_ptr() % 4 == 0:
        words = words.view(torch.int32)
    columns, rows = _odd(_CHUNK, 1, tensor.device), -(-words.numel() // _CHUNK)
    factors = _odd(max(1, rows), 2, tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for row, chunk in enumerate(words.split(_CHUNK)):
        total += (chunk.long() * columns[: chunk.numel()]).sum() * factors[row]
    return total


def _odd(count: int, stream: int, device: torch.device) -> Tensor:
    """Odd numbers without a pattern, int64 [count]: splitmix64 of their places."""
    x = torch.arange(1, count + 1, dtype=torch.int64, device=device) + (stream << 32)
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x | 1
