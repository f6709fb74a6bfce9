"""One sampler for cores and devices: the same calls, by processor time or by marks in a queue."""

import pytest
import torch

from equipoise.nn.device.clock import DeviceMarks, Marks
from equipoise.nn.measure_kernels import (
    AttentionCall,
    Patience,
    Sampler,
    attention_samples,
    gemm_samples,
    host_copy_samples,
    multiplies,
    sampler_on,
    stream_samples,
)
from equipoise.nn.stream import KERNELS
from support.cuda.queue import Queue

CPU = torch.device("cpu")


class Device:
    """Its queue passes each mark 5 ms after the one before, and counts when it is waited for."""

    def __init__(self) -> None:
        self.queue = Queue()

    def marks(self) -> Marks:
        return DeviceMarks(self.queue.event)


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def sampler(device: Device) -> Sampler:
    return Sampler(CPU, device.marks, in_a_row=8)


def test_a_device_is_read_once_for_calls_in_a_row(device: Device, sampler: Sampler) -> None:
    called: list[int] = []
    taken = sampler.sample_s(lambda: called.append(device.queue.waits), Patience(budget_s=0.0))
    assert taken == pytest.approx([0.005] * 8)
    assert called == [0] * 9  # one warms up; the host never waits in between
    assert device.queue.waits == 1


def test_more_rows_follow_until_there_is_enough(device: Device, sampler: Sampler) -> None:
    taken = sampler.sample_s(lambda: None, Patience(least=6, budget_s=0.06))
    assert len(taken) == 16 and device.queue.waits == 2
    assert len(sampler.sample_s(lambda: None, Patience(budget_s=1e9, limit_s=0.0))) == 8
    assert len(sampler.sample_s(lambda: None, Patience(budget_s=1e9))) == 32


def test_a_core_is_read_at_every_call() -> None:
    sampler = sampler_on(CPU)
    assert sampler.in_a_row == 1
    assert len(sampler.sample_s(lambda: sum(range(1000)), Patience(least=6, budget_s=0.0))) == 6
    assert len(sampler.sample_s(lambda: None, Patience(limit_s=0.0))) == 1


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp8"])
def test_products_of_every_dtype(dtype: str, sampler: Sampler) -> None:
    assert multiplies(CPU, dtype)
    for each in (sampler, sampler_on(CPU)):
        taken = gemm_samples(each, (dtype, 16, 32, 48), Patience(budget_s=0.0))
        assert len(taken) >= 6 and min(taken) > 0


def test_a_call_of_several_heads_and_documents(sampler: Sampler) -> None:
    asked = AttentionCall([16] * 3, heads=4, kv_heads=2, head_width=8)
    for each, count in ((sampler, 8), (sampler_on(CPU), 6)):
        forward_s, backward_s = attention_samples(each, "bf16", asked, Patience(budget_s=0.0))
        assert len(forward_s) == len(backward_s) == count


def test_rates_of_memory_and_of_copies(sampler: Sampler) -> None:
    taken = stream_samples(sampler, 1 << 8, Patience(budget_s=0.0))
    assert set(taken) == set(KERNELS)
    assert taken["triad"] == pytest.approx([3 * 8 * 256 / 0.005] * 8)
    copies = host_copy_samples(sampler, 1 << 10, Patience(budget_s=0.0))
    assert copies == pytest.approx([1024 / 0.005] * 8)
