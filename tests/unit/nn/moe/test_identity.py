"""Experts without weights: exact, free, and as many on average as asked, whatever routers do."""

import dataclasses

import pytest
import torch

from equipoise.base.errors import ModelError, SpecError
from equipoise.nn.moe.balance import LoadBalance, count_choices
from equipoise.nn.moe.layer import MixtureOfExperts
from equipoise.nn.moe.route import choose
from equipoise.plan.export.model import megatron_model
from equipoise.spec.model.hf_config import hf_config
from equipoise.spec.model.presets import preset

PLAIN = dataclasses.replace(
    preset("moe-3m"),
    hidden=16,
    experts=4,
    top_k=3,
    expert_ffn=8,
    identity_experts=3,
    real_top_k=1.5,
    balance="bias",
    balance_rate=0.02,
)


@pytest.mark.parametrize("normalizes", [True, False])
def test_the_layer_equals_a_loop_over_tokens(normalizes: bool) -> None:
    torch.manual_seed(0)
    layer = MixtureOfExperts(dataclasses.replace(PLAIN, norm_top_k=normalizes)).double()
    for weight in layer.parameters():
        torch.nn.init.normal_(weight)
    x, residual = (torch.randn(13, 16, dtype=torch.float64, requires_grad=True) for _ in range(2))
    computed: list[int] = []
    plain = type(layer.experts).forward

    def watch(self: object, rows: torch.Tensor, *rest: object) -> torch.Tensor:
        computed.append(len(rows))
        return plain(self, rows, *rest)

    type(layer.experts).forward = watch
    try:
        y = layer(residual, x)
    finally:
        type(layer.experts).forward = plain
    scores = torch.softmax(x @ layer.router.weight.t(), dim=1)
    chosen = choose(scores, 3)
    # Rows of experts with weights alone are computed, and so are all that would travel.
    assert computed == [int((chosen < 4).sum())] and computed[0] < chosen.numel()
    rows = []
    for token in range(13):
        weights = scores[token, chosen[token]]
        weights = weights / weights.sum() if normalizes else weights
        total = residual[token]
        for weight, expert in zip(weights, chosen[token].tolist(), strict=True):
            out = x[token]
            if expert < 4:
                gate, up = (part.weight[expert] for part in (layer.experts.gate, layer.experts.up))
                hidden = torch.nn.functional.silu(gate @ out) * (up @ out)
                out = layer.experts.down.weight[expert] @ hidden
            total = total + weight * out
        rows.append(total)
    expected = torch.stack(rows)
    torch.testing.assert_close(y, expected)
    sources = [x, residual, *layer.parameters()]
    mine, theirs = (
        torch.autograd.grad(each.square().sum(), sources, retain_graph=True)
        for each in (y, expected)
    )
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_a_drifting_router_is_held_at_the_mean() -> None:
    """500 steps of a router that walks, and leans more and more to experts without weights."""
    model = dataclasses.replace(PLAIN, experts=8, identity_experts=4, top_k=4, real_top_k=2.5)
    balance, free = LoadBalance(model), LoadBalance(model)
    drawn = torch.Generator().manual_seed(0)
    weight = 0.3 * torch.randn(12, 16, generator=drawn)
    means: dict[str, list[float]] = {"held": [], "free": []}
    for step in range(500):
        weight += 0.02 * torch.randn(12, 16, generator=drawn)
        lean = torch.tensor([0.0] * 8 + [step / 200] * 4)
        x = torch.randn(2048, 16, generator=drawn)
        scores = torch.softmax(x @ weight.t() + lean, dim=1)
        for name, each in (("held", balance), ("free", free)):
            loads = count_choices(choose(each.biased(scores), 4), 12)
            means[name].append(4 * float(loads[:8].sum()) / float(loads.sum()))
            if name == "held":
                each.settle(loads)
    assert balance.state_X[8:].tolist() == [0] * 4
    late = torch.tensor(means["held"][-50:])
    assert abs(float(late.mean()) / 2.5 - 1) <= 0.02
    assert float((late / 2.5 - 1).abs().max()) <= 0.05
    assert abs(means["free"][-1] / 2.5 - 1) > 0.10  # the test would notice no control


def test_counts_are_of_what_is_computed() -> None:
    assert PLAIN.mean_top_k == 1.5 and PLAIN.choices == 7
    router, one = 16 * 7, PLAIN.expert_params
    attention = PLAIN.attention_params
    assert PLAIN.count_layer(sparse=True, active=True) == attention + router + round(1.5 * one)
    assert PLAIN.count_layer(sparse=True, active=False) == attention + router + 4 * one
    layer = MixtureOfExperts(PLAIN)
    assert sum(each.numel() for each in layer.parameters()) == router + 4 * one


def test_no_other_program_is_given_them() -> None:
    with pytest.raises(ModelError) as caught:
        hf_config(PLAIN)
    assert str(caught.value) == (
        "No Hugging Face model type of this package's has 3 experts without weights beside 4 with "
        "them. Train with model.identity_experts = 0 to export."
    )
    with pytest.raises(SpecError) as refused:
        megatron_model(PLAIN, 64)
    assert str(refused.value) == (
        "Megatron-LM has no experts without weights, and this model has 3 in each sparse layer. "
        "Export a model without identity_experts."
    )
