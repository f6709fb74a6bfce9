"""On a CUDA device with float8 tensor cores: float8 layers equal the CPU's."""

import pytest
import torch

from equipoise.nn.project import FP8
from equipoise.numerics.fp8 import require_fp8

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="no CUDA device with float8 tensor cores",
    ),
]


def test_the_device_has_the_product() -> None:
    require_fp8(torch.device("cuda"))


@pytest.mark.parametrize("tokens", [0, 1, 33, 400])
def test_a_feed_forward_and_its_gradients_equal_the_cpus(tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(tokens, 128), (tokens, 128), (160, 128), (160, 128), (128, 160)]
    parts = [torch.randn(shape, generator=generator) / 8 for shape in shapes]
    results = []
    for device in ("cpu", "cuda"):
        inputs = [part.to(device, torch.bfloat16).requires_grad_() for part in parts]
        out = FP8.add_swiglu(*inputs)
        out.sum().backward()
        results.append([x.detach().float().cpu() for x in (out, *(each.grad for each in inputs))])
    for cpu, cuda in zip(*results, strict=True):
        assert (cpu - cuda).norm() <= 0.03 * cpu.norm()
