"""A call is stopped where it stands, and leaves no alarm behind."""

import gc
import importlib
import itertools
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from equipoise.plan.search.deadline import NEVER, Deadline

SOON_S, LONGER_S = 0.4, 0.5
"""A call has begun by then, even on a busy machine; and what lasts beyond it."""


def spin() -> None:
    for _ in itertools.count():
        pass


def wait() -> None:
    begin = time.monotonic()
    while time.monotonic() < begin + LONGER_S:
        pass


@pytest.fixture
def quiet_alarm():
    """What pytest's own limit has set is set again."""
    handler = signal.getsignal(signal.SIGALRM)
    left, again = signal.setitimer(signal.ITIMER_REAL, 0.0)
    yield
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, left, again)


def test_a_call_that_never_ends_is_stopped(quiet_alarm: None) -> None:
    before = signal.getsignal(signal.SIGALRM)
    assert Deadline.after(SOON_S).attempt(spin) is None
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_call_that_ends_in_time_answers(quiet_alarm: None) -> None:
    for due in (Deadline.after(60.0), Deadline.after(1e23), NEVER):
        assert due.attempt(lambda: 3) == 3 and not due.is_over()
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_nothing_is_called_when_the_time_is_over() -> None:
    called: list[int] = []
    over = Deadline(1.0, clock=lambda: 2.0)
    assert over.is_over() and over.left_s == 0.0
    assert over.attempt(lambda: called.append(1)) is None and not called


def test_an_alarm_of_somebody_else_still_rings(quiet_alarm: None) -> None:
    signal.setitimer(signal.ITIMER_REAL, 60.0)
    assert Deadline.after(SOON_S).attempt(spin) is None
    assert 0.0 < signal.getitimer(signal.ITIMER_REAL)[0] < 60.0


def test_a_module_is_loaded_whole(
    quiet_alarm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"import time\nend = time.monotonic() + {LONGER_S}\n"
    text += "while time.monotonic() < end:\n    pass\n"
    (tmp_path / "slowly_loaded.py").write_text(f"{text}is_whole = True\n")
    monkeypatch.syspath_prepend(tmp_path)

    def load_and_spin() -> None:
        importlib.import_module("slowly_loaded")
        spin()

    assert Deadline.after(SOON_S).attempt(load_and_spin) is None
    assert sys.modules.pop("slowly_loaded").is_whole


def test_an_alarm_that_was_swallowed_rings_again(quiet_alarm: None) -> None:
    swallowed: list[bool] = []

    def swallow_and_spin() -> None:
        try:
            spin()
        except BaseException:  # as a library may that calls back from C
            swallowed.append(True)
        spin()

    assert Deadline.after(SOON_S).attempt(swallow_and_spin) is None and swallowed == [True]


def test_what_is_cleaned_up_is_not_stopped_again(quiet_alarm: None) -> None:
    cleaned: list[int] = []

    def spin_and_clean() -> None:
        try:
            spin()
        finally:
            wait()
            cleaned.append(1)

    assert Deadline.after(SOON_S).attempt(spin_and_clean) is None and cleaned == [1]


class Finalized:
    def __del__(self) -> None:
        wait()
        FINALIZED.append(True)


FINALIZED: list[bool] = []


def test_what_would_be_lost_is_not_raised(quiet_alarm: None) -> None:
    def collect(*_: object) -> None:
        wait()
        collected.append(True)

    def generate() -> Iterator[None]:
        try:
            yield
        finally:
            wait()
            closed.append(True)

    def lose_and_spin() -> None:
        gc.callbacks.append(collect)
        gc.collect()
        gc.callbacks.remove(collect)
        Finalized()
        watched = Finalized()
        weakref.finalize(watched, wait)
        del watched
        next(generate())
        spin()

    collected: list[bool] = []
    closed: list[bool] = []
    assert Deadline.after(SOON_S).attempt(lose_and_spin) is None
    # pytest fails for what was lost
    assert collected == [True, True] and closed == [True] and FINALIZED.pop() and FINALIZED.pop()


def test_a_ring_at_any_moment_leaves_no_alarm(quiet_alarm: None) -> None:
    before = signal.getsignal(signal.SIGALRM)
    for us in range(4_000):
        Deadline.after(us % 200 * 1e-6).attempt(int)
        assert signal.getsignal(signal.SIGALRM) is before
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_other_threads_look_at_the_clock_themselves() -> None:
    answers: list[int | None] = []
    thread = threading.Thread(target=lambda: answers.append(Deadline.after(60.0).attempt(int)))
    thread.start()
    thread.join()
    assert answers == [0]


def test_parts_of_what_is_left() -> None:
    ticks = itertools.count(100.0)
    due = Deadline.after(60.0, clock=lambda: next(ticks))  # at 100: until 160
    assert due.part(0.5).until_s == 101.0 + 0.5 * (160.0 - 102.0)
