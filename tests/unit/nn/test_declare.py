"""Every weight says how it may be split."""

import dataclasses

import pytest
import torch
from torch import nn

from equipoise.base.errors import LayoutError
from equipoise.nn.declare import Copied, Split, declared, local
from equipoise.nn.decoder import Decoder
from equipoise.spec.model.presets import ModelSpec

MODEL = ModelSpec(
    layers=2,
    hidden=16,
    heads=4,
    kv_heads=2,
    ffn=24,
    vocab=32,
    head_width=4,
    qkv_bias=True,
    qk_norm=True,
)


@pytest.mark.parametrize("tied", [False, True])
def test_every_weight_of_a_decoder_is_declared(tied: bool) -> None:
    decoder = Decoder(dataclasses.replace(MODEL, tied=tied))
    found = declared(decoder)
    assert list(found) == [name for name, _ in decoder.named_parameters()]
    assert found["layers.1.attention.key.weight"] == Split(0, 2)
    assert found["layers.0.attention.query.bias"] == Split(0, 4)
    assert found["layers.0.attention.output.weight"] == Split(1, 4)
    assert found["layers.0.attention.key_norm.weight"] == Copied()
    assert found["layers.0.feed_forward.down.weight"] == Split(1)
    assert found["embed.weight"] == Split(0)
    assert found["norm.weight"] == Copied()


def test_a_weight_that_nobody_declares_is_refused() -> None:
    decoder = Decoder(MODEL)
    decoder.layers[1].feed_forward = nn.Linear(16, 16)
    with pytest.raises(LayoutError) as refused:
        declared(decoder)
    names = sum(1 for _ in decoder.parameters())
    assert str(refused.value) == (
        f"2 of {names} weights have no declared placement, layers.1.feed_forward.weight first. "
        f"Add them to declare() of the module that computes with them, or set layout.tp = 1."
    )


def test_a_plain_weight_is_its_own_share() -> None:
    weight = nn.Parameter(torch.ones(2))
    assert local(weight) is weight
