"""Threads that compute follow what other processes leave."""

from collections.abc import Iterator

import pytest
import torch

from equipoise.observe.machine import OtherLoad
from equipoise.serve.engine.threads import SharedCores


class _Load(OtherLoad):
    """A load that is given."""

    now = 0.0

    def __init__(self) -> None:
        pass

    @property
    def cores(self) -> float:
        return _Load.now


class _Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def follow(most: int, loads: list[float]) -> list[int]:
    clock, threads = _Clock(), list[int]()
    _Load.now = 0.0
    cores = SharedCores(most, load=_Load, clock=clock)
    for load in loads:
        _Load.now = load
        clock.now_s += 0.5
        assert cores.follow() == (cores.threads == most)
        assert torch.get_num_threads() == cores.threads
        threads.append(cores.threads)
    return threads


def test_threads_follow_the_load_down_and_up() -> None:
    assert follow(2, [0.0, 0.7, 0.8, 0.5, 0.36, 0.3, 2.0]) == [2, 2, 1, 1, 1, 2, 1]
    assert follow(8, [3.1, 2.6, 2.2, 0.1, 9.0]) == [5, 5, 6, 8, 1]
    assert follow(1, [5.0, 0.0]) == [1, 1]


def test_nothing_changes_within_half_a_second() -> None:
    clock = _Clock()
    cores = SharedCores(2, load=_Load, clock=clock)
    _Load.now = 2.0
    clock.now_s = 0.4
    assert cores.follow() and cores.threads == 2
    clock.now_s = 0.5
    assert not cores.follow() and cores.threads == 1
