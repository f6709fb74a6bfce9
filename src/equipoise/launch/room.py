"""Room for a run's ranks within the limits of the shell that starts them.

Why
    With too few descriptors or too little address space a rank fails deep inside torch, with an
    obscure error. Both limits are known before a rank starts.

Kept true (tests/unit/cli/test_bad_inputs.py)
    A run that starts does not fail because of these limits; a refused one says how to raise them.
"""

import resource

from equipoise.base.errors import LayoutError
from equipoise.base.units import GIB

_AGENT_DESCRIPTORS, _RANK_DESCRIPTORS = 32, 4
"""Files opened by torchrun's agent, its store and each rank: torch 2.13 starts two ranks with 40
but not with 14. A rank also holds a socket to each other rank."""

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
            f"{ranks:,} ranks need {needed:,} file descriptors, but this shell allows {hard:,}. "
            f'Raise the limit: "ulimit -n {needed}", or start fewer ranks.'
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if space != resource.RLIM_INFINITY and space < _LEAST_BYTES:
        raise LayoutError(
            f"A rank needs {_LEAST_BYTES / GIB:.1f} GiB of address space for torch alone, but this "
            f'shell allows {space / GIB:.1f} GiB. Raise the limit: "ulimit -v unlimited".'
        )
