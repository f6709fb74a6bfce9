"""Which layer is named for a number that went bad."""

import pytest
import torch
from torch import nn

from equipoise.fault.blame import (
    first_bad_layer,
    last_bad_gradient,
    tell_documents,
    tell_layer,
)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(4, 2))


@pytest.mark.parametrize("bad", ["0.0", "1.0", "3"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_spoiled_weight_is_named_by_its_layer(bad: str, value: float) -> None:
    spoiled = model()
    with torch.no_grad():
        spoiled.get_submodule(bad).weight[0, 0] = value
    before = {name: weight.clone() for name, weight in spoiled.named_parameters()}
    assert first_bad_layer(spoiled, lambda: spoiled(torch.ones(3, 4))) == bad
    for name, weight in spoiled.named_parameters():
        assert torch.equal(weight, before[name]) or name.startswith(bad)
    assert all(not layer._forward_hooks for layer in spoiled.modules())


def test_a_model_without_a_bad_number_names_none() -> None:
    whole = model()
    assert first_bad_layer(whole, lambda: whole(torch.ones(3, 4))) == ""


def test_the_last_gradient_that_is_bad_is_where_it_began() -> None:
    whole = model()
    inner = whole[1](whole[0](torch.ones(3, 4)))
    inner.register_hook(lambda gradient: gradient * float("nan"))
    whole[3](whole[2](inner)).sum().backward()
    assert last_bad_gradient(whole).startswith("1.0.")
    whole.zero_grad()
    whole(torch.ones(3, 4)).sum().backward()
    assert last_bad_gradient(whole) == ""


def test_what_ranks_found_is_one_sentence() -> None:
    assert tell_layer(["", ""], ["", ""]) == ""
    assert tell_layer(["norm", "layers.1"], ["layers.0"]) == (
        "The first layer whose output is not finite is layers.1. "
    )


def test_documents_are_named_and_the_rest_counted() -> None:
    assert tell_documents([], str) == (
        ", though the loss of every micro-batch is",
        "Lower train.lr.",
    )
    where, fix = tell_documents(range(10), lambda number: f"file-{number}")
    assert where.startswith(
        "; documents of the micro-batches where it is: 0 (file-0), 1 (file-1), "
    )
    assert where.endswith(", 7 (file-7) and 2 more")
    assert fix == "Lower train.lr, or look at those documents."
