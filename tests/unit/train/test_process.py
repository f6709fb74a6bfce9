"""What a training process sets for itself: its cores, how its allocator uses freed memory."""

import os
import subprocess
import sys

import pytest

from equipoise.launch.agent import ALLOCATOR
from equipoise.observe.machine import usable_cores

PLACES = """
import ctypes
from equipoise.train.process import keep_freed_memory, spare_small_chunks

keep_freed_memory()
{spare}
libc = ctypes.CDLL("libc.so.6")
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def tensor(size):
    place = ctypes.c_void_p()
    libc.posix_memalign(ctypes.byref(place), ctypes.c_size_t(64), ctypes.c_size_t(size))
    return place.value

held = [tensor(32 << 20) for _ in range(16)]
small = [libc.malloc(size) for size in (24, 40, 56, 72, 88) * 50]
again = 0
for first in range(0, 16, 4):
    for each in held[first : first + 3]:
        libc.free(each)
    again += abs(tensor(96 << 20) - held[first]) <= 64
print(again)
"""


def places_used_again(spare: str) -> int:
    """Of four times three neighbours freed, how often one three times as large takes their place.

    Small objects were made when the slivers beside them were free.
    """
    environment = {**os.environ, "GLIBC_TUNABLES": ALLOCATOR}
    done = subprocess.run(
        [sys.executable, "-c", PLACES.format(spare=spare)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def test_small_objects_leave_the_places_of_tensors_whole() -> None:
    assert places_used_again("spare_small_chunks()") == 4


def cores_of_a_thread_begun_before(pin: str) -> list[int]:
    """Cores that a thread may use that was there before its process settled, as rank 1."""
    script = f"""
import os, threading
from equipoise.train.process import settle

begun, end = threading.Event(), threading.Event()
def wait():
    begun.set()
    end.wait()
thread = threading.Thread(target=wait)
thread.start()
begun.wait()
settle(1, pin={pin})
print(*sorted(os.sched_getaffinity(thread.native_id)))
end.set()
"""
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return [int(word) for word in found.stdout.split()]


@pytest.mark.long
def test_threads_that_were_there_are_pinned_with_the_rest() -> None:
    cores = usable_cores()
    assert cores_of_a_thread_begun_before("True") == [cores[1 % len(cores)]]
    assert cores_of_a_thread_begun_before("False") == cores
