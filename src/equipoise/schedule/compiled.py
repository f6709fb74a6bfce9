"""Run loops over instructions in Python, or compiled.

Why
    Python walks some 80,000 instructions per second, and a search of layouts replays millions.
    A schedule of a few hundred finishes before a compiler is loaded.

What it decides
    Which of the two runs. A *loop* is a function of one-dimensional integer tables that fills
    some of them and returns an integer. In Python it gets lists, which are faster to read than
    arrays; compiled by numba it gets the arrays. Both run the same source.

    A loop is compiled if one call has much to do, or if this process has compiled before.
    Machine code is cached on disk; the first process that needs it waits seconds.

Kept true (tests/unit/schedule/pipeline/test_compiled.py, by Hypothesis)
    Both ways compute the same numbers.

Sources
    numba: https://numba.readthedocs.io, "Compiling Python code with @jit", cache=True.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol

from equipoise.base.arrays import Ints
from equipoise.base.compiled import keep_compiled

_WORTH_LOADING = 100_000
"""Instructions that Python runs in the time to load the compiler."""


class Numbers(Protocol):
    """A list or an array of integers."""

    def __len__(self) -> int: ...

    def __getitem__(self, at: int, /) -> Any: ...

    def __setitem__(self, at: int, number: int, /) -> None: ...


Loop = Callable[..., int]


def run_loop(loop: Loop, instructions: int, *tables: Ints) -> int:
    """Run a loop over tables, in place.

    Tables are contiguous int64; ``instructions`` is roughly how many the loop walks.

    Returns:
        What the loop returns.
    """
    if instructions >= _WORTH_LOADING or is_loaded():
        return int(compile_loop(loop)(*tables))
    lists = [table.tolist() for table in tables]
    result = loop(*lists)
    for table, numbers in zip(tables, lists, strict=True):
        table[:] = numbers
    return result


def is_loaded() -> bool:
    """Whether this process has compiled a loop."""
    return compile_loop.cache_info().currsize > 0


@functools.cache
def compile_loop(loop: Loop) -> Loop:
    """Compile a loop to machine code, from the cache on disk if possible.

    Cost: 1 s for the first loop, to load the compiler; seconds for one never compiled before.
    """
    tables = ", ".join("int64[::1]" for _ in inspect.signature(loop).parameters)
    compiled: Loop = keep_compiled(loop, f"int64({tables})")
    return compiled
