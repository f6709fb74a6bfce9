"""Balancing: the auxiliary loss against autograd, integer counts, and loads that even out."""

import dataclasses

import pytest
import torch
from torch import Tensor

from equipoise.nn.decoder import Decoder, initialize
from equipoise.nn.moe.balance import (
    balance_loss,
    balances,
    collect_loads,
    set_loss_scale,
    settle_loads,
)
from equipoise.nn.moe.layer import MixtureOfExperts
from equipoise.spec.model.presets import ModelSpec

MODEL = ModelSpec(
    layers=3,
    hidden=16,
    heads=2,
    kv_heads=1,
    ffn=24,
    vocab=61,
    head_width=8,
    experts=4,
    top_k=2,
    expert_ffn=8,
    balance_rate=0.5,
    dense_layers=1,
)


def test_the_loss_is_one_at_balance_and_at_most_the_number_of_experts() -> None:
    even = torch.full((10, 4), 0.25, dtype=torch.float64)
    assert float(balance_loss(even, torch.tensor([5, 5, 5, 5]))) == pytest.approx(10.0)
    one = torch.eye(4, dtype=torch.float64)[[0] * 10]
    assert float(balance_loss(one, torch.tensor([10, 0, 0, 0]))) == pytest.approx(40.0)


def test_the_gradient_is_autograds_of_the_loss_divided_by_labels() -> None:
    layer = MixtureOfExperts(MODEL).double()
    balance = layer.router.balance
    x = torch.randn(9, MODEL.hidden, dtype=torch.float64, requires_grad=True)
    counts, labels = torch.tensor([7, 1, 0, 2]), 5
    inputs = [x, layer.router.weight]

    def gradients() -> list[Tensor]:
        out = layer(torch.zeros_like(x), x)
        return list(torch.autograd.grad(out.sum() / labels, inputs))

    without = gradients()
    assert float(balance.penalty) == 0.0  # no step has been counted yet
    balance.settle(counts)
    set_loss_scale(layer, 1 / labels)
    found = gradients()
    scores = torch.softmax(x @ layer.router.weight.t(), dim=1)
    loss = MODEL.balance_rate * balance_loss(scores, counts)
    expected = torch.autograd.grad(loss / labels, inputs)
    for grad, plain, want in zip(found, without, expected, strict=True):
        torch.testing.assert_close(grad - plain, want, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(balance.penalty, loss.detach())


def test_a_bias_goes_up_or_down_by_whole_steps() -> None:
    model = dataclasses.replace(MODEL, balance="bias", balance_rate=0.25)
    balance = MixtureOfExperts(model).router.balance
    balance.settle(torch.tensor([10, 2, 4, 0]))  # an even share is 4
    balance.settle(torch.tensor([10, 2, 5, 1]))
    assert balance.state_X.tolist() == [-2, 2, -1, 2]
    scores = torch.zeros(1, 4)
    assert balance.biased(scores).tolist() == [[-0.5, 0.5, -0.25, 0.5]]
    assert scores.tolist() == [[0.0] * 4]


def test_a_bias_changes_the_choice_and_not_its_weights() -> None:
    model = dataclasses.replace(MODEL, balance="bias", norm_top_k=False, top_k=1)
    layer = MixtureOfExperts(model).double()
    layer.router.balance.state_X.copy_(torch.tensor([0, 0, 100, 0]))
    x = torch.randn(5, MODEL.hidden, dtype=torch.float64)
    weights, rows, _ = layer.router(x)
    scores = torch.softmax(x @ layer.router.weight.t(), dim=1)
    assert rows.counts_X.tolist() == [0, 0, 5, 0]
    torch.testing.assert_close(weights, scores[:, 2:3])


def steps(model: ModelSpec, count: int) -> list[Tensor]:
    """Loads of each step of training on one text, with a plain update."""
    torch.manual_seed(0)
    decoder = Decoder(model)
    initialize(decoder, 0)
    with torch.no_grad():  # routers that prefer one expert
        decoder.embed.weight += 0.05
        for each in decoder.layers:
            if isinstance(each.feed_forward, MixtureOfExperts):
                each.feed_forward.router.weight[0] += 0.05
    tokens = torch.randint(model.vocab, (256,))
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=3e-3)
    found = []
    for _ in range(count):
        set_loss_scale(decoder, 1 / 255)
        (decoder(tokens[:-1], [255], labels_T=tokens[1:]) / 255).backward()
        optimizer.step()
        optimizer.zero_grad()
        loads, _ = collect_loads(decoder)
        settle_loads(decoder, loads)
        found.append(loads)
    return found


@pytest.mark.long
@pytest.mark.parametrize(("rule", "rate"), [("auxiliary", 0.1), ("bias", 0.005)])
def test_loads_even_out(rule: str, rate: float) -> None:
    def skew(loads: Tensor) -> float:
        return float((loads.amax(1) / loads.double().mean(1)).max())

    left = steps(dataclasses.replace(MODEL, balance="none"), 40)
    found = steps(dataclasses.replace(MODEL, balance=rule, balance_rate=rate), 40)
    assert all(loads.sum(1).tolist() == [510, 510] for loads in found)
    assert skew(left[0]) == skew(found[0]) > 1.4
    last = sum(skew(loads) for loads in found[-5:]) / 5
    assert last < 1.25 < sum(skew(loads) for loads in left[-5:]) / 5


def test_loads_are_of_the_sparse_layers_in_order_and_are_forgotten_once_settled() -> None:
    decoder = Decoder(MODEL)
    initialize(decoder, 0)
    tokens = torch.randint(MODEL.vocab, (24,))
    for _ in range(2):
        decoder(tokens, [24], labels_T=tokens).backward()
    loads, penalty = collect_loads(decoder)
    assert loads.shape == (2, 4) and loads.dtype == torch.int64
    assert loads.sum(1).tolist() == [96, 96]
    assert float(penalty) == 0.0
    settle_loads(decoder, 3 * loads)
    assert [each.state_X.tolist() for each in balances(decoder)] == (3 * loads).tolist()
    assert not collect_loads(decoder)[0].any()
    saved = [name for name in decoder.state_dict() if "balance" in name]
    assert saved == [f"layers.{i}.feed_forward.router.balance.state_X" for i in (1, 2)]
