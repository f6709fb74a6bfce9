"""The mixture of experts against a loop over tokens and experts, alone and in a decoder."""

import dataclasses
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from equipoise.nn.decoder import Decoder, initialize
from equipoise.nn.moe.balance import balances
from equipoise.nn.moe.layer import MixtureOfExperts
from equipoise.nn.moe.route import capacity
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.spec import Recompute

PLAIN = ModelSpec(
    layers=2,
    hidden=16,
    heads=2,
    kv_heads=1,
    ffn=24,
    vocab=61,
    head_width=8,
    experts=6,
    top_k=2,
    expert_ffn=8,
)
MODELS = {
    "plain": PLAIN,
    "no norm": dataclasses.replace(PLAIN, norm_top_k=False),
    "shared": dataclasses.replace(PLAIN, shared_ffn=12),
    "gated": dataclasses.replace(PLAIN, shared_ffn=12, shared_gate=True, top_k=3),
    "all": dataclasses.replace(PLAIN, top_k=6),
    "biased": dataclasses.replace(PLAIN, balance="bias", balance_rate=0.05),
    "capacity": dataclasses.replace(PLAIN, capacity_factor=0.75),
    "some layers": dataclasses.replace(PLAIN, layers=4, dense_layers=1, expert_every=2),
}
LENGTHS = [9, 1, 14]

each_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


def build(model: ModelSpec) -> MixtureOfExperts:
    layer = MixtureOfExperts(model).double()
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(0.0, 0.5)
        layer.router.balance.state_X.copy_(torch.arange(model.experts) % 5)
    return layer


def loop(layer: MixtureOfExperts, model: ModelSpec, residual: Tensor, x: Tensor) -> Tensor:
    """The definition, one token and one expert at a time."""
    scores = torch.softmax(x @ layer.router.weight.t(), dim=1)
    ranked = scores.detach().clone()
    if model.balance == "bias":
        ranked += model.balance_rate * layer.router.balance.state_X
    chosen = torch.topk(ranked, model.top_k, dim=1).indices
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, chosen, True)
    if model.capacity_factor:
        most = capacity(
            len(x), top_k=model.top_k, experts=model.experts, factor=model.capacity_factor
        )
        for expert in range(model.experts):
            mine = kept[:, expert].nonzero().flatten()
            best = mine[scores[mine, expert].argsort(descending=True)]
            kept[best[most:], expert] = False
    outputs = []
    for token in range(len(x)):
        total = residual[token]
        whole = scores[token, chosen[token]].sum() if model.norm_top_k else 1.0
        for expert in chosen[token].tolist():
            if not kept[token, expert]:
                continue
            gate, up, down = (
                getattr(layer.experts, name).weight[expert] for name in ("gate", "up", "down")
            )
            y = down @ (silu(gate @ x[token]) * (up @ x[token]))
            total = total + scores[token, expert] / whole * y
        if layer.shared is not None:
            s = layer.shared
            y = s.down.weight @ (silu(s.gate.weight @ x[token]) * (s.up.weight @ x[token]))
            scale = 1.0 if s.switch is None else torch.sigmoid(s.switch.weight @ x[token])
            total = total + scale * y
        outputs.append(total)
    return torch.stack(outputs)


@each_model
def test_outputs_and_gradients_are_those_of_the_loop(model: ModelSpec) -> None:
    layer = build(model)
    layer.router.balance.rule = "bias" if model.balance == "bias" else "none"
    x = torch.randn(23, model.hidden, dtype=torch.float64, requires_grad=True)
    residual = torch.randn(23, model.hidden, dtype=torch.float64, requires_grad=True)
    pull = torch.randn(23, model.hidden, dtype=torch.float64)
    expected, found = loop(layer, model, residual, x), layer(residual, x)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    inputs = [residual, x, *layer.parameters()]
    wanted = torch.autograd.grad((expected * pull).sum(), inputs)
    grads = torch.autograd.grad((found * pull).sum(), inputs)
    for grad, want in zip(grads, wanted, strict=True):
        assert float((grad - want).abs().max()) <= 1e-10 * max(1.0, float(want.abs().max()))


@each_model
def test_no_tokens_have_zero_gradients(model: ModelSpec) -> None:
    layer = build(model)
    x = torch.zeros(0, model.hidden, dtype=torch.float64, requires_grad=True)
    out = layer(x, x)
    assert out.shape == (0, model.hidden)
    out.sum().backward()
    grads = [weight.grad for weight in layer.parameters()]
    assert all(grad is not None and not grad.any() for grad in grads)


def draw(model: ModelSpec) -> tuple[Tensor, Tensor]:
    return torch.randint(model.vocab, (24,)), torch.randint(model.vocab, (24,))


@each_model
def test_a_decoder_recomputes_bitwise_and_counts_once(model: ModelSpec) -> None:
    decoder = Decoder(model)
    initialize(decoder, 0)
    tokens, labels = draw(model)
    found = []
    for recompute in get_args(Recompute):
        decoder.set_recompute(recompute)
        decoder.zero_grad()
        loss = decoder(tokens, LENGTHS, labels_T=labels)
        loss.backward()
        assert [int(each.loads_X.sum()) for each in balances(decoder)] == (
            [24 * model.top_k] * model.sparse_layers
        )
        for each in balances(decoder):
            each.loads_X.zero_()
        found.append([loss.detach(), *(p.grad.clone() for p in decoder.parameters())])
    assert all(all(map(torch.equal, found[0], other)) for other in found[1:])
    with torch.no_grad():
        decoder(tokens, LENGTHS, labels_T=labels)
    assert not any(each.loads_X.any() for each in balances(decoder))


@each_model
def test_a_decoder_has_the_weights_that_are_counted(model: ModelSpec) -> None:
    decoder = Decoder(model)
    assert sum(weight.numel() for weight in decoder.parameters()) == model.params
    sparse = [isinstance(layer.feed_forward, MixtureOfExperts) for layer in decoder.layers]
    assert sparse == [model.is_sparse(layer) for layer in range(model.layers)]
    expected = {"some layers": [False, True, False, True]}
    name = next(key for key, value in MODELS.items() if value == model)
    assert sparse == expected.get(name, [True, True])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_bias_may_choose_experts_whose_scores_underflow(dtype: torch.dtype) -> None:
    model = dataclasses.replace(PLAIN, balance="bias", balance_rate=1.0)
    layer = build(model).to(dtype)
    x = torch.zeros(2, model.hidden, dtype=dtype).requires_grad_()
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[0, 0] = 1.0
        layer.router.balance.state_X.copy_(torch.tensor([0, 9, 9, 0, 0, 0]))
        x[0, 0] = 1e4  # expert 0 has all of its score, and the bias chooses 1 and 2
    residual = torch.ones(2, model.hidden, dtype=dtype)
    y = layer(residual, x)
    y.sum().backward()
    assert y[0].tolist() == residual[0].tolist() and torch.isfinite(y).all()
    assert all(torch.isfinite(each.grad).all() for each in (x, *layer.parameters()))


@pytest.mark.parametrize("rows", [1, 2, 24])
def test_in_bf16_scores_are_fp32(rows: int) -> None:
    layer = build(PLAIN).float()
    x = torch.randn(rows, PLAIN.hidden)
    wide = layer(torch.zeros_like(x), x)
    layer.bfloat16()
    narrow = layer(torch.zeros_like(x).bfloat16(), x.bfloat16())
    assert narrow.dtype == torch.bfloat16
    seen = []
    layer.router.balance.watch = lambda scores, chosen: seen.append(scores.dtype) or scores
    layer(x.bfloat16(), x.bfloat16())
    assert seen == [torch.float32]
    assert wide.shape == narrow.shape


def test_weights_of_an_expert_depend_on_the_seed_and_the_name_alone() -> None:
    one, two = Decoder(PLAIN), Decoder(dataclasses.replace(PLAIN, layers=1))
    initialize(one, 0)
    initialize(two, 0)
    name = "layers.0.feed_forward.experts.up.weight"
    assert torch.equal(one.get_parameter(name), two.get_parameter(name))
    down = one.get_parameter("layers.0.feed_forward.experts.down.weight")
    assert float(down.detach().std()) == pytest.approx(0.02 * 4**-0.5, rel=0.1)


@pytest.mark.parametrize("identities", [0, 2])
def test_an_only_weight_that_is_scaled_to_one_says_nothing_of_its_score(identities: int) -> None:
    balance = "bias" if identities else "none"
    model = dataclasses.replace(PLAIN, top_k=1, identity_experts=identities, balance=balance)
    layer = MixtureOfExperts(model).double()
    with torch.no_grad():
        layer.router.weight[0] = 1e4  # the others' scores underflow
        layer.router.balance.state_X[1] = 1000 * layer.router.balance.unit
    x = torch.rand(9, model.hidden, dtype=torch.float64, requires_grad=True)
    out = layer(x, x)
    out.square().sum().backward()
    weights, rows, _ = layer.router(x)
    assert weights.unique().tolist() == [1.0]
    assert rows.counts_X.tolist() == ([0, 9] if identities else [9, 0]) + [0] * 4
    # Rounding would differ between layouts, where the gradient is zero.
    assert layer.router.weight.grad.unique().tolist() == [0.0]
    assert all(each.grad.isfinite().all() for each in layer.parameters())
