"""Hold up an abort of this process for some seconds, so that it can be said what led to it.

Why
    gloo ends the process of a rank that gets more bytes than it expects: an exception in a thread
    of its own, which nobody can catch, and so SIGABRT. The message names neither collective, and
    0.1 s later the other ranks are ended, too.

What it decides
    The handler of SIGABRT is libc's own ``sleep``: called with the number of the signal it holds up
    the thread that aborts for six seconds, and then the abort goes on. It runs no Python, which may
    hold a lock that the aborting thread needs. The other threads live on, among them the watchdog.

    Only the first SIGABRT is held up.

Kept true (tests/multi/comm/test_mismatch.py)
    Ranks that sum tensors of other sizes are named with both; an abort still ends the process.

Sources
    signal-safety(7) lists ``sleep``; abort(3) goes on when a handler returns.
"""

import ctypes
import signal


def delay_aborts() -> None:
    """Hold up the next abort of this process."""
    _handle("sleep")


def restore_aborts() -> None:
    """Let aborts end this process at once."""
    _handle(None)


def _handle(function: str | None) -> None:
    libc = ctypes.CDLL(None)
    try:
        install = libc.sysv_signal  # as signal, but for one signal only
    except AttributeError:  # another libc than glibc
        return
    install.argtypes = (ctypes.c_int, ctypes.c_void_p)
    install.restype = ctypes.c_void_p
    handler = None if function is None else ctypes.cast(getattr(libc, function), ctypes.c_void_p)
    install(signal.SIGABRT, handler)
