"""Weight gradients put off: both halves together equal one backward, weight by weight."""

import dataclasses
from typing import get_args

import pytest
import torch

from equipoise.nn.decoder import Decoder, initialize
from equipoise.nn.defer import defer_weights
from equipoise.nn.project import add_project, project
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.spec import Recompute

MODEL = ModelSpec(layers=2, hidden=16, heads=2, kv_heads=1, ffn=24, vocab=31, head_width=8)
DEFERRED = {"query", "key", "value", "output", "gate", "up", "down"}


def decoder_of(model: ModelSpec, *, recompute: Recompute = "none") -> Decoder:
    decoder = Decoder(model).double()
    initialize(decoder, 0)
    decoder.set_recompute(recompute)
    return decoder


def loss_of(decoder: Decoder, lengths: tuple[int, ...]) -> torch.Tensor:
    tokens = torch.arange(sum(lengths)) % decoder.model.vocab
    return decoder(tokens, lengths, labels_T=tokens.roll(-1))


@pytest.mark.parametrize("recompute", get_args(Recompute))
@pytest.mark.parametrize("keys", [{}, {"tied": True}, {"qkv_bias": True, "qk_norm": True}])
def test_both_halves_equal_a_whole_backward(recompute: Recompute, keys) -> None:
    model = dataclasses.replace(MODEL, **keys)
    whole, split = (decoder_of(model, recompute=recompute) for _ in range(2))
    for lengths in ((5, 3), (0,), (7,)):  # gradients are added up
        loss_of(whole, lengths).backward()
        before = {name: p.grad for name, p in split.named_parameters()}
        before = {name: None if grad is None else grad.clone() for name, grad in before.items()}
        loss = loss_of(split, lengths)
        later = defer_weights(loss)
        loss.backward()
        for name, parameter in split.named_parameters():
            if not DEFERRED & set(name.split(".")) or name.endswith("bias"):
                assert parameter.grad is not None, name
            elif before[name] is None:
                assert parameter.grad is None, name
            else:
                assert torch.equal(parameter.grad, before[name]), name
        later.finish()
    for one, other in zip(whole.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-12, atol=1e-14)
        assert other.grad.is_contiguous()


def test_weights_may_be_shared_fixed_or_computed() -> None:
    x, shared, fixed, source = (torch.randn(4, 4, dtype=torch.float64) for _ in range(4))
    shared.requires_grad_()
    source.requires_grad_()

    def run() -> torch.Tensor:
        first, second, third = project(x, shared, fixed, shared)
        return add_project(first + second, third, source * 2).square().sum()

    wanted = torch.autograd.grad(run(), (shared, source))
    out = run()
    later = defer_weights(out)
    out.backward()
    assert shared.grad is None
    assert torch.equal(source.grad, wanted[1])  # no leaf: both halves at once
    later.finish()
    torch.testing.assert_close(shared.grad, wanted[0], rtol=1e-12, atol=1e-14)
    later.finish()  # nothing is left
    torch.testing.assert_close(shared.grad, wanted[0], rtol=1e-12, atol=1e-14)


def test_a_whole_backward_after_a_split_one_is_whole() -> None:
    decoder = decoder_of(MODEL)
    defer_weights(loss_of(decoder, (4,)))  # that graph alone
    loss_of(decoder, (4,)).backward()
    assert all(parameter.grad is not None for parameter in decoder.parameters())
