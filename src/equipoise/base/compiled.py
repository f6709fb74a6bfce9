"""Functions compiled by numba, whose machine code is kept on disk where that is possible."""

from collections.abc import Callable
from typing import Any


def keep_compiled(function: Callable[..., Any], *signature: str, **settings: Any) -> Any:
    """Compile a function, now for a signature, or when it is first called.

    Cost: loads numba, 1 s the first time in a process.

    Args:
        function: In the part of Python that numba compiles.
        signature: Types of its arguments and of what it returns, in numba's words.
        settings: Of ``numba.njit``.
    """
    import numba

    compiler: Any = numba.njit
    try:
        return compiler(*signature, cache=True, **settings)(function)
    except RuntimeError:  # it can write neither beside the source nor in the user's cache
        return compiler(*signature, **settings)(function)
