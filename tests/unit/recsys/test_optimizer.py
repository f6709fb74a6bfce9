"""Sparse steps beside torch's own, and the formula of the one that torch lacks."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.base.errors import SpecError
from equipoise.recsys.optimizer import (
    SparseStep,
    make_state,
    sum_rows,
    sum_rows_by_torch,
    update_rows,
    update_rows_by_torch,
)

ROWS, WIDTH, STEPS = 12, 5, 6


def batches() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Ids with duplicates in and across bags, lengths with empty bags, gradients of bags."""
    source = np.random.default_rng(0)
    made = []
    for _ in range(STEPS):
        lengths = torch.from_numpy(source.integers(0, 5, 7).astype(np.int32))
        ids = torch.from_numpy(source.integers(0, ROWS - 2, int(lengths.sum())))
        made.append((ids, lengths, torch.from_numpy(source.standard_normal((7, WIDTH))).float()))
    return made


def ours(step: SparseStep) -> torch.Tensor:
    weight = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH).clone()
    state = make_state(step, weight)
    for number, (ids, lengths, pooled) in enumerate(batches(), 1):
        update_rows(step, weight, state, *sum_rows(ids, lengths, pooled), number=number)
    return weight


@pytest.mark.filterwarnings("ignore:Sparse invariant")
@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
def test_steps_are_those_of_torch(name: str) -> None:
    bag = torch.nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True)
    with torch.no_grad():
        bag.weight.copy_(torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH))
    theirs = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-8),
        "adam": lambda p: torch.optim.SparseAdam(list(p), lr=0.1, eps=1e-8),
    }[name](bag.parameters())
    for ids, lengths, pooled in batches():
        theirs.zero_grad()
        offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)[:-1]))
        bag(ids, offsets).backward(pooled)
        theirs.step()
    error = (ours(SparseStep(name, lr=0.1)) - bag.weight.detach()).abs().max()
    assert error < 1e-5


def test_row_wise_adagrad_is_its_formula() -> None:
    weight = np.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)
    state = np.zeros(ROWS)
    for ids, lengths, pooled in batches():
        grad = np.zeros((ROWS, WIDTH))
        bag_of = np.repeat(np.arange(len(lengths)), lengths.numpy())
        np.add.at(grad, ids.numpy(), pooled.double().numpy()[bag_of])
        state += (grad**2).mean(axis=1)
        weight -= 0.1 * grad / (np.sqrt(state) + 1e-8)[:, None]
    assert np.abs(ours(SparseStep("row-wise-adagrad", lr=0.1)).numpy() - weight).max() < 2e-6


def test_rows_that_no_bag_holds_stay() -> None:
    start = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)
    for name in ("sgd", "adagrad", "row-wise-adagrad", "adam"):
        weight = ours(SparseStep(name, lr=0.1))
        assert torch.equal(weight[-2:], start[-2:])
        assert not torch.equal(weight[:-2], start[:-2])


def test_column_shards_with_states_of_their_own_are_another_optimizer() -> None:
    """What sharing the mean over all columns is for."""
    step, (ids, lengths, pooled) = SparseStep(lr=0.1), batches()[0]
    rows, grad = sum_rows(ids, lengths, pooled)
    whole, half = torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, 2)
    update_rows(step, whole, make_state(step, whole), rows, grad, number=1)
    update_rows(step, half, make_state(step, half), rows, grad[:, :2], number=1)
    assert (whole[:, :2] - half).abs().max() > 1e-3


@given(
    st.lists(st.lists(st.one_of(st.integers(0, 9), st.integers(0, 2**40)), max_size=6), max_size=9),
    st.sampled_from([1, 4, 7]),
)
def test_loops_sum_as_torch_does_to_the_bit(bags: list[list[int]], width: int) -> None:
    lengths = torch.tensor([len(bag) for bag in bags], dtype=torch.int32)
    ids = torch.tensor([each for bag in bags for each in bag], dtype=torch.int64)
    pooled = torch.from_numpy(np.random.default_rng(0).standard_normal((len(bags), width))).float()
    rows, sums = sum_rows(ids, lengths, pooled)
    expected_rows, expected = sum_rows_by_torch(ids, lengths, pooled)
    assert torch.equal(rows, expected_rows) and torch.equal(sums, expected)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "row-wise-adagrad", "adam"])
def test_loops_update_as_torch_does_also_what_lies_apart(name: str) -> None:
    """Rows of a record lie apart, with their state behind the weights."""
    step = SparseStep(name, lr=0.1)
    record = torch.linspace(-1, 1, ROWS * 3 * WIDTH).view(ROWS, 3 * WIDTH).abs()
    theirs = record.clone()
    parts = []
    for each in (record, theirs):
        own = {"sum": each[:, WIDTH : 2 * WIDTH]}
        if name == "row-wise-adagrad":
            own = {"sum": each[:, WIDTH]}
        if name == "adam":
            own = {"mean": own["sum"], "square": each[:, 2 * WIDTH :]}
        parts.append((each[:, :WIDTH], own))
    for number, (ids, lengths, pooled) in enumerate(batches(), 1):
        rows, grad = sum_rows(ids, lengths, pooled)
        (weight, state), (weight_2, state_2) = parts
        update_rows(step, weight, state, rows, grad, number=number)
        update_rows_by_torch(step, weight_2, state_2, rows, grad, number, None)
    assert (record - theirs).abs().max() < 1e-6
    assert not torch.equal(record[:, :WIDTH], torch.zeros(ROWS, WIDTH))


def test_unknown_optimizers_and_rates_are_refused() -> None:
    with pytest.raises(SpecError, match=r'"lamb" is not a sparse optimizer. Choose from sgd, '):
        SparseStep("lamb")
    with pytest.raises(SpecError, match=r"A learning rate of -1 cannot be. Give 0 or more."):
        SparseStep("sgd", lr=-1)
    with pytest.raises(SpecError) as error:
        SparseStep("adagrad", eps=0.0)  # a gradient of 0 over a state of 0
    assert str(error.value) == (
        "eps must be more than 0, beta1 and beta2 from 0 to below 1; they are 0.0, 0.9 and 0.999. "
        "Give others."
    )
