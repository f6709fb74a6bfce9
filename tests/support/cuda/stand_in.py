"""A CPU that stands in for a CUDA device: its work is over when a call returns, its clock is marks.

Importable by ranks.
"""

import time

import torch

from equipoise.nn.device.clock import DeviceMarks
from equipoise.nn.measure_kernels import Sampler
from equipoise.train.calibrate.ranks import Target

IN_A_ROW = 3


class Event:
    """A place in the queue of a CPU, which is past everything that was asked of it."""

    def __init__(self) -> None:
        self.at_s = float("nan")

    def record(self) -> None:
        self.at_s = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: "Event") -> float:
        return 1e3 * (end_event.at_s - self.at_s)


def stand_in(device: torch.device) -> Sampler:
    return Sampler(device, lambda: DeviceMarks(Event), IN_A_ROW)


def target(ranks: int, *, fresh: bool = False) -> Target:
    return Target((torch.device("cpu"),) * ranks, stand_in, fresh)
