"""What a rank saves is what it holds now, also where one tensor has replaced another."""

from typing import Any

import torch
from torch import nn

from equipoise.checkpoint.places import Places
from equipoise.comm.group import Ranks


class Alone(Ranks):
    """One rank without a process group."""

    def gather_objects(self, value: Any) -> list[Any]:
        """Its own."""
        return [value]


class Counted(nn.Module):
    """A weight, and a buffer that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(3))


def test_a_buffer_that_was_replaced_is_saved_as_it_is_now() -> None:
    module = Counted()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    places = Places(module, optimizer, Alone(0, 1, torch.device("cpu")))
    for value in (0.0, 1.0):
        (seen,) = [box for box in places.placed() if box.tensor.numel() == 3]
        assert (seen.tensor.tolist(), seen.is_steady) == ([value] * 3, False)
        module.seen = module.seen + 1
