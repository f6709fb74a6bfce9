"""STREAM's four kernels on tensors: how fast one core, or one device, moves memory.

Why
    Norms, gates and the optimizer do only a few operations on each number they move, so their
    price is bandwidth. Each kernel here is one pass over its arrays, like a loop in C
    (``bench/local/stream.py`` holds triad to 97% of that loop).

Sources
    STREAM: J. McCalpin, https://www.cs.virginia.edu/stream/ref.html. Bytes are counted as in its
    tables, without the reads of a cache that allocates on write.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_SCALAR = 3.0

KERNELS = ("copy", "scale", "add", "triad")

_ARRAYS = {"copy": 2, "scale": 2, "add": 3, "triad": 3}
"""Arrays that a kernel reads or writes."""


@dataclass(frozen=True, slots=True)
class StreamArrays:
    """STREAM's arrays ``a``, ``b`` and ``c``."""

    a: Tensor
    b: Tensor
    c: Tensor

    @classmethod
    def allocate(cls, elements: int, device: torch.device | None = None) -> "StreamArrays":
        """Three fp64 arrays with STREAM's initial values, every page touched."""
        a, b, c = (
            torch.full((elements,), value, dtype=torch.float64, device=device)
            for value in (1.0, 2.0, 0.0)
        )
        return cls(a, b, c)

    def kernel(self, name: str) -> Callable[[], object]:
        """One of STREAM's kernels, as one pass over memory.

        >>> arrays = StreamArrays.allocate(4)
        >>> for name in KERNELS:
        ...     _ = arrays.kernel(name)()
        >>> arrays.a.tolist(), arrays.b.tolist(), arrays.c.tolist()
        ([15.0, 15.0, 15.0, 15.0], [3.0, 3.0, 3.0, 3.0], [4.0, 4.0, 4.0, 4.0])
        """
        a, b, c = self.a, self.b, self.c
        kernels: dict[str, Callable[[], object]] = {
            "copy": lambda: c.copy_(a),
            "scale": lambda: torch.mul(c, _SCALAR, out=b),
            "add": lambda: torch.add(a, b, out=c),
            "triad": lambda: torch.add(b, c, alpha=_SCALAR, out=a),
        }
        return kernels[name]

    def bytes_of(self, name: str) -> int:
        """Bytes that a kernel reads and writes, as STREAM counts them."""
        return _ARRAYS[name] * self.a.numel() * self.a.element_size()
