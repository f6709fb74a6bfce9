"""What train.freeze and lora leave to train, by name; the whole text of every refusal."""

import dataclasses
from pathlib import Path

import pytest
import torch

from equipoise.base.errors import SpecError
from equipoise.nn.decoder import Decoder, initialize
from equipoise.nn.hf.read import weight_shapes
from equipoise.spec.modality.sections import AudioSpec, VisionSpec
from equipoise.spec.modality.trained import every_name, frozen_names
from equipoise.spec.model.match import match_names
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.load import read_run
from equipoise.spec.run.lora import LoraSpec
from equipoise.spec.run.spec import ExpertsSpec, RunSpec, TrainSpec
from equipoise.train.trained import (
    choose_trained,
    count_trained,
    require_trained,
    saved_bytes,
    trained_names,
)

MODEL = ModelSpec(
    layers=12, hidden=16, heads=2, kv_heads=1, ffn=24, vocab=30, head_width=8, qkv_bias=True
)
NAMES = list(weight_shapes(MODEL))


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("embed", ["embed.weight"]),
        ("embed.weight", ["embed.weight"]),
        ("layers.1", [name for name in NAMES if name.startswith("layers.1.")]),
        (
            "layers.9-99.attention.key",
            [f"layers.{n}.attention.key.{k}" for n in (9, 10, 11) for k in ("weight", "bias")],
        ),
        ("*.bias", [name for name in NAMES if name.endswith(".bias")]),
        ("layers.*.feed_forward.up", [f"layers.{n}.feed_forward.up.weight" for n in range(12)]),
        ("layers.3-1", []),
        ("emb", []),
        ("weight", []),
    ],
)
def test_a_pattern_names_weights_and_what_is_below_a_name(pattern, expected) -> None:
    assert sorted(match_names(pattern, NAMES)) == sorted(expected)


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(SpecError) as caught:
        frozen_names(["embed", "layers.0.atention"], NAMES)
    assert str(caught.value) == (
        f'train.freeze: "layers.0.atention" matches none of the model\'s {len(NAMES)} weights. '
        f'Nearest: "layers.0.attention".'
    )


def test_a_run_that_trains_nothing_is_refused() -> None:
    with pytest.raises(SpecError) as caught:
        frozen_names(["*"], NAMES)
    assert str(caught.value) == (
        f'train.freeze = ["*"] leaves none of the model\'s {len(NAMES)} weights to train. Remove a '
        f"pattern."
    )


def test_experts_in_a_file_are_trained() -> None:
    model = dataclasses.replace(MODEL, layers=2, experts=4, top_k=2, expert_ffn=8)
    run = RunSpec(train=TrainSpec(freeze=("layers.1",)), experts=ExpertsSpec(memory_mib=64.0))
    with pytest.raises(SpecError) as caught:
        require_trained(run, model, Path())
    assert str(caught.value) == (
        "experts.memory_mib = 64 holds experts that are trained, and train.freeze leaves 3 of "
        "their weights as they are, the first layers.1.feed_forward.experts.down.weight. Remove "
        "one of the two."
    )
    require_trained(dataclasses.replace(run, experts=ExpertsSpec()), model, Path())


def decoder_of(spec: RunSpec) -> Decoder:
    decoder = Decoder(MODEL)
    initialize(decoder, 0)
    choose_trained(decoder, spec, MODEL)
    return decoder


def test_frozen_weights_need_no_gradient_and_are_not_counted() -> None:
    spec = RunSpec(train=TrainSpec(freeze=("embed", "layers.0-3")))
    held = dict(decoder_of(spec).named_parameters())
    trained = {name for name, weight in held.items() if weight.requires_grad}
    assert trained == trained_names(spec, MODEL)
    assert count_trained(spec, MODEL) == sum(held[name].numel() for name in trained)
    assert count_trained(RunSpec(), MODEL) == MODEL.params


def _with_encoders(*freeze: str) -> RunSpec:
    vision, audio = VisionSpec(layers=12, hidden=16, heads=2, patch=2), AudioSpec(layers=1)
    return RunSpec(vision=vision, audio=audio, train=TrainSpec(freeze=freeze))


def test_names_of_encoders_are_those_of_the_model() -> None:
    spec = _with_encoders("layers.0-10", "encoders.image.layers.1", "encoders.*.project")
    image, audio = (each.frozen for each in spec.encoders)
    assert len(image) == 12 + 2 and audio == ("project.weight", "project.bias")
    assert {name.rpartition("layers.")[2].partition(".")[0] for name in image[:12]} == {"1"}
    assert not any(each.is_frozen for each in spec.encoders)
    left = {name.split(".")[1] for name in trained_names(spec, MODEL) if name.startswith("layers")}
    assert left == {"11"}
    assert [each.is_frozen for each in _with_encoders("encoders.audio").encoders] == [False, True]
    # Layers of a decoder are no layers of encoders.
    assert not any(each.frozen for each in _with_encoders("layers", "embed", "norm").encoders)
    states = saved_bytes(spec, MODEL, MODEL.params) - saved_bytes(RunSpec(), MODEL, MODEL.params)
    whole = saved_bytes(_with_encoders(), MODEL, 0) - saved_bytes(RunSpec(), MODEL, 0)
    assert states < whole
    require_trained(spec, MODEL, Path())


@pytest.mark.parametrize(
    ("freeze", "sentence"),
    [
        (
            ("encoders.images",),
            'train.freeze: "encoders.images" matches none of the model\'s {count} weights. '
            'Nearest: "encoders.image".',
        ),
        (
            ("*", "encoders"),
            'train.freeze = ["*", "encoders"] leaves none of the model\'s {count} weights to '
            "train. Remove a pattern.",
        ),
    ],
)
def test_patterns_are_refused_by_all_names(freeze: tuple[str, ...], sentence: str) -> None:
    spec = _with_encoders(*freeze)
    with pytest.raises(SpecError) as caught:
        require_trained(spec, MODEL, Path())
    assert str(caught.value) == sentence.format(count=len(every_name(spec, MODEL)))
    # All of the decoder may be frozen, as long as something of an encoder is not.
    require_trained(_with_encoders("embed", "layers", "norm", "head", "*.up"), MODEL, Path())


def test_adapters_alone_are_trained_and_change_nothing_at_first() -> None:
    spec = RunSpec(lora=LoraSpec(rank=3, targets=("q_proj", "down")))
    assert spec.lora.layers == ("query", "down")
    decoder, plain = decoder_of(spec), decoder_of(RunSpec())
    trained = [weight for weight in decoder.parameters() if weight.requires_grad]
    assert len(trained) == 2 * 2 * MODEL.layers
    assert count_trained(spec, MODEL) == sum(weight.numel() for weight in trained)
    tokens = torch.arange(20)
    assert torch.equal(decoder(tokens, (20,)), plain(tokens, (20,)))
    again = dict(decoder_of(spec).named_parameters())
    assert all(torch.equal(again[name], weight) for name, weight in decoder.named_parameters())
    drawn = again["layers.0.attention.query.adapter.lora_A"]
    assert 0.8 < float(drawn.detach().abs().max()) * 16**0.5 <= 1.0


def faults(*flags: tuple[str, str]) -> list[str]:
    with pytest.raises(SpecError) as caught:
        read_run(None, flags)
    return str(caught.value).splitlines()


def test_keys_of_adapters_that_cannot_be() -> None:
    assert faults(("lora.rank", "8")) == [
        "--lora.rank: 8 trains adapters beside weights that stay as they are, but model.init = "
        '"random" (default). Set model.init to a Hugging Face folder, or remove lora.rank.'
    ]
    assert faults(("lora.targets", '["query", "q_pro"]')) == [
        '--lora.targets: "q_pro" is not one of "query", "key", "value", "output", "gate", "up", '
        '"down". Nearest: "q_proj".'
    ]
    assert faults(("lora.targets", "5")) == [
        "--lora.targets: needs a list of texts, got 5 (a whole number)."
    ]
    assert faults(("train.freeze", "[1]")) == ["--train.freeze: needs a list of texts, got a list."]


def test_one_text_is_a_list_of_one() -> None:
    assert read_run(None, [("train.freeze", "embed")]).spec.train.freeze == ("embed",)
    many = read_run(None, [("train.freeze", '["embed", "norm"]')])
    assert many.spec.train.freeze == ("embed", "norm")
