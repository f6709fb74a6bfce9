"""Stacks of other threads."""

import threading
from pathlib import Path

from equipoise.observe.stack import StackReader


def inner(here: threading.Event, go: threading.Event) -> None:
    here.set()
    go.wait()


def outer(here: threading.Event, go: threading.Event) -> None:
    inner(here, go)


def test_lines_are_those_that_run_innermost_first() -> None:
    here, go = threading.Event(), threading.Event()
    thread = threading.Thread(target=outer, args=(here, go))
    thread.start()
    here.wait()
    assert thread.ident is not None
    reader, lines = StackReader(thread.ident), Path(__file__).read_text().splitlines()
    place = ""
    while place != "go.wait()":  # where it comes at once, unless the machine is busy
        ours = [each for each in reader.read() if Path(each.file) == Path(__file__)]
        assert [each.name for each in ours] == ["inner", "outer"]
        place = lines[ours[0].line - 1].strip()
        assert place in ("here.set()", "go.wait()")
    go.set()
    thread.join()
    assert reader.read() == []
    reader.close()


def test_a_thread_that_calls_and_returns_is_read_at_any_moment() -> None:
    begun, done = threading.Event(), threading.Event()

    def climb(depth: int) -> int:
        return depth and sum(climb(depth - 1) for _ in range(2))

    def work() -> None:
        begun.set()
        while not done.is_set():
            climb(4)

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    assert thread.ident is not None
    reader = StackReader(thread.ident)
    for _ in range(300):
        names = [each.name for each in reader.read() if Path(each.file) == Path(__file__)]
        assert names[-1] == "work"
        assert set(names) <= {"work", "climb", "<genexpr>"}
    done.set()
    thread.join()
    reader.close()
