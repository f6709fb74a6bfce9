"""Threads beside those that compute have a lower priority, and no others."""

import asyncio
import os
import sys
import threading

from equipoise.serve.side import leave_cores


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_only_side_threads_have_a_lower_priority() -> None:
    async def look() -> tuple[int, int]:
        leave_cores()
        return await asyncio.to_thread(priority), priority()

    before, interval_s = priority(), sys.getswitchinterval()
    try:
        beside, own = asyncio.run(look())
        assert own == priority() == before
        assert beside == (max(before, 10) if sys.platform == "linux" else before)
        assert sys.getswitchinterval() <= 1e-4
    finally:
        sys.setswitchinterval(interval_s)
