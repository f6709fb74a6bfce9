"""Experts that read what attention reads: against the definition, and where there is none."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from equipoise.base.errors import ModelError, SpecError
from equipoise.nn.cached import CachedDecoder
from equipoise.nn.decoder import Decoder, DecoderLayer, initialize
from equipoise.nn.moe.layer import MixtureOfExperts
from equipoise.nn.rope import rotary_frequencies, rotary_table
from equipoise.plan.export.model import megatron_model
from equipoise.spec.model.hf_config import hf_config
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.load import read_run
from equipoise.spec.words import read_model

MODEL = ModelSpec(
    layers=3,
    hidden=16,
    heads=2,
    kv_heads=1,
    ffn=24,
    vocab=61,
    head_width=8,
    experts=6,
    top_k=2,
    expert_ffn=8,
    shared_ffn=12,
    dense_layers=1,
    shortcut=True,
)


def decoder_of(model: ModelSpec) -> Decoder:
    decoder = Decoder(model)
    initialize(decoder, 0)
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            if "router" in name or "experts" in name:
                weight *= 8.0  # so that experts differ
    return decoder.double()


def test_a_layer_is_its_definition() -> None:
    layer = decoder_of(MODEL).layers[1]
    assert isinstance(layer, DecoderLayer)
    moe = layer.feed_forward
    assert isinstance(moe, MixtureOfExperts) and moe.shared is not None
    x_tD = torch.randn(9, MODEL.hidden, dtype=torch.float64)
    table = rotary_table(rotary_frequencies(MODEL), torch.arange(9), x_tD.dtype)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q + k + v

    read_tD = layer.attention_norm(x_tD)
    joined_tD = layer.attention.join(x_tD, attend(*layer.attention.heads(read_tD, table)))
    zeros = torch.zeros_like(x_tD)
    alone = dataclasses.replace(MODEL, shared_ffn=0)
    experts = MixtureOfExperts(alone).double()
    experts.load_state_dict(
        {name: value for name, value in moe.state_dict().items() if "shared" not in name}
    )
    shared_tD = moe.shared(zeros, layer.feed_forward_norm(joined_tD))
    expected_tD = joined_tD + shared_tD + experts(zeros, read_tD)
    torch.testing.assert_close(layer(x_tD, table, attend), expected_tD, rtol=1e-12, atol=1e-12)
    heads = layer.begin(x_tD, table)
    torch.testing.assert_close(
        layer.end(x_tD, attend(*heads), table), expected_tD, rtol=1e-12, atol=1e-12
    )


def test_a_text_that_is_continued_has_the_logits_of_the_whole() -> None:
    decoder = decoder_of(MODEL)
    tokens = torch.arange(20) % MODEL.vocab
    whole_TV = decoder(tokens, [20]).detach()
    cached = CachedDecoder(decoder, chunk_tokens=6)
    cached.extend(tokens[:11].tolist())
    torch.testing.assert_close(cached.extend(tokens[11:].tolist()), whole_TV[-1])


def test_no_other_program_is_given_it() -> None:
    with pytest.raises(ModelError) as caught:
        hf_config(MODEL)
    assert str(caught.value) == (
        "No Hugging Face model type of this package's has experts that read what attention reads. "
        "Train with model.shortcut = false to export."
    )
    with pytest.raises(SpecError) as refused:
        megatron_model(MODEL, 64)
    assert str(refused.value) == (
        "Megatron-LM has no experts that read what attention of their layer reads. Export a model "
        "without shortcut."
    )


def test_it_needs_a_shared_expert(tmp_path: Path) -> None:
    words = "layers=2,hidden=8,heads=2,vocab=9,experts=4,top_k=2,shortcut=1"
    with pytest.raises(SpecError) as refused:
        read_model(words)
    assert str(refused.value) == (
        "model: shortcut lets rows of experts travel beside a shared expert. Give experts and "
        "shared_ffn too."
    )
    assert read_model(f"{words},shared_ffn=8").shortcut
    file = tmp_path / "run.toml"
    file.write_text('[model]\npreset = "moe-3m"\nshortcut = true\n')
    with pytest.raises(SpecError) as caught:
        read_run(file)
    assert str(caught.value).endswith(
        "run.toml:3  model.shortcut: true lets rows of experts travel beside the shared expert, "
        "and there is none: model.shared_ffn = 0 (preset moe-3m). Set model.shared_ffn, for "
        "example to model.ffn = 176, or remove model.shortcut."
    )
