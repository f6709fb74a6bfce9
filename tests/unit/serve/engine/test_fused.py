"""Layers whose weights are laid out for answering."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from equipoise.base.errors import ModelError
from equipoise.nn.lora import add_adapters
from equipoise.serve.engine.bits import bits_of
from equipoise.serve.engine.fused import FusedDecoder, FusedLayer
from equipoise.serve.engine.jit import compile_rows, narrow
from equipoise.serve.engine.rows import gate_rows, norm_rows
from equipoise.spec.run.lora import LoraSpec
from support.serving.paged import PLAIN, built

EXPERTS = dataclasses.replace(PLAIN, experts=4, top_k=2, expert_ffn=24, shared_ffn=16)


@compile_rows()
def rounded(x, out):
    for at in range(len(x)):
        out[at] = narrow(x[at], out[at])


@given(st.lists(st.floats(width=32), min_size=1, max_size=40))
def test_numbers_are_rounded_to_bf16_as_torch_does(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    ours = torch.empty(len(x), dtype=torch.bfloat16)
    rounded(x.numpy(), bits_of(ours))
    assert torch.equal(ours.nan_to_num(), x.bfloat16().nan_to_num())
    assert torch.equal(ours.isnan(), x.isnan())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gate_has_a_value_at_every_input(dtype: torch.dtype) -> None:
    gate = torch.cat((torch.linspace(-300, 300, 997), torch.tensor([torch.nan, torch.inf])))
    both = torch.stack((gate, torch.full_like(gate, 2.0))).T.contiguous().to(dtype)
    ours = torch.empty(len(both), 1, dtype=dtype)
    gate_rows(bits_of(both), bits_of(ours))
    theirs = nn.functional.silu(both[:, :1].double()) * both[:, 1:].double()
    error = 2e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(ours.double(), theirs, rtol=error, atol=1e-30, equal_nan=True)


def test_a_row_has_the_same_bits_beside_any_others() -> None:
    x = torch.randn(9, 77, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight, eps = np.ones(77, dtype=np.float32), np.float32(1e-5)
    together, alone = torch.empty_like(x), torch.empty_like(x[4:5])
    norm_rows(bits_of(x), weight, eps, bits_of(together))
    norm_rows(bits_of(x[4:5]), weight, eps, bits_of(alone))
    assert torch.equal(together[4:5], alone)


def test_the_weights_of_the_layers_are_taken() -> None:
    decoder = built(PLAIN)
    served = FusedDecoder(decoder)
    assert all(isinstance(layer, FusedLayer) for layer in served.layers)
    assert sum(weight.numel() for weight in decoder.layers.parameters()) == 0


def test_experts_and_adapters_stay_as_they_are() -> None:
    kinds = [type(layer).__name__ for layer in FusedDecoder(built(EXPERTS)).layers]
    assert kinds == ["DecoderLayer"] * 3
    adapted = built(PLAIN)
    add_adapters(adapted, LoraSpec(rank=2, targets=("gate",)), seed=0)
    kinds = [type(layer).__name__ for layer in FusedDecoder(adapted).layers]
    assert kinds == ["DecoderLayer"] * 3


def test_a_loss_is_refused() -> None:
    x_tD, labels_t = torch.zeros(1, PLAIN.hidden), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ModelError) as caught:
        FusedDecoder(built(PLAIN)).finish(x_tD, labels_t)
    assert str(caught.value) == (
        "A decoder that answers computes no loss. Give it to train instead."
    )
