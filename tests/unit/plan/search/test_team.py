"""Answers are the same whoever gives them, and no fork outlives who asked."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.base.errors import LayoutError
from equipoise.cost.step.request import StepOptions
from equipoise.plan.search import search as search_module
from equipoise.plan.search.incumbent import Outcome, Priced
from equipoise.plan.search.search import Search
from equipoise.plan.search.team import Team, spare_cores
from equipoise.plan.space.choice import Choice
from equipoise.plan.space.listing import list_space
from equipoise.sim.machine import Machine
from equipoise.spec.cluster.spec import find_cluster
from equipoise.spec.words import read_model


def square_and_who(number: int) -> tuple[int, int]:
    if number < 0:
        raise LayoutError(f"{number} is negative. Give 0 or more.")
    return number * number, os.getpid()


@settings(deadline=None, max_examples=7)
@given(
    st.sampled_from([0, 1, 3]),
    st.lists(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 4)), max_size=12), max_size=4),
)
def test_answers_come_in_order_and_homes_stay(forks, rounds) -> None:
    at_home: dict[int, set[int]] = {}
    with Team(square_and_who, forks) as team:
        for asked in rounds:
            numbers = [number for number, _ in asked]
            homes = [(home,) for _, home in asked]
            found = team.ask(numbers, homes, [1.0] * len(asked))
            assert [answer for answer, _ in found] == [number**2 for number in numbers]
            for (_, home), (_, who) in zip(asked, found, strict=True):
                at_home.setdefault(home, set()).add(who)
    assert all(len(who) == 1 for who in at_home.values())


def test_who_was_asked_least_is_asked_what_is_new() -> None:
    with Team(square_and_who, 1) as team:
        found = team.ask([1, 2, 3], [(0,), (1,), (2,)], [8.0, 2.0, 2.0])
        by_who = dict(found)
        assert by_who[1] != by_who[4] == by_who[9]
        # A new part of a home goes where that went, until that has been asked far more.
        (_, near), (_, far) = team.ask([4, 5], [(1, "a"), (0, "b")], [1.0, 1.0])
        assert near == by_who[4] and far == by_who[4]


@pytest.mark.parametrize("places", [[-1], [3, -1], [-1, 3]])
def test_an_error_is_raised_whoever_made_it(places: list[int]) -> None:
    said = r"^-1 is negative\. Give 0 or more\.$"
    with Team(square_and_who, 1) as team, pytest.raises(LayoutError, match=said):
        team.ask(places, [(at,) for at in range(len(places))], [1.0] * len(places))


def test_what_a_killed_fork_should_have_answered_is_answered_here() -> None:
    with Team(square_and_who, 1) as team:
        who = {pid for _, pid in team.ask([1, 2], [(0,), (1,)], [1.0, 1.0])} - {os.getpid()}
        assert len(who) == 1
        os.kill(who.pop(), signal.SIGKILL)
        for _ in range(2):
            found = team.ask([1, 2, 3], [(0,), (1,), (2,)], [1.0] * 3)
            assert found == [(1, os.getpid()), (4, os.getpid()), (9, os.getpid())]


ORPHAN = """
import os, signal
from equipoise.plan.search.team import Team
team = Team(lambda _: os.getpid(), 2)
found = set(team.ask([0] * 3, [(at,) for at in range(3)], [1.0] * 3)) - {os.getpid()}
print(*found, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_forks_end_when_who_asked_is_killed() -> None:
    done = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True)
    forks = [int(pid) for pid in done.stdout.split()]
    assert done.returncode == -signal.SIGKILL and len(forks) == 2, done.stderr
    for _ in range(2400):
        if not any(is_running(pid) for pid in forks):
            return
        time.sleep(0.05)
    pytest.fail(f"still there: {forks}")


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_cores_that_are_spare_are_not_this_one() -> None:
    assert 0 <= spare_cores() < len(os.sched_getaffinity(0))


MODEL = read_model("layers=8,hidden=2048,heads=16,kv_heads=4,vocab=32000")


@contextmanager
def forks(count: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(search_module, "spare_cores", lambda: count)
        patch.setattr(search_module, "_LARGE", 1)
        yield


def pack(choice: Choice) -> list[list[list[int]]]:
    size = choice.options.micro_batch * 4096
    count = choice.options.count_micro_batches(choice.layout)
    return [
        [[size - (at + rank) % 5 * 256, 100] for at in range(count)]
        for rank in range(choice.layout.dp)
    ]


@pytest.mark.long
@pytest.mark.parametrize("packer", [None, pack])
def test_a_search_ends_as_it_would_alone(packer, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: dict[int, list[Priced]] = {}
    found: dict[int, Outcome] = {}
    for count in (0, 2):
        noted[count] = []
        space = list_space(MODEL, 8, StepOptions(4096, 16), fixed={"zero": 1})
        machine = Machine(find_cluster("h100-sxm:8"))
        with forks(count, monkeypatch):
            search = Search(MODEL, machine, space, packer, note=noted[count].append)
            found[count] = search.run()
    assert noted[0] == noted[2] and len(noted[0]) > 10
    assert found[0].fitting == found[2].fitting
    assert found[0].progress == found[2].progress
    assert (found[0].ruled_out, found[0].bounded) == (found[2].ruled_out, found[2].bounded)
