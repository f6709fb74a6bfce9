"""Products of sorted rows against one product for each expert, in both forms."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from equipoise.nn.moe import matmul as moe_matmul
from equipoise.nn.moe.matmul import expert_swiglu, multiply_columns, multiply_rows, runs_grouped

COUNTS = {"mixed": [3, 0, 5, 1], "one": [0, 9, 0, 0], "none": [0, 0, 0, 0]}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2}

each_counts = pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
each_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
each_form = pytest.mark.parametrize("grouped", [True, False])


def draw(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def ends(counts: list[int]) -> Tensor:
    return torch.tensor(counts).cumsum(0).to(torch.int32)


def parts(rows: Tensor, counts: list[int]) -> list[Tensor]:
    return list(rows.split(counts))


@each_counts
@each_dtype
@each_form
def test_products_are_those_of_each_expert(counts, dtype, grouped, monkeypatch) -> None:
    if not grouped:
        monkeypatch.setattr(moe_matmul, "_GROUPED", {})
    rows = draw(sum(counts), 16, dtype=dtype, seed=0)
    right = draw(sum(counts), 24, dtype=dtype, seed=1)
    weight = draw(4, 16, 24, dtype=dtype, seed=2)
    expected = [x @ w for x, w in zip(parts(rows, counts), weight, strict=True)]
    found = multiply_rows(rows, weight, ends(counts))
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=TOLERANCE[dtype] * 16)
    pairs = zip(parts(rows, counts), parts(right, counts), strict=True)
    columns = torch.stack([x.t() @ y for x, y in pairs])
    found = multiply_columns(rows, right, ends(counts))
    torch.testing.assert_close(found, columns, rtol=0, atol=TOLERANCE[dtype] * 16)


@each_counts
@each_form
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_swiglu_of_experts_is_autograds(counts, dtype, grouped, monkeypatch) -> None:
    if not grouped:
        monkeypatch.setattr(moe_matmul, "_GROUPED", {})
    shapes = [(sum(counts), 8), (4, 12, 8), (4, 12, 8), (4, 8, 12)]
    inputs = [
        draw(*shape, dtype=dtype, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)
    ]
    x, gate, up, down = inputs
    outputs = [
        (silu(rows @ gate[e].t()) * (rows @ up[e].t())) @ down[e].t()
        for e, rows in enumerate(parts(x, counts))
    ]
    pull = draw(sum(counts), 8, dtype=dtype, seed=9)
    expected = torch.autograd.grad((torch.cat(outputs) * pull).sum(), inputs)
    found = expert_swiglu(x, ends(counts), gate, up, down)
    torch.testing.assert_close(found, torch.cat(outputs), rtol=1e-5, atol=TOLERANCE[dtype])
    grads = torch.autograd.grad((found * pull).sum(), inputs)
    for one, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=TOLERANCE[dtype] * 10)


def test_the_kernel_is_used_where_it_runs() -> None:
    rows = torch.zeros(4, 16)
    assert runs_grouped(rows, 16, 24)
    assert runs_grouped(rows.bfloat16(), 16, 24)
    assert not runs_grouped(rows.double(), 16, 24)
    assert not runs_grouped(rows, 16, 23)  # 92 bytes: no whole 16
    assert not runs_grouped(rows.bfloat16(), 16, 28)


def test_widths_that_the_kernel_refuses_are_multiplied_all_the_same() -> None:
    rows, weight = (
        draw(5, 3, dtype=torch.float32, seed=0),
        draw(2, 3, 7, dtype=torch.float32, seed=1),
    )
    found = multiply_rows(rows, weight, ends([2, 3]))
    torch.testing.assert_close(found, torch.cat([rows[:2] @ weight[0], rows[2:] @ weight[1]]))
