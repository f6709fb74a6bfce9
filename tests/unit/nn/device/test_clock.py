"""Only what this thread computes counts."""

import threading
import time

import torch

from equipoise.nn.device.clock import busy_clock, make_marks


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


def test_marks_on_a_host_count_the_same() -> None:
    marks = make_marks(torch.device("cpu"))
    begin = marks.mark()
    time.sleep(0.05)
    middle = marks.mark()
    spin_for(time.thread_time, 0.05)
    least = time.time()
    end = marks.mark()
    most = time.time()
    moments = marks.read()
    assert moments.busy_s(begin, middle) < 0.05 <= moments.busy_s(middle, end)
    assert moments.passed_s(begin, middle) >= 0.05
    assert not moments.counts_idle
    assert least - 1.0 < moments.at_ns[end] * 1e-9 < most + 1.0
