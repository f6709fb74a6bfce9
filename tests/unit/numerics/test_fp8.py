"""Rows rounded to e4m3, and their products: beside the format itself and fp32."""

import math

import pytest
import torch
from torch import Tensor

from equipoise.base.errors import LayoutError
from equipoise.numerics.fp8 import RoundedRows, multiply_rows, require_fp8, round_rows

E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
GRID = E4M3[E4M3.isfinite()].unique()
"""Every number of the format."""


def draw(rows: int, inner: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + inner)
    sizes = torch.logspace(-9, 9, max(rows, 1), base=2)[:rows].unsqueeze(1)
    return (torch.randn(rows, inner, generator=generator) * sizes).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_element_is_the_nearest_number_of_the_format(dtype: torch.dtype) -> None:
    x = draw(24, 40, dtype)
    rounded = round_rows(x)
    scaled = x.double() / rounded.scale
    away = (scaled.unsqueeze(-1) - GRID).abs().amin(-1)
    assert torch.equal((scaled - rounded.values.double()).abs(), away)


def test_scales_are_the_largest_powers_of_two_that_fit() -> None:
    rounded = round_rows(draw(24, 40))
    mantissa, _ = torch.frexp(rounded.scale)
    assert set(mantissa.flatten().tolist()) == {0.5}
    largest = draw(24, 40).abs().amax(1, keepdim=True) / rounded.scale
    assert bool((largest <= 448).all() and (largest > 224).all())


def test_a_longer_row_rounds_the_same_elements_alike() -> None:
    """Other tokens in a micro-batch change its columns' scales, not how elements are rounded."""
    x = draw(8, 40)
    longer = torch.cat([x, 5 * x], 1)
    assert not torch.equal(round_rows(longer).scale, round_rows(x).scale)
    few = x.abs() > 2**-10 * longer.abs().amax(1, keepdim=True)
    together, alone = round_rows(longer).restore()[:, :40], round_rows(x).restore()
    assert torch.equal(together[few], alone[few])
    least = 2**-17 * longer.abs().amax(1, keepdim=True)
    assert bool(((together - alone).abs() <= least).all())


@pytest.mark.parametrize("size", [448.0, 447.9999, 448.0001, 1e-30, 1.0, 3e38, 2.0**-126])
def test_edges_of_a_scale(size: float) -> None:
    restored = round_rows(torch.tensor([[size, 0.0, -size]])).restore()
    assert restored[0, 1] == 0 and restored[0, 0] == -restored[0, 2]
    if size > 1e-12:
        assert float(restored[0, 0]) == pytest.approx(size, rel=2**-4)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_not_hidden(bad: float) -> None:
    x = torch.ones(2, 16)
    x[0, 3] = bad
    out = multiply_rows(round_rows(x), round_rows(torch.ones(16, 16)), torch.float32)
    assert bool(out[0].isnan().all()) and out[1].tolist() == [16.0] * 16


@pytest.mark.parametrize("inner", [0, 1, 16, 37, 576])
@pytest.mark.parametrize("rows", [0, 1, 5, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_that_of_the_rounded_operands(
    rows: int, inner: int, dtype: torch.dtype
) -> None:
    left, right = round_rows(draw(rows, inner, dtype)), round_rows(draw(48, inner, dtype))
    out = multiply_rows(left, right, dtype)
    expected = left.restore() @ right.restore().t()
    assert out.dtype == dtype and out.shape == (rows, 48)
    room = left.restore().norm(dim=1, keepdim=True) * right.restore().norm(dim=1)
    most = 1e-6 if dtype == torch.float32 else 2**-8
    assert bool(((out.float() - expected).abs() <= most * room).all())


def test_this_cpu_has_the_product() -> None:
    require_fp8(torch.device("cpu"))


def test_a_device_without_the_product_is_refused() -> None:
    def absent(left: RoundedRows, right: RoundedRows, dtype: torch.dtype) -> Tensor:
        raise NotImplementedError("scaled_mm is not implemented for 'CPU'")

    with pytest.raises(LayoutError) as caught:
        require_fp8(torch.device("cpu"), absent)
    assert str(caught.value) == (
        f'train.precision = "fp8" needs a product of float8 rows, which torch {torch.__version__} '
        "does not have on cpu (scaled_mm is not implemented for 'CPU'). Set \"bf16\"."
    )


def test_a_device_whose_product_is_wrong_is_refused() -> None:
    def without_scales(left: RoundedRows, right: RoundedRows, dtype: torch.dtype) -> Tensor:
        out = multiply_rows(left, RoundedRows(right.values, torch.ones_like(right.scale)), dtype)
        return out * right.scale.mean()

    with pytest.raises(LayoutError) as caught:
        require_fp8(torch.device("cpu"), without_scales)
    assert str(caught.value).startswith(
        'train.precision = "fp8" was tried on cpu, and a product of float8 rows is off by '
    )
    assert str(caught.value).endswith('where rounding explains 7.8e-03. Set "bf16".')


def test_a_product_that_is_not_a_number_is_refused() -> None:
    def nothing(left: RoundedRows, right: RoundedRows, dtype: torch.dtype) -> Tensor:
        return torch.full((len(left.values), len(right.values)), torch.nan, dtype=dtype)

    with pytest.raises(LayoutError, match="is off by nan of its operands"):
        require_fp8(torch.device("cpu"), nothing)
