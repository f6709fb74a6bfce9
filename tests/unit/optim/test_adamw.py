"""AdamW's groups, and a clip on plain tensors; on meshes it is tested with ranks."""

import copy

import pytest
import torch
from torch import nn

from equipoise.optim.adamw import clip, global_norm, make_adamw
from equipoise.spec.run.spec import TrainSpec


def with_gradients() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    for number, parameter in enumerate(module.parameters(), 1):
        parameter.grad = torch.full_like(parameter, float(number))
    return module


def test_weight_decay_is_on_matrices_alone() -> None:
    train = TrainSpec(lr=0.5, weight_decay=0.3, beta1=0.8, beta2=0.9, eps=1e-6)
    matrices, vectors = make_adamw(with_gradients(), train).param_groups
    assert [tuple(p.shape) for p in matrices["params"]] == [(2, 3)]
    assert [tuple(p.shape) for p in vectors["params"]] == [(2,), (2,), (2,)]
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    for group in (matrices, vectors):
        assert (group["lr"], group["betas"], group["eps"]) == (0.5, (0.8, 0.9), 1e-6)


def test_a_module_without_matrices_has_one_group() -> None:
    assert len(make_adamw(nn.LayerNorm(4), TrainSpec()).param_groups) == 1


def test_one_launch_updates_as_the_plain_loop_does() -> None:
    """Both are as near to the update in fp64, and nearer to each other."""
    train = TrainSpec(lr=1e-3)
    fused = with_gradients()
    plain, wide = copy.deepcopy(fused), copy.deepcopy(fused).double()
    generator = torch.Generator().manual_seed(0)
    optimizers = [make_adamw(each, train) for each in (fused, plain, wide)]
    assert all(group["fused"] for group in optimizers[0].param_groups)
    for group in (*optimizers[1].param_groups, *optimizers[2].param_groups):
        group["fused"], group["foreach"] = False, False
    for _ in range(20):
        for weights in zip(*(each.parameters() for each in (fused, plain, wide)), strict=True):
            drawn = torch.randn(weights[0].shape, generator=generator)
            for weight in weights:
                weight.grad = drawn.to(weight.dtype)
        for each in optimizers:
            each.step()
    for one, other, exact in zip(
        *(each.parameters() for each in (fused, plain, wide)), strict=True
    ):
        scale = float(exact.detach().abs().max())
        assert float((one - other).detach().abs().max()) <= 1e-7 * scale
        assert float((one - exact).detach().abs().max()) <= 1e-6 * scale


def test_the_norm_is_over_all_gradients() -> None:
    module = with_gradients()
    squares = 6 * 1 + 2 * 4 + 2 * 9 + 2 * 16
    assert float(global_norm(module)) == pytest.approx(squares**0.5, rel=1e-6)
    assert global_norm(module).dtype == torch.float64


def test_a_clip_scales_every_gradient_down_and_none_up() -> None:
    module = with_gradients()
    clip(module, float(global_norm(module)), 1000.0)
    assert float(next(module.parameters()).grad[0, 0]) == 1.0
    clip(module, float(global_norm(module)), 2.0)
    assert float(global_norm(module)) == pytest.approx(2.0, rel=1e-5)


def test_a_clip_before_any_backward() -> None:
    with pytest.raises(ValueError, match="No parameter has a gradient") as caught:
        global_norm(nn.Linear(2, 2))
    assert str(caught.value) == ("No parameter has a gradient: run a backward before clipping.")
