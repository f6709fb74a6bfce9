"""Products with weights in panels: rounded once, and rows by themselves."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from equipoise.nn.device.halves import widens
from equipoise.serve.engine.products import pairs
from equipoise.serve.engine.products.pairs import PairWeight, multiplies_by_pairs
from equipoise.serve.engine.products.words import WordWeight

WORD = torch.zeros(1, 2, dtype=torch.bfloat16)
WEIGHTS = [WordWeight, PairWeight] if multiplies_by_pairs(WORD) else [WordWeight]
needs_pairs = pytest.mark.skipif(
    PairWeight not in WEIGHTS, reason="this processor does not multiply pairs of bf16"
)


def drawn(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=source).bfloat16() for shape in shapes]


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("rows", [1, 4, 7, 8, 97, 200])
def test_products_are_rounded_once_and_rows_are_by_themselves(kind, rows: int) -> None:
    weight, x, added = drawn((70, 34), (rows, 34), (rows, 70))
    panels = kind(weight)
    for more, wide in ((added, added.double()), (added[0], added[0].double()), (None, 0.0)):
        out = panels.multiply(x, more)
        exact = x.double() @ weight.double().T + wide
        assert ((out.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-5).all()
        last = panels.multiply(x[-1:], more[-1:] if more is added else more)
        assert torch.equal(out[-1:], last)


@needs_pairs
@given(st.integers(1, 210), st.integers(1, 130), st.integers(1, 40), st.integers(0, 9))
def test_a_gate_meets_its_up(rows: int, outputs: int, half: int, seed: int) -> None:
    weight, x = drawn((2 * outputs, 2 * half), (rows, 2 * half), seed=seed)
    out = PairWeight(weight, is_gate=True).gate(x)
    gate, up = (x.double() @ part.double().T for part in weight.view(2, outputs, -1))
    exact = nn.functional.silu(gate) * up
    size = (1 + gate.abs()) * (1 + up.abs())
    assert ((out.double() - exact).abs() <= 2**-6 * size).all()
    one = PairWeight(weight, is_gate=True).gate(x[rows // 2 : rows // 2 + 1])
    assert torch.equal(out[rows // 2 : rows // 2 + 1], one)


@needs_pairs
def test_bits_do_not_depend_on_threads_or_the_cache() -> None:
    weight, x = drawn((50, 34), (100, 34))
    threads, panels = torch.get_num_threads(), PairWeight(weight)
    first = panels.multiply(x, None)
    try:
        for each in (1, 2, 3):
            torch.set_num_threads(each)
            assert torch.equal(first, panels.multiply(x, None))
    finally:
        torch.set_num_threads(threads)
    deep, y = drawn((50, 2 * pairs._DEPTH + 90), (3, 2 * pairs._DEPTH + 90))
    exact = y.double() @ deep.double().T
    error = (PairWeight(deep).multiply(y, None).double() - exact).abs()
    assert (error <= 2**-8 * exact.abs() + 1e-3).all()


@needs_pairs
def test_processors_that_widen_bf16_are_left_to_words() -> None:
    assert multiplies_by_pairs(WORD) == (not widens(WORD))
    assert not multiplies_by_pairs(WORD[:, :1])
    assert not multiplies_by_pairs(WORD.float())
