"""A tensor's bytes are in what is held and in the peak, until the peak is forgotten."""

import torch

from equipoise.cost.memory.overhead import CPU_OVERHEAD, DeviceOverhead
from equipoise.nn.device.memory import forget_peak, held_bytes, overhead_of, peak_bytes
from equipoise.train.process import return_freed_memory

CPU = torch.device("cpu")
_BYTES = 1 << 28


def test_a_tensors_bytes_are_held_and_in_the_peak() -> None:
    return_freed_memory()  # pages that earlier tests have left would be used again
    forget_peak(CPU)
    before = held_bytes(CPU)
    tensor = torch.ones(_BYTES, dtype=torch.uint8)
    assert held_bytes(CPU) - before > 0.9 * _BYTES
    del tensor
    assert peak_bytes(CPU) - before > 0.9 * _BYTES


def test_an_allocator_holds_what_is_counted() -> None:
    assert overhead_of(CPU) == CPU_OVERHEAD
    assert overhead_of(torch.device("cuda")) == DeviceOverhead()
