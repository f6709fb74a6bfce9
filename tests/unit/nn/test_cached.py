"""A sequence continued token by token has the logits of the whole."""

import dataclasses

import pytest
import torch
from torch import Tensor

from equipoise.base.errors import ModelError
from equipoise.nn.cached import CachedDecoder, continue_with
from equipoise.nn.decoder import Decoder, initialize
from equipoise.spec.model.presets import ModelSpec, RopeScaling

BOUND = 1e-12  # in float64; rounding of float32 is 1e-7 a layer
PLAIN = ModelSpec(layers=3, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=67, head_width=8)
MODELS = {
    "plain": PLAIN,
    "bias": dataclasses.replace(PLAIN, qkv_bias=True, kv_heads=4),
    "norms": dataclasses.replace(PLAIN, qk_norm=True, kv_heads=1, tied=True),
    "scaled": dataclasses.replace(PLAIN, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 16)),
    "experts": dataclasses.replace(PLAIN, experts=4, top_k=2, expert_ffn=24, shared_ffn=16),
}
TOKENS = [(7 * at * at + 3) % 67 for at in range(60)]


def built(model: ModelSpec) -> Decoder:
    decoder = Decoder(model)
    initialize(decoder, 3)
    with torch.no_grad():
        for weight in decoder.parameters():
            weight.mul_(3.0)
    return decoder.double().requires_grad_(False)


def whole(decoder: Decoder, tokens: list[int]) -> Tensor:
    return decoder(torch.tensor(tokens), [len(tokens)])


def assert_near(ours: Tensor, expected: Tensor) -> None:
    assert float((ours - expected).abs().max()) <= BOUND * float(expected.abs().max())


@pytest.mark.parametrize("cuts", [[60], [1] * 60, [13, 1, 1, 20, 2, 23], [59, 1]])
@pytest.mark.parametrize("name", MODELS)
def test_however_a_sequence_is_cut_its_logits_are_those_of_the_whole(
    name: str, cuts: list[int]
) -> None:
    decoder = built(MODELS[name])
    expected = whole(decoder, TOKENS)
    cached, begin = CachedDecoder(decoder, chunk_tokens=9), 0
    for tokens in cuts:
        logits = cached.extend(TOKENS[begin : begin + tokens])
        begin += tokens
        assert_near(logits, expected[begin - 1])
    assert cached.tokens == TOKENS


def test_bf16_weights_compute_in_bf16() -> None:
    decoder = built(PLAIN).to(torch.bfloat16)
    expected = whole(decoder, TOKENS)
    cached = CachedDecoder(decoder)
    logits = [cached.extend([token]) for token in TOKENS]
    assert {each.dtype for each in logits} == {torch.bfloat16}
    error = (torch.stack(logits).float() - expected.float()).abs().max()
    assert float(error) <= 0.03 * float(expected.float().abs().max())


def test_a_sequence_cut_back_continues_as_if_it_had_never_been_longer() -> None:
    decoder = built(MODELS["norms"])
    cached = CachedDecoder(decoder)
    cached.extend(TOKENS)
    cached.cut(20)
    other = [*TOKENS[:20], 5, 6, 7]
    assert_near(cached.extend(other[20:]), whole(decoder, other)[-1])


def test_what_two_sequences_begin_with_alike_is_kept() -> None:
    decoder = built(PLAIN)
    cached = CachedDecoder(decoder)
    for tokens in (TOKENS[:30], [*TOKENS[:12], 1, 2], TOKENS[:12], TOKENS, [9]):
        assert_near(continue_with(cached, tokens), whole(decoder, tokens)[-1])
        assert cached.tokens == tokens


def test_a_capacity_is_refused() -> None:
    model = dataclasses.replace(MODELS["experts"], capacity_factor=1.25)
    with pytest.raises(ModelError) as caught:
        CachedDecoder(Decoder(model))
    assert str(caught.value) == (
        "Experts with a capacity factor of 1.25 drop tokens by micro-batch, so a continued text "
        "has no one answer. Set capacity_factor to 0."
    )
