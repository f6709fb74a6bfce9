"""Rows of numbers that repeat are computed once, and give the bits of the plain way."""

import pytest
import torch
from torch import nn

from equipoise.recsys.sessions.dense import RowSharing


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 16))


@pytest.mark.parametrize(("samples", "distinct"), [(600, 37), (64, 64), (40, 1), (3, 2), (0, 0)])
def test_outputs_are_equal_to_the_bit(samples: int, distinct: int) -> None:
    source = torch.Generator().manual_seed(1)
    numbers = torch.randn(distinct, 2, generator=source)
    given = numbers[torch.arange(samples) % distinct] if distinct else torch.empty(0, 2)
    plain, shared = mlp(), mlp()
    sharing = RowSharing(shared)
    mix = torch.randn(samples, 16, generator=source)
    outs = [module(given) for module in (plain, shared)]
    assert outs[0].detach().numpy().tobytes() == outs[1].detach().numpy().tobytes()
    for out in outs:
        (out * mix).sum().backward()
    for own, other in zip(plain.parameters(), shared.parameters(), strict=True):
        assert (own.grad - other.grad).abs().max() <= 1e-6 * max(1.0, own.grad.abs().max())
    assert sharing.rows == samples
    assert sharing.computed == min(samples, max(8, distinct))
    assert list(shared.state_dict()) == list(plain.state_dict())
