"""What a rank's host says to its slow seconds, from samples laid beside its steps."""

import numpy as np
import pytest

from equipoise.fault.interference.metrics import METRICS
from equipoise.observe.journal import EventSink
from equipoise.train.health.host import _ANSWERS, HostAnswer, HostWatch
from equipoise.train.health.own import OwnClock, OwnParts

CALM = {"own_busy": 0.9, "own_delay": 0.01, "probe_stream": 2e-4, "probe_compute": 4e-4}


class Sampler:
    """Rows of a host, one a second."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, np.ndarray]] = []

    def tick(self, **changed: float) -> None:
        values = dict.fromkeys(METRICS, 0.0) | CALM | changed
        self.rows.append((0.0, np.array([values[name] for name in METRICS])))

    def take(self) -> list[tuple[float, np.ndarray]]:
        rows, self.rows = self.rows, []
        return rows


def watch(*phases: tuple[int, float, dict[str, float]]) -> HostAnswer:
    """Seconds of five steps each: how many, their length, and what the host shows."""
    sampler, own = Sampler(), OwnClock(())
    made = HostWatch(EventSink(), sampler, own)  # type: ignore[arg-type]
    for seconds, step_s, changed in phases:
        for _ in range(seconds):
            sampler.tick(**changed)
            for _ in range(5):
                made.look(OwnParts(0.0, step_s, 0.0, step_s), 0.1)
    return HostAnswer.read(own.host)


TAKEN = {"own_busy": 0.6, "own_delay": 0.35, "seat_others": 0.4}


def test_whose_the_slow_seconds_are() -> None:
    calm = (8, 0.1, {})
    assert watch(calm) == HostAnswer("nobody")
    assert watch((3, 0.1, {})) == HostAnswer()  # too early to know what is usual
    crowded = watch(calm, (4, 0.15, TAKEN))
    assert (crowded.whose, crowded.resource) == ("its neighbour on the host", "cpu")
    assert crowded.neighbour_share > 0.5
    assert crowded.sentence == (
        f"Its neighbours on the host explain {crowded.neighbour_share:.0%} of that: other programs "
        "have its cores."
    )
    own = watch(calm, (4, 0.15, {"own_busy": 0.95}))
    assert (own.whose, own.resource) == ("this rank", None)
    assert own.sentence == (
        "Its neighbours on the host do not explain it: it is this rank's own doing."
    )
    assert HostAnswer().sentence == HostAnswer("nobody").sentence == ""


def test_slow_seconds_never_become_usual_ones() -> None:
    assert watch((8, 0.1, {}), (200, 0.15, TAKEN)).resource == "cpu"
    assert watch((8, 0.1, {}), (9, 0.15, TAKEN), (4, 0.1, {})).whose == "nobody"


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_the_number_carries_the_answer(share: float) -> None:
    for whose, resource in _ANSWERS:
        answer = HostAnswer(whose, resource, share)
        assert HostAnswer.read(answer.number) == answer
        assert HostAnswer.read(float(np.float64(answer.number))) == answer
