"""Layers in few bits compute what whole numbers do; ends of inputs cost least error."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.recsys.lowbit.layers import RoundedLinear, layer_bytes
from equipoise.recsys.lowbit.ranges import choose_ends


@given(
    st.integers(1, 1300),
    st.integers(1, 5),
    st.booleans(),
    st.integers(0, 2**31),
)
@settings(max_examples=12, deadline=None)
def test_an_int8_layer_is_whole_number_arithmetic(
    inputs: int, outputs: int, has_bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    linear = torch.nn.Linear(inputs, outputs, bias=has_bias)
    given_BI = 3 * torch.randn(7, inputs)
    layer = RoundedLinear.of(linear, "int8", (-2.0, 2.5))
    layer.is_watched = True
    out = layer(given_BI).double().numpy()
    step = np.float64((layer.ends[1] - layer.ends[0]) / 255)
    clipped = given_BI.clamp(-2.0, 2.5)
    levels = torch.round((clipped - layer.ends[0]) / torch.tensor(step).float()).long().numpy()
    weight = layer.weight.long().numpy()
    whole = levels @ weight.T  # int64: nothing is rounded
    wanted = (whole * step - 2.0 * weight.sum(axis=1)) * layer.scale.double().numpy()
    if linear.bias is not None:
        wanted = wanted + linear.bias.detach().double().numpy()
    size = np.abs(wanted).max() + np.abs(2.0 * weight.sum(axis=1)).max() * float(layer.scale.max())
    assert np.abs(out - wanted).max() <= 1e-6 * max(1.0, size)
    error = (layer.weight.float() * layer.scale[:, None] - linear.weight.detach()).abs()
    assert bool((error <= 0.5001 * layer.scale[:, None] + 1e-9).all())
    beyond = int(((given_BI < -2.0) | (given_BI > 2.5)).sum())
    assert (layer.clipped, layer.seen) == (beyond, given_BI.numel())
    tensors = list(layer.state_dict().values())
    size_bytes = sum(each.numel() * each.element_size() for each in tensors)
    assert size_bytes == layer_bytes(inputs, outputs, "int8", has_bias=has_bias)


def test_an_fp16_layer_computes_in_fp32_from_rounded_weights() -> None:
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(21, 3), torch.randn(4, 21)
    layer = RoundedLinear.of(linear, "fp16", (0.0, 1.0))
    assert layer.weight.dtype == torch.float16
    rounded = linear.weight.detach().half().float()
    assert torch.equal(layer(x), torch.nn.functional.linear(x, rounded, linear.bias))


@given(st.integers(0, 2**31), st.floats(1.0, 1e4))
@settings(max_examples=7, deadline=None)
def test_ends_never_cost_more_than_least_to_greatest(seed: int, far: float) -> None:
    inputs = np.append(np.random.default_rng(seed).standard_normal(4000), far)

    def error(low: float, high: float) -> float:
        step = (high - low) / 255
        rounded = np.round((np.clip(inputs, low, high) - low) / step) * step + low
        return float(((rounded - inputs) ** 2).sum())

    low, high = choose_ends(inputs)
    assert inputs.min() <= low < high <= inputs.max()
    assert error(low, high) <= error(float(inputs.min()), float(inputs.max()))


@pytest.mark.parametrize("inputs", [[2.0], [0.0, 0.0]])
def test_constant_inputs_have_ends(inputs: list[float]) -> None:
    low, high = choose_ends(np.array(inputs))
    assert (low, high) == (inputs[0], inputs[0] + 1.0)
