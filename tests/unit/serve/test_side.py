"""Threads beside those that compute have a lower priority, and no others."""

import asyncio
import os
import sys
import threading

import pytest

from equipoise.serve.side import leave_cores


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_only_side_threads_have_a_lower_priority() -> None:
    async def look() -> tuple[int, int]:
        leave_cores()
        return await asyncio.to_thread(priority), priority()

    before, interval_s = priority(), sys.getswitchinterval()
    try:
        beside, own = asyncio.run(look())
        assert own == priority() == before
        assert beside == max(before, 10)
        assert sys.getswitchinterval() <= 1e-4
    finally:
        sys.setswitchinterval(interval_s)
