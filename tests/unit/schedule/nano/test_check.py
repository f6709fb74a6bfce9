"""Each fault of a schedule is found."""

import pytest

from equipoise.base.errors import LayoutError
from equipoise.schedule.nano.check import check_nano
from equipoise.schedule.nano.graph import Link, Way, chain_graph
from equipoise.schedule.nano.schedule import NanoSchedule, NanoStep, play

WAYS = (Way((0,), 1.0), Way((1,), 1.0))
GRAPH = chain_graph(
    [[Link("a", "compute", WAYS), Link("b", "memory", WAYS)], [Link("c", "network", WAYS)]], lanes=2
)
GOOD = (NanoStep(0, 0, ()), NanoStep(2, 1, ()), NanoStep(1, 1, (0, 2)))


def test_a_legal_one_passes() -> None:
    check_nano(GRAPH, NanoSchedule(GOOD))
    assert play(GRAPH, GOOD).seconds == 2.0


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (GOOD[:2], "b never runs."),
        ((*GOOD, GOOD[0]), "a runs twice."),
        ((NanoStep(3, 0, ()),), "There is no operation 3; the graph has 3."),
        ((NanoStep(0, 2, ()),), "a has no way 2 to run."),
        ((NanoStep(0, 0, (2,)),), "a waits for c, which begins later."),
        ((NanoStep(0, 0, ()), NanoStep(1, 0, ())), "b does not wait for a."),
        ((*GOOD[:2], NanoStep(1, 1, (0,))), "b does not wait for c on lane 1."),
    ],
)
def test_faults(steps: tuple[NanoStep, ...], words: str) -> None:
    with pytest.raises(LayoutError) as error:
        check_nano(GRAPH, NanoSchedule(steps))
    assert str(error.value) == words


def test_waiting_for_what_never_ends() -> None:
    with pytest.raises(LayoutError) as error:
        play(GRAPH, (NanoStep(0, 0, (1,)), NanoStep(1, 0, (0,)), GOOD[1]))
    assert str(error.value) == "a waits for an operation that never ends."
