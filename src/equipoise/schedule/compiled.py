"""Loops over instructions, run as they stand or compiled.

Why
    Python walks some 80,000 instructions a second, and a search of layouts replays millions. A
    schedule of a few hundred is through before a compiler is loaded.

What it decides
    Which of the two runs. A *loop* is a function of tables of whole numbers of one dimension,
    some of which it fills, that returns a whole number. As it stands it gets lists, which Python
    reads faster than arrays; compiled by numba it gets the arrays. There is one text for both.

    It is compiled where one call has much to do, or where something was compiled before in this
    process. The machine code is kept on disk; the first process that needs it waits seconds.

Kept true (tests/unit/schedule/pipeline/test_compiled.py, by Hypothesis)
    Both ways fill the same numbers.

Sources
    numba: https://numba.readthedocs.io, "Compiling Python code with @jit", cache=True.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol

from equipoise.base.arrays import Ints

_WORTH_LOADING = 100_000
"""Instructions that take Python as long as it takes to load the compiler."""


class Numbers(Protocol):
    """A list or an array of whole numbers."""

    def __len__(self) -> int: ...

    def __getitem__(self, at: int, /) -> Any: ...

    def __setitem__(self, at: int, number: int, /) -> None: ...


Loop = Callable[..., int]


def run_loop(loop: Loop, instructions: int, *tables: Ints) -> int:
    """Run a loop over tables, in place.

    Args:
        loop: Of as many arguments as there are tables; it calls nothing.
        instructions: How many it walks, more or less.
        tables: int64, contiguous.

    Returns:
        What the loop returns.
    """
    if instructions >= _WORTH_LOADING or is_loaded():
        return int(compile_loop(loop)(*tables))
    lists = [table.tolist() for table in tables]
    found = loop(*lists)
    for table, numbers in zip(tables, lists, strict=True):
        table[:] = numbers
    return found


def is_loaded() -> bool:
    """Whether a loop was compiled in this process."""
    return compile_loop.cache_info().currsize > 0


@functools.cache
def compile_loop(loop: Loop) -> Loop:
    """A loop as machine code, from disk if it was compiled before.

    Cost: 1 s for the first loop, to load the compiler; seconds for one never compiled before.
    """
    import numba

    tables = ", ".join("int64[::1]" for _ in inspect.signature(loop).parameters)
    try:
        compiled: Loop = numba.njit(f"int64({tables})", cache=True)(loop)
    except RuntimeError:  # neither beside the source nor in the user's cache may it write
        compiled = numba.njit(f"int64({tables})")(loop)
    return compiled
