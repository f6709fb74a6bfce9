"""Names of a decoder's weights without torch are those of the decoder that trains."""

import dataclasses

import pytest

from equipoise.nn.hf.read import weight_shapes
from equipoise.spec.model.presets import ModelSpec, preset
from equipoise.spec.model.weights import decoder_shapes, trained_shares

DENSE = ModelSpec(layers=3, hidden=32, heads=4, kv_heads=1, ffn=48, vocab=320, head_width=8)
SPARSE = dataclasses.replace(DENSE, experts=4, top_k=2, expert_ffn=24, shared_ffn=16)


@pytest.mark.parametrize(
    "model",
    [
        DENSE,
        dataclasses.replace(DENSE, tied=True, qkv_bias=True),
        dataclasses.replace(DENSE, qk_norm=True),
        SPARSE,
        dataclasses.replace(SPARSE, shared_gate=True, dense_layers=1, identity_experts=2),
        dataclasses.replace(SPARSE, shared_ffn=0, expert_every=2),
        preset("7m"),
    ],
)
def test_names_and_shapes_are_the_decoders(model: ModelSpec) -> None:
    assert decoder_shapes(model) == weight_shapes(model)


def test_shares_are_of_what_patterns_leave() -> None:
    assert trained_shares(DENSE, ("encoders.image",), reads_back=True) is None
    some = trained_shares(DENSE, ("embed", "layers.0", "*.attention"), reads_back=False)
    assert some is not None
    layer = DENSE.layer_params
    rest = 1 - DENSE.attention_params / layer
    assert some.layers == pytest.approx((0.0, rest, rest))
    assert (some.first, some.last, some.first_back, some.least) == (0.0, 1.0, 1, 0.0)
    behind = trained_shares(DENSE, ("embed", "layers.0"), reads_back=True)
    assert behind is not None and behind.first_back == 0
    nothing = trained_shares(DENSE, ("embed", "layers", "norm", "head"), reads_back=True)
    assert nothing is not None
    assert nothing.of_rank(DENSE, range(3), embeds=True, has_head=True) == 0.0
    tied = trained_shares(dataclasses.replace(DENSE, tied=True), ("embed",), reads_back=False)
    assert tied is not None and tied.last == 0.0


def test_a_stages_share_is_of_what_it_holds() -> None:
    shares = trained_shares(DENSE, ("embed", "layers.0"), reads_back=False)
    assert shares is not None
    assert shares.of_rank(DENSE, [0], embeds=True, has_head=False) == 0.0
    assert shares.of_rank(DENSE, [1, 2], embeds=False, has_head=True) == 1.0
    table = DENSE.hidden * DENSE.vocab
    whole = shares.of_rank(DENSE, range(3), embeds=True, has_head=True)
    assert whole == pytest.approx(1 - (DENSE.layer_params + table) / DENSE.params)
    assert shares.of_rank(DENSE, [], embeds=False, has_head=False) == 0.0
