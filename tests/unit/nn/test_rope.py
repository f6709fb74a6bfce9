"""Rotary positions against complex numbers, and what makes them relative."""

import dataclasses
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.nn.rope import rotary_frequencies, rotary_table, rotate
from equipoise.spec.model.presets import RopeScaling, preset

MODEL = preset("7m")
POSITIONS = st.lists(st.integers(0, 9000), min_size=1, max_size=8)


@settings(deadline=None, max_examples=12)
@given(POSITIONS, st.sampled_from([10_000.0, 500_000.0]))
def test_pairs_turn_as_complex_numbers(positions: list[int], theta: float) -> None:
    model = dataclasses.replace(MODEL, rope_theta=theta)
    half = model.head_width // 2
    x_THE = torch.randn(len(positions), 3, model.head_width, dtype=torch.float64)
    frequency = rotary_frequencies(model)
    table = rotary_table(frequency, torch.tensor(positions), torch.float64)
    naive = torch.tensor([theta ** (-2 * pair / model.head_width) for pair in range(half)])
    torch.testing.assert_close(frequency, naive, rtol=1e-6, atol=0)
    angles = torch.tensor(positions, dtype=torch.float32)[:, None] * frequency
    turns = torch.polar(torch.ones(1, dtype=torch.float64), angles.double())[:, None]
    turned = torch.complex(x_THE[..., :half], x_THE[..., half:]) * turns
    expected = torch.cat([turned.real, turned.imag], -1)
    # 1e-6: cosines of float32 angles.
    torch.testing.assert_close(rotate(x_THE, table), expected, rtol=0, atol=1e-6)


@settings(deadline=None, max_examples=12)
@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 200))
def test_scores_depend_on_the_distance_alone(query: int, key: int, shift: int) -> None:
    frequency = rotary_frequencies(MODEL).double()
    q, k = torch.randn(2, 1, 1, MODEL.head_width, dtype=torch.float64)

    def score(query: int, key: int) -> torch.Tensor:
        tables = [
            rotary_table(frequency, torch.tensor([position]), torch.float64)
            for position in (query, key)
        ]
        return (rotate(q, tables[0]) * rotate(k, tables[1])).sum()

    torch.testing.assert_close(
        score(query, key), score(query + shift, key + shift), rtol=0, atol=1e-9
    )


def test_backward_turns_the_other_way() -> None:
    frequency = rotary_frequencies(MODEL)
    table = rotary_table(frequency, torch.arange(5), torch.float64)
    x_THE = torch.randn(5, 2, MODEL.head_width, dtype=torch.float64, requires_grad=True)
    out = rotate(x_THE, table)
    out.backward(out.detach())
    torch.testing.assert_close(x_THE.grad, x_THE.detach(), rtol=0, atol=1e-6)
    assert torch.autograd.gradcheck(lambda x: rotate(x, table), (x_THE,))


def test_zero_positions() -> None:
    table = rotary_table(rotary_frequencies(MODEL), torch.arange(0), torch.float32)
    assert rotate(torch.empty(0, 4, MODEL.head_width), table).shape == (0, 4, MODEL.head_width)


def test_llama3_scaling_stretches_slow_pairs_and_leaves_fast_ones() -> None:
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_tokens=64)
    model = dataclasses.replace(MODEL, head_width=64, rope_theta=500_000.0)
    plain = rotary_frequencies(model)
    scaled = rotary_frequencies(dataclasses.replace(model, rope_scaling=scaling))
    turns = 64 * plain / (2 * math.pi)  # of the original context
    assert torch.equal(scaled[turns > 4], plain[turns > 4])
    assert torch.equal(scaled[turns < 1], plain[turns < 1] / 8)
    between = (turns >= 1) & (turns <= 4)
    assert between.any()
    assert ((scaled <= plain) & (scaled >= plain / 8))[between].all()
    assert (scaled.diff() < 0).all()
