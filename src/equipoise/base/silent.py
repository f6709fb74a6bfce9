"""Keep what a library prints by itself out of standard output.

Why
    Compiled solvers have lines of their developers that no option turns off. One of them in the
    middle of a JSON document makes the document unreadable.

What it decides
    What is written to file descriptor 1 inside a block is dropped, C's buffers included. A process
    has one such descriptor, so only its main thread does this: two threads that silence and
    restore it in turn could leave it silent.

Kept true (tests/unit/base/test_silent.py)
    What was printed before and after a block arrives, in order; what C prints inside it does not.
"""

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterator

_STDOUT = 1


@contextlib.contextmanager
def silent_stdout() -> Iterator[None]:
    """Drop what is written to standard output inside the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        kept = os.dup(_STDOUT)
    except OSError:  # it is closed
        yield
        return
    c_library = ctypes.CDLL(None)
    _flush(c_library)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, _STDOUT)
        yield
        c_library.fflush(None)
    finally:
        os.dup2(kept, _STDOUT)
        os.close(nowhere)
        os.close(kept)


def _flush(c_library: ctypes.CDLL) -> None:
    with contextlib.suppress(OSError, ValueError):  # a reader that left, or a closed stream
        sys.stdout.flush()
    c_library.fflush(None)
