"""Threads that prepare requests and write answers leave the cores to those that compute.

Why
    A thread that computes calls hundreds of operators in an iteration, and takes the interpreter's
    lock again after each. While another thread runs Python code, that takes a *switch interval*
    each time: by default 5 ms, as long as some whole iterations. And all threads of a parallel
    region wait for the one whose core is busy with another request's text.

What it decides
    A thread gives the lock back after a tenth of a millisecond. Threads that cut texts into tokens,
    read long bodies and write long answers have a lower priority than those that compute; each text
    is cut by the thread that was asked to, and not by a pool of the tokenizer's own.

Kept true (tests/unit/serve/test_side.py)
    Such a thread has its lower priority, and no other thread has.

Sources
    Each thread of Linux has a priority of its own: setpriority(2), under C library differences.
"""

import asyncio
import contextlib
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

_SWITCH_S = 1e-4
_LOW_PRIORITY = 10
"""A tenth of a core that a thread of normal priority wants, too, and any core that is idle."""
_MOST_THREADS = 8


def leave_cores() -> None:
    """Let the running event loop's side threads leave cores and interpreter to who computes."""
    sys.setswitchinterval(min(_SWITCH_S, sys.getswitchinterval()))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    threads = ThreadPoolExecutor(_MOST_THREADS, "side", initializer=_lower_priority)
    asyncio.get_running_loop().set_default_executor(threads)


def _lower_priority() -> None:
    """Lower the calling thread's, where a thread has one."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)
