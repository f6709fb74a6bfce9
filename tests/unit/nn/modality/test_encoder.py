"""Encoders: packed items equal each alone, and their rows stand among a decoder's."""

import dataclasses
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from equipoise.cost.modality import encoder_params, kept_bytes
from equipoise.nn.decoder import Decoder, initialize
from equipoise.nn.loss import IGNORED
from equipoise.nn.modality import encoder as encoder_module
from equipoise.nn.modality.attach import make_encoders
from equipoise.nn.modality.encoder import ItemEncoder
from equipoise.nn.modality.insert import Inserted
from equipoise.spec.modality.sections import AudioSpec, VisionSpec
from equipoise.spec.model.presets import ModelSpec

VISION = VisionSpec(layers=2, hidden=16, heads=2, patch=2)
AUDIO = AudioSpec(layers=1, hidden=8, heads=1)
GRIDS = [(2, 2), (6, 10), (2, 24), (14, 4)]


def _encoder(kind: str = "image") -> ItemEncoder:
    encoders = make_encoders([VISION.encoder, AUDIO.encoder], 12, 0).double()
    encoder = encoders[kind]
    assert isinstance(encoder, ItemEncoder)
    return encoder


def _patches(encoder: ItemEncoder, grids: list[tuple[int, int]]) -> list[Tensor]:
    values = encoder.spec.values
    return [torch.randn(rows * columns, values, dtype=torch.float64) for rows, columns in grids]


def _grads(module: nn.Module) -> list[Tensor]:
    grads = [weight.grad for weight in module.parameters()]
    module.zero_grad()
    return [grad for grad in grads if grad is not None]


@pytest.mark.parametrize("kind", ["image", "audio"])
def test_packed_items_equal_each_item_alone(kind: str) -> None:
    encoder = _encoder(kind)
    grids = GRIDS if kind == "image" else [(2, 1), (40, 1), (6, 1)]
    patches = _patches(encoder, grids)
    packed = encoder(torch.cat(patches), grids)
    weights = torch.randn_like(packed)
    (packed * weights).sum().backward()
    together = _grads(encoder)
    alone = [encoder(each, [grid]) for each, grid in zip(patches, grids, strict=True)]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=0, atol=1e-13)
    parts = weights.split([len(each) for each in alone])
    for each, part in zip(alone, parts, strict=True):
        (each * part).sum().backward()
    for one, other in zip(together, _grads(encoder), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


def test_a_place_in_the_pack_changes_nothing_and_no_item_sees_another() -> None:
    encoder = _encoder()
    first, second, *_ = _patches(encoder, GRIDS)
    one = encoder(torch.cat((first, second)), GRIDS[:2])
    other = encoder(torch.cat((second, first)), [GRIDS[1], GRIDS[0]])
    torch.testing.assert_close(one[1:], other[:-1], rtol=0, atol=1e-14)
    changed = encoder(torch.cat((first + 1, second)), GRIDS[:2])
    assert torch.equal(changed[1:], one[1:])
    assert not torch.allclose(changed[:1], one[:1])


def test_where_a_patch_lies_matters_by_row_and_by_column() -> None:
    encoder = _encoder()
    (patches,) = _patches(encoder, [(4, 12)])
    wide, high = encoder(patches, [(4, 12)]), encoder(patches, [(12, 4)])
    assert not torch.allclose(wide, high)


def test_attention_is_that_of_a_masked_softmax_with_turned_heads() -> None:
    encoder = _encoder()
    layer = encoder.layers[0]
    grids = [(2, 4), (4, 2)]
    x = torch.randn(16, 16, dtype=torch.float64)
    table = encoder._table(grids, x)
    out = layer(x, table, [(2, 8)])
    q, k, v = layer.query_key_value(layer.attention_norm(x)).unflatten(1, (3, 2, 8)).unbind(1)
    quarter = torch.arange(2, dtype=torch.float64)
    rows, columns = (torch.tensor([0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3]),
                     torch.tensor([0, 1, 0, 1, 2, 3, 2, 3, 0, 1, 0, 1, 0, 1, 0, 1]))  # fmt: skip
    frequency = 10_000.0 ** (-quarter / 2)
    angles = torch.cat((rows[:, None] * frequency, columns[:, None] * frequency), 1)[:, None]

    def turn(heads: Tensor) -> Tensor:
        real, imaginary = heads[..., :4], heads[..., 4:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((real * cos - imaginary * sin, imaginary * cos + real * sin), -1)

    scores = torch.einsum("phe,she->hps", turn(q), turn(k)) / 8**0.5
    item = torch.arange(16) // 8
    scores = scores.masked_fill(item[:, None] != item, -torch.inf)
    core = torch.einsum("hps,she->phe", scores.softmax(-1), v).flatten(1)
    middle = x + layer.output(core)
    hidden = nn.functional.gelu(layer.up(layer.feed_forward_norm(middle)), approximate="tanh")
    torch.testing.assert_close(out, middle + layer.down(hidden), rtol=0, atol=1e-13)


def test_no_items_have_no_rows() -> None:
    encoder = _encoder()
    assert encoder(torch.zeros(0, 12, dtype=torch.float64), []).shape == (0, 12)


def test_rows_replace_tokens_whose_embedding_gets_no_gradient() -> None:
    model = ModelSpec(layers=1, hidden=12, heads=2, kv_heads=1, ffn=16, vocab=9, head_width=6)
    decoder = Decoder(model)
    initialize(decoder, 0)
    decoder.double()
    tokens = torch.tensor([1, 8, 8, 2, 3])
    rows = torch.randn(2, 12, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([4, IGNORED, 5, 6, IGNORED])
    inserted = Inserted(torch.tensor([1, 2]), rows)
    loss = decoder(tokens, (5,), labels_T=labels, inserted=inserted)
    loss.backward()
    assert rows.grad is not None
    assert (rows.grad.abs().sum(1) > 0).all()
    table_grad = decoder.embed.weight.grad
    assert table_grad is not None
    assert not table_grad[8].any()
    for place in (0, 3):
        assert table_grad[tokens[place]].any()
    other = torch.tensor([1, 0, 7, 2, 3])  # whichever token stands in
    assert torch.equal(decoder(other, (5,), labels_T=labels, inserted=inserted), loss)
    with torch.no_grad():
        nudged = rows.detach().clone()
        nudged[0, 3] += 1e-6
        moved = decoder(tokens, (5,), labels_T=labels, inserted=Inserted(inserted.places_N, nudged))
    slope = float(moved - loss.detach()) / 1e-6
    np.testing.assert_allclose(slope, float(rows.grad[0, 3]), rtol=1e-4)


def test_neighbours_of_one_size_are_one_call_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, calls = _encoder(), list[tuple[int, ...]]()
    attend = encoder_module.scaled_dot_product_attention

    def counted(*qkv: Tensor) -> Tensor:
        calls.append(tuple(qkv[0].shape))
        return attend(*qkv)

    monkeypatch.setattr(encoder_module, "scaled_dot_product_attention", counted)
    grids = [(2, 2), (2, 2), (2, 2), (4, 6), (6, 4), (2, 2)]
    patches = _patches(encoder, grids)
    packed = encoder(torch.cat(patches), grids)
    assert calls == [(3, 2, 4, 8), (2, 2, 24, 8), (1, 2, 4, 8)] * VISION.layers
    alone = [encoder(each, [grid]) for each, grid in zip(patches, grids, strict=True)]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=0, atol=1e-13)


PROJECTOR = ("encoders.image.embed", "encoders.image.layers", "encoders.image.norm")


@pytest.mark.parametrize(
    ("layers", "freeze"),
    [
        (1, ()),
        (3, ()),
        (3, ("encoders.image.embed",)),
        (3, ("encoders.image.embed", "encoders.image.layers.0-1")),
        (3, PROJECTOR[:2]),
        (2, PROJECTOR),
        (2, (*PROJECTOR, "encoders.image.join")),
        (2, ("encoders",)),
    ],
)
def test_weights_and_what_autograd_keeps_are_as_counted(
    layers: int, freeze: tuple[str, ...]
) -> None:
    spec = dataclasses.replace(VISION, layers=layers).encoder.with_frozen(freeze)
    encoder = cast(ItemEncoder, make_encoders([spec], 12, 0)["image"])
    shapes = {name: tuple(each.shape) for name, each in encoder.named_parameters()}
    assert list(spec.shapes(12).items()) == list(shapes.items())
    trained = sum(each.numel() for each in encoder.parameters() if each.requires_grad)
    assert trained == encoder_params(spec, 12, trained=True)
    assert spec.is_frozen == (trained == 0)
    weights = {each.untyped_storage().data_ptr() for each in encoder.parameters()}
    assert sum(each.numel() for each in encoder.parameters()) == encoder_params(spec, 12)
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor  # alive, so no address comes twice
        return tensor

    patches = torch.cat([each.float() for each in _patches(encoder, GRIDS)])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        rows = encoder(patches, GRIDS)
    assert rows.requires_grad == (trained > 0)
    held = sum(each.untyped_storage().nbytes() for each in kept.values())
    counted = kept_bytes(spec, np.array([rows * columns for rows, columns in GRIDS]))
    assert held == counted
