"""Only what this thread computes counts."""

import threading
import time

import torch

from equipoise.nn.clock import busy_clock


def spin_for(clock, seconds: float) -> None:
    begin = clock()
    while clock() < begin + seconds:
        pass


def test_sleep_and_other_threads_do_not_count() -> None:
    clock = busy_clock(torch.device("cpu"))
    other = threading.Thread(target=spin_for, args=(time.thread_time, 0.05))
    begin = clock()
    other.start()
    time.sleep(0.05)
    other.join()
    idle = clock() - begin
    spin_for(clock, 0.05)
    assert idle < 0.05 <= clock() - begin
