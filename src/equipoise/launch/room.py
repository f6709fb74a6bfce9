"""Room for a run's ranks within the limits of the shell that starts them.

Why
    Too few descriptors or too little address space end a rank deep inside torch, with words
    about a loop or a resource. Both are known before a rank starts.

Kept true (tests/unit/cli/test_bad_inputs.py)
    A run that starts here does not end for these limits; one that is refused says how to raise
    them.
"""

import resource

from equipoise.base.errors import LayoutError
from equipoise.base.units import GIB

_AGENT_DESCRIPTORS, _RANK_DESCRIPTORS = 32, 4
"""What torchrun's agent, its store and each rank beside them open: torch 2.13 starts two ranks
with 40 and not with 14; a rank holds a socket to each other rank."""

_LEAST_BYTES = 3 * GIB // 2
"""Address space of a rank that has imported torch 2.13 and joined a group of two: it ends at
0.9 GiB and trains the 2m preset at 1.7 GiB."""


def require_room(ranks: int) -> None:
    """Raise this process's limit of descriptors as far as is needed and allowed.

    Raises:
        LayoutError: the shell leaves too few descriptors, or too little address space.
    """
    needed = _AGENT_DESCRIPTORS + _RANK_DESCRIPTORS * ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise LayoutError(
            f"{ranks:,} ranks need {needed:,} file descriptors, and this shell allows {hard:,}. "
            f'Raise the limit: "ulimit -n {needed}", or start fewer ranks.'
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if space != resource.RLIM_INFINITY and space < _LEAST_BYTES:
        raise LayoutError(
            f"A rank needs {_LEAST_BYTES / GIB:.1f} GiB of address space for torch alone, and this "
            f'shell allows {space / GIB:.1f} GiB. Raise the limit: "ulimit -v unlimited".'
        )
