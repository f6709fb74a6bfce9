"""Compiled code for rows on CPU: what numba lacks of bf16, and an exponential that vectorises.

What it decides
    bf16 arrives as the uint16 of its bits. Sums are in fp32, in an order that the compiled code
    fixes: a row gets the same bits at every place and on every thread.

    What runs in parallel is always the code as numba's cache has it: where it has none, another
    process compiles it first. Code that was just compiled is optimised once less than what is kept
    of it, and a few sums have other bits; a server's first start would differ from its second.

Kept true (tests/unit/serve/engine/test_ahead.py, test_kernel.py)
    A process that had the code compiled gets the bits that one gets which found it; the first
    kernel leaves torch the threads that it had.

Sources
    exp: Cephes' ``expf``, https://www.netlib.org/cephes.
"""

import base64
import importlib
import multiprocessing
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from numba.np.ufunc import parallel

_ZERO, _ONE, _HALF = np.float32(0), np.float32(1), np.float32(0.5)
_LEAST = np.float32(-87)
"""Below this exp is 0; the smallest normal float32 is exp(-87.3)."""

_LOG2_E = np.float32(1.44269504088896341)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_P0, _P1 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3)
_P2, _P3 = np.float32(8.3334519073e-3), np.float32(4.1665795894e-2)
_P4, _P5 = np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)

_CORES: int = vars(numba.config)["NUMBA_NUM_THREADS"]

_FEW_ROWS = 16
"""Norms, rotations and gates of few rows take microseconds. To wait for another thread takes as
long, and far longer where others use its core."""

_FAST = {"contract", "reassoc", "nsz"}
"""NaN stays NaN; sums are vectorised, in an order that the compiled code fixes."""


def compile_rows(*, parallel: bool = False) -> Callable[[Any], Any]:
    """Compile a function when it is first called, and keep the code where that is possible."""

    def compiled(function: Any) -> Any:
        settings: Any = {"fastmath": _FAST, "error_model": "numpy", "parallel": parallel}
        settings["nogil"] = parallel  # another thread may compute meanwhile
        try:
            kept = numba.njit(cache=True, **settings)(function)
        except RuntimeError:  # it can write neither beside the source nor in the user's cache
            return numba.njit(**settings)(function)
        return KeptKernel(function, kept) if parallel else kept

    return compiled


class KeptKernel:
    """A compiled function that runs as the cache has it; its first two arguments are arrays."""

    def __init__(self, function: Any, compiled: Any) -> None:
        self._place = function.__module__, function.__name__
        self._run = compiled
        self._ready: set[tuple[Any, Any]] = set()
        """Dtypes of the first two arrays, on which those of the others depend."""

    def __call__(self, *given: Any) -> Any:
        """Call it; all arrays are contiguous."""
        kinds = given[0].dtype, given[1].dtype
        if kinds not in self._ready:
            self._prepare(self.kinds(*given))
            self._ready.add(kinds)
        return self._run(*given)

    def kinds(self, *given: Any) -> tuple[Any, ...]:
        """The types of some arguments."""
        return tuple(map(self._run.typeof_pyval, given))

    def is_kept(self, kinds: tuple[Any, ...]) -> bool:
        """Whether the cache has code for arguments of these types."""
        # numba has no public way to ask without compiling.
        with _same_torch_threads():  # what is loaded makes the pool
            return self._run._cache.load_overload(kinds, self._run.targetctx) is not None

    def _prepare(self, kinds: tuple[Any, ...]) -> None:
        """Have another process compile it if the cache has no code for such arguments."""
        if not self.is_kept(kinds):
            words = base64.b64encode(pickle.dumps(kinds)).decode()
            command = [sys.executable, "-m", __name__, *self._place, words]
            subprocess.run(command, check=False, stderr=subprocess.DEVNULL)

    def compile(self, kinds: tuple[Any, ...]) -> None:
        """Compile it here for arguments of these types, so that the cache has it."""
        self._run.compile(kinds)


def _make_float(context: Any, bits: Any) -> Any:
    del context, bits

    def generate(_: Any, builder: Any, __: Any, given: Any) -> Any:
        return builder.bitcast(given[0], ir.FloatType())

    return types.float32(types.uint32), generate


def _make_wide(context: Any, x: Any) -> Any:
    del context

    def generate(_: Any, builder: Any, signature: Any, given: Any) -> Any:
        if signature.args[0] != types.uint16:
            return given[0]
        bits = builder.zext(given[0], ir.IntType(32))
        return builder.bitcast(builder.shl(bits, ir.Constant(ir.IntType(32), 16)), ir.FloatType())

    return types.float32(x), generate


def _make_like(context: Any, x: Any, kind: Any) -> Any:
    del context, x

    def generate(_: Any, builder: Any, signature: Any, given: Any) -> Any:
        if signature.args[1] != types.uint16:
            return given[0]
        bits = builder.bitcast(given[0], ir.IntType(32))
        # To nearest, ties to even; what is not a number stays so.
        odd = builder.and_(
            builder.lshr(bits, ir.Constant(bits.type, 16)), ir.Constant(bits.type, 1)
        )
        near = builder.add(bits, builder.add(odd, ir.Constant(bits.type, 0x7FFF)))
        is_number = builder.fcmp_ordered("ord", given[0], given[0])
        kept = builder.select(is_number, near, ir.Constant(bits.type, 0x7FC00000))
        return builder.trunc(builder.lshr(kept, ir.Constant(bits.type, 16)), ir.IntType(16))

    out = types.uint16 if kind == types.uint16 else types.float32
    return out(types.float32, kind), generate


_from_bits: Any = intrinsic(_make_float)
"""The float32 with the bits of a uint32."""

wide: Any = intrinsic(_make_wide)
"""A float32 as it is; bf16, whose bits arrive as uint16, as float32."""

narrow: Any = intrinsic(_make_like)
"""A float32 as it is, or the bits of its bf16, as the second argument has it."""


@compile_rows()
def exp(x: Any) -> Any:
    """E to the power of a float32 up to 88; 0 below -87."""
    if x <= _LEAST:
        return _ZERO
    n = np.floor(x * _LOG2_E + _HALF)
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = ((((_P0 * r + _P1) * r + _P2) * r + _P3) * r + _P4) * r + _P5
    p = p * r * r + r + _ONE
    return p * _from_bits(np.uint32(np.int32(n) + np.int32(127)) << np.uint32(23))


def use_threads(threads: int) -> None:
    """Run kernels that this thread calls on this many threads, at most one per core."""
    with _same_torch_threads():
        numba.set_num_threads(min(threads, _CORES))


@contextmanager
def _same_torch_threads() -> Iterator[None]:
    """Undo that OpenMP, which torch shares, gives whoever makes numba's pool a thread per core."""
    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)


def use_threads_for(rows: int) -> None:
    """Run kernels that compute little for each row on all threads, or on one if rows are few."""
    use_threads(1 if rows <= _FEW_ROWS else torch.get_num_threads())


def lock_without_name() -> None:
    """Guard the first call of a parallel kernel in this process by a lock that has no name.

    Numba's has one, in a process that a fork server has started: if it is killed, the name stays,
    and Python warns of a leaked semaphore when the server ends.
    """
    vars(parallel)["_backend_init_process_lock"] = multiprocessing.get_context("fork").RLock()


def can_run_together() -> bool:
    """Whether two threads may run kernels at the same time; known once one has run."""
    return bool(vars(numba)["threading_layer"]() != "workqueue")


if __name__ == "__main__":
    module, name, kinds = sys.argv[1:]
    kernel: KeptKernel = getattr(importlib.import_module(module), name)
    kernel.compile(pickle.loads(base64.b64decode(kinds)))  # noqa: S301 - of our own parent
