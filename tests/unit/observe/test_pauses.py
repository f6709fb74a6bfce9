"""Collections of garbage, counted where they happen."""

import gc
import threading
from typing import Any

import pytest

from equipoise.observe.event import Kind
from equipoise.observe.journal import EventSink
from equipoise.observe.pauses import GarbagePauses


class Kept(EventSink):
    """A journal in memory."""

    def __init__(self) -> None:
        self.events: list[tuple[Kind, str, dict[str, Any]]] = []

    def write(self, kind: Kind, name: str, *, t: float | None = None, **fields: Any) -> None:
        assert t is not None
        self.events.append((kind, name, fields))


@pytest.mark.long
def test_long_collections_are_spans_of_their_step() -> None:
    journal = Kept()
    with GarbagePauses() as pauses:
        kept = [[each] for each in range(200_000)]  # what a collection goes through
        gc.collect()
        assert pauses.paused_s > 0
        pauses.write(journal, 7)
        pauses.write(journal, 8)
    assert len(kept) == 200_000
    assert {(kind, name, fields["step"]) for kind, name, fields in journal.events} == {
        ("span", "garbage", 7)
    }
    assert sum(fields["duration_s"] for *_, fields in journal.events) <= pauses.paused_s
    before = pauses.paused_s
    gc.collect()
    assert pauses.paused_s == before


def test_collections_of_other_threads_do_not_count() -> None:
    with GarbagePauses() as pauses:
        gc.disable()
        try:
            thread = threading.Thread(target=gc.collect)
            thread.start()
            thread.join()
            assert pauses.paused_s == 0
        finally:
            gc.enable()
