"""How the process of a rank ends, whether it was started or kept ready.

Kept true (tests/multi/launch/test_launch.py, tests/multi/fault/test_spares.py)
    A rank ends with the exit code of what happened, and a rank that was kept ready runs as any.
"""

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn


def run_and_leave(main: Callable[[], int]) -> NoReturn:
    """Run one rank, and end this process with the exit code of what happened."""
    try:
        leave(main())
    except Exception:
        with suppress(OSError):
            traceback.print_exc()
        leave(1)


def leave(code: int) -> NoReturn:
    """End at once: nothing of the run is open any more, and destructors of C++ threads may abort.

    One rank in some hundreds died so after its last step had been saved ("terminate called
    without an active exception", torch 2.13 with gloo), and its run was reported as failed.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)
