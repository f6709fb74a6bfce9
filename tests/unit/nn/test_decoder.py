"""The whole decoder: recomputation, empty packs, documents, and weights named by seed."""

import dataclasses
import math
from collections import Counter
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise.base.errors import ModelError
from equipoise.nn.attention import PackAttention, attend_documents, pack_attention
from equipoise.nn.decoder import Decoder, initialize
from equipoise.nn.loss import IGNORED
from equipoise.spec.model.presets import ModelSpec, RopeScaling
from equipoise.spec.model.sizes import LatentSpec
from equipoise.spec.recompute import attention_repeats
from equipoise.spec.run.spec import Recompute

PLAIN = ModelSpec(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=61, head_width=8)
MODELS = {
    "untied": PLAIN,
    "tied": dataclasses.replace(PLAIN, tied=True),
    "biases": dataclasses.replace(PLAIN, qkv_bias=True),
    "norms": dataclasses.replace(PLAIN, qk_norm=True, head_width=16),
    "scaled": dataclasses.replace(PLAIN, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 16)),
}
LENGTHS = [9, 1, 14]

each_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


def build(model: ModelSpec, seed: int = 0) -> Decoder:
    decoder = Decoder(model)
    initialize(decoder, seed)
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            if name.endswith("bias"):  # zero at the start, which would hide one that is dropped
                weight.uniform_(-0.5, 0.5, generator=torch.Generator().manual_seed(1))
    return decoder


def draw(model: ModelSpec, lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens_T = torch.randint(model.vocab, (sum(lengths),), generator=generator)
    labels_T = torch.randint(model.vocab, (sum(lengths),), generator=generator)
    labels_T[torch.rand(sum(lengths), generator=generator) < 0.2] = IGNORED
    return tokens_T, labels_T


def step(
    decoder: Decoder, tokens_T: Tensor, labels_T: Tensor, pack: list[int] | PackAttention
) -> list[Tensor]:
    decoder.zero_grad()
    loss = decoder(tokens_T, pack, labels_T=labels_T)
    loss.backward()
    grads = [weight.grad for weight in decoder.parameters()]
    assert all(grad is not None for grad in grads)
    return [loss.detach(), *(grad.clone() for grad in grads if grad is not None)]


@each_model
def test_recomputation_is_bitwise_the_same(model: ModelSpec) -> None:
    decoder = build(model)
    batch = draw(model, LENGTHS)
    kept = step(decoder, *batch, LENGTHS)
    for setting in get_args(Recompute):
        decoder.set_recompute(setting)
        again = step(decoder, *batch, LENGTHS)
        assert all(torch.equal(one, two) for one, two in zip(kept, again, strict=True)), setting
    assert any(grad.any() for grad in kept[1:])


@each_model
def test_a_pack_of_no_tokens_has_zero_gradients(model: ModelSpec) -> None:
    decoder = build(model)
    tokens_T, labels_T = draw(model, [])
    loss, *grads = step(decoder, tokens_T, labels_T, [])
    assert float(loss) == 0.0
    assert len(grads) == len(list(decoder.parameters()))
    assert not any(grad.any() for grad in grads)
    assert decoder(tokens_T, []).shape == (0, model.vocab)


@each_model
def test_loss_is_the_cross_entropy_of_the_logits(model: ModelSpec) -> None:
    decoder = build(model).double()
    tokens_T, labels_T = draw(model, LENGTHS)
    loss, *grads = step(decoder, tokens_T, labels_T, LENGTHS)
    decoder.zero_grad()
    expected = cross_entropy(
        decoder(tokens_T, LENGTHS), labels_T, ignore_index=IGNORED, reduction="sum"
    )
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for grad, weight in zip(grads, decoder.parameters(), strict=True):
        torch.testing.assert_close(grad, weight.grad, rtol=1e-9, atol=1e-12)


@each_model
def test_a_pack_is_its_documents(model: ModelSpec) -> None:
    """Losses and gradients of a pack are the sums of the documents' own."""
    decoder = build(model).double()
    tokens_T, labels_T = draw(model, LENGTHS)
    packed = step(decoder, tokens_T, labels_T, LENGTHS)
    sums = [torch.zeros_like(each) for each in packed]
    for tokens, labels in zip(tokens_T.split(LENGTHS), labels_T.split(LENGTHS), strict=True):
        for total, part in zip(sums, step(decoder, tokens, labels, [len(tokens)]), strict=True):
            total += part
    for one, two in zip(packed, sums, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)


def test_other_documents_do_not_change_a_logit() -> None:
    decoder = build(PLAIN)
    tokens_T, _ = draw(PLAIN, LENGTHS)
    other_T = tokens_T.clone()
    other_T[:9] = (other_T[:9] + 7) % PLAIN.vocab
    with torch.no_grad():
        first, second = decoder(tokens_T, LENGTHS), decoder(other_T, LENGTHS)
    assert torch.equal(first[9:], second[9:])
    assert not torch.equal(first[:9], second[:9])


def test_a_weight_is_its_seed_and_its_name() -> None:
    small, deep = build(PLAIN, seed=5), build(dataclasses.replace(PLAIN, tied=True), seed=5)
    for name, weight in deep.state_dict().items():
        assert torch.equal(weight, small.state_dict()[name]), name
    # Drawing from torch's own generator before, or in another order, changes nothing.
    torch.randn(3)
    assert torch.equal(build(PLAIN, seed=5).embed.weight, small.embed.weight)
    assert not torch.equal(build(PLAIN, seed=6).embed.weight, small.embed.weight)


def test_more_layers_leave_the_first_as_they_were() -> None:
    shallow, deep = build(PLAIN), build(dataclasses.replace(PLAIN, layers=8))
    scaled = math.sqrt(8 / 2)  # what writes to the residual stream shrinks with depth
    for name, weight in shallow.state_dict().items():
        factor = scaled if name.endswith(("output.weight", "down.weight")) else 1.0
        torch.testing.assert_close(deep.state_dict()[name] * factor, weight)


def test_parameters_are_as_many_as_the_spec_says() -> None:
    for name, model in MODELS.items():
        found = sum(weight.numel() for weight in Decoder(model).parameters())
        assert found == model.params, name


@each_model
@pytest.mark.parametrize("recompute", get_args(Recompute))
def test_tokens_that_say_where_they_stand_may_come_in_any_order(
    model: ModelSpec, recompute: Recompute
) -> None:
    decoder = build(model).double()
    decoder.set_recompute(recompute)
    tokens_T, labels_T = draw(model, LENGTHS)
    expected = step(decoder, tokens_T, labels_T, LENGTHS)
    logits_TV = decoder(tokens_T, LENGTHS)

    order = torch.randperm(sum(LENGTHS), generator=torch.Generator().manual_seed(2))
    back, calls = torch.argsort(order), []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(len(q))
        return attend_documents(q[back], k[back], v[back], LENGTHS)[order]

    positions_T = pack_attention(LENGTHS, tokens_T.device).positions_T[order]
    pack = PackAttention(positions_T, attend)
    found = step(decoder, tokens_T[order], labels_T[order], pack)
    assert calls == [sum(LENGTHS)] * (model.layers + attention_repeats(recompute, model.layers))
    for one, two in zip(found, expected, strict=True):
        assert torch.allclose(one, two, rtol=1e-10, atol=1e-12)
    assert torch.allclose(decoder(tokens_T[order], pack), logits_TV[order], atol=1e-12)
    elsewhere = PackAttention(positions_T + 1, attend)
    assert torch.allclose(decoder(tokens_T[order], elsewhere), logits_TV[order], atol=1e-6)
    swapped = PackAttention(positions_T.flip(0), attend)
    assert not torch.allclose(decoder(tokens_T[order], swapped), logits_TV[order], atol=1e-6)


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({"gated": False}, "Feed-forwards without a gate"),
        ({"latent": LatentSpec(query=8, key_value=8, rope=4)}, "Latent attention"),
    ],
)
def test_what_is_priced_alone_is_not_trained(changed: dict, kind: str) -> None:
    model = ModelSpec(layers=1, hidden=8, heads=2, kv_heads=1, ffn=8, vocab=9, head_width=4)
    with pytest.raises(ModelError) as refused:
        Decoder(dataclasses.replace(model, **changed))
    assert str(refused.value) == (
        f"{kind} can be simulated and planned, but not trained yet. Use a decoder with gated "
        "feed-forwards and grouped-query attention, as in equipoise config."
    )


class Products(TorchDispatchMode):
    """Counts matrix products by their shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[tuple[torch.Size, ...]]()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.counts[tuple(each.shape for each in args)] += 1
        return function(*args, **(kwargs or {}))


def test_a_recomputed_layer_computes_its_last_product_again() -> None:
    # What ``recompute_stops = false`` says of equipoise in spec/program/shipped/equipoise.toml.
    found = []
    for setting in ("none", "full"):
        decoder = build(PLAIN)
        decoder.set_recompute(setting)
        with Products() as products:
            step(decoder, *draw(PLAIN, LENGTHS), LENGTHS)
        tokens, hidden, units = sum(LENGTHS), PLAIN.hidden, PLAIN.ffn
        shapes = ((tokens, hidden), (tokens, units), (units, hidden))
        found.append(products.counts[tuple(map(torch.Size, shapes))])
    assert found == [PLAIN.layers, 2 * PLAIN.layers]
