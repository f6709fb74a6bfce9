"""config.json and ModelSpec: the round trip, transformers as oracle, and each refusal."""

import dataclasses
import math
from typing import Any

import pytest

from equipoise.base.errors import ModelError
from equipoise.spec.model.hf_config import hf_config, model_from_hf_config
from equipoise.spec.model.presets import PRESETS, preset

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}


SPARSE = ["mixtral-8x7b", "qwen2-57b-a14b"]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_the_round_trip(name: str) -> None:
    assert model_from_hf_config(hf_config(preset(name))) == preset(name)


@pytest.mark.parametrize("name", ["7m", "llama3.2-1b", "qwen2.5-0.5b", "qwen3-8b", *SPARSE])
def test_transformers_loads_what_is_written(name: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = dataclasses.replace(preset(name), layers=2, vocab=1024)
    config = hf_config(model)
    loaded = transformers.AutoConfig.for_model(**config)
    assert model_from_hf_config(loaded.to_dict()) == model
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(loaded)
    assert type(built).__name__ == config["architectures"][0]
    assert sum(weight.numel() for weight in built.parameters()) == model.params


def test_experts_that_no_model_type_has_are_not_written() -> None:
    message = (
        "No Hugging Face model type has these experts. mixtral has them in every layer, as wide as "
        "model.ffn (here 14336 and 14336), with "
        "weights that sum to one, and no shared expert, bias or norm of queries; qwen2_moe has a "
        "shared expert with a gate; qwen3_moe has norms of queries and keys and no shared expert; "
        "and none adds a bias to a router's scores. Train with one of them to export."
    )
    sparse = preset("mixtral-8x7b")
    for changes in (
        {"balance": "bias"},
        {"dense_layers": 1},
        {"norm_top_k": False},
        {"shared_ffn": 64},
        {"qkv_bias": True},
        {"qk_norm": True, "balance": "bias"},
    ):
        with pytest.raises(ModelError) as caught:
            hf_config(dataclasses.replace(sparse, **changes))
        assert str(caught.value) == message


def test_layers_without_experts_that_are_not_the_first_are_refused() -> None:
    config = hf_config(preset("qwen2-57b-a14b"))
    assert model_from_hf_config({**config, "mlp_only_layers": [1, 0]}).dense_layers == 2
    with pytest.raises(ModelError) as caught:
        model_from_hf_config({**config, "mlp_only_layers": [3]})
    assert str(caught.value) == "config.json: mlp_only_layers [3] is not supported; only [0] is."
    for wrong, shown in ((5, "5"), (["a"], '["a"]')):
        with pytest.raises(ModelError) as caught:
            model_from_hf_config({**config, "mlp_only_layers": wrong})
        assert str(caught.value) == f"config.json: mlp_only_layers {shown} is not a list of layers."


def test_more_experts_a_token_than_there_are() -> None:
    for name, key, experts in (
        ("mixtral-8x7b", "num_local_experts", 8),
        ("qwen2-57b-a14b", "num_experts", 64),
    ):
        with pytest.raises(ModelError) as caught:
            model_from_hf_config({**hf_config(preset(name)), "num_experts_per_tok": 65})
        assert str(caught.value) == (
            f"config.json: num_experts_per_tok 65 is more than {key} {experts}."
        )


def test_absent_fields_take_the_defaults_of_transformers() -> None:
    model = model_from_hf_config(
        {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    )
    assert (model.kv_heads, model.head_width, model.norm_eps) == (4, 32, 1e-6)
    assert (model.rope_theta, model.rope_scaling, model.tied) == (10_000.0, None, False)
    assert model_from_hf_config({**LLAMA, "model_type": "qwen3"}).head_width == 128
    mixtral = model_from_hf_config({**LLAMA, "model_type": "mixtral"})
    assert (mixtral.norm_eps, mixtral.rope_theta, mixtral.experts) == (1e-5, 1e6, 8)
    mistral = {**LLAMA, "model_type": "mistral", "sliding_window": None}
    assert model_from_hf_config(mistral) == model_from_hf_config(LLAMA)


def test_both_spellings_of_rope_are_one() -> None:
    llama3 = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    old = {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **llama3}}
    new = {**LLAMA, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **llama3}}
    assert model_from_hf_config(old) == model_from_hf_config(new)
    assert model_from_hf_config(old).rope_theta == 5e5


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"model_type": "qwen4"},
            'config.json: model_type "qwen4" is not one of llama, mistral, mixtral, '
            "qwen2, qwen2_moe, qwen3, qwen3_moe, phi3, ernie4_5. Nearest: qwen2.",
        ),
        (
            {"model_type": None},
            "config.json: model_type null is not one of llama, mistral, mixtral, qwen2, "
            "qwen2_moe, qwen3, qwen3_moe, phi3, ernie4_5.",
        ),
        (
            {"hidden_act": "gelu"},
            'config.json: hidden_act "gelu" is not supported; only "silu" is.',
        ),
        (
            {"attention_bias": True},
            "config.json: attention_bias true is not supported; only false is.",
        ),
        (
            {"quantization_config": {"bits": 4}},
            "config.json: quantization_config (a table) is not supported; only null is.",
        ),
        (
            {"model_type": "mistral"},
            "config.json: sliding_window 4096 is not supported; only null is.",
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": True},
            "config.json: use_sliding_window true is not supported; only false is.",
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            'config.json: layer_types "sliding_attention" is not supported; '
            'only "full_attention" is.',
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            'config.json: rope_scaling of type "yarn" is not supported; '
            'only "default" or "llama3" is.',
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 4.0}},
            "config.json: rope_parameters of type llama3 has no low_freq_factor, "
            "high_freq_factor, original_max_position_embeddings.",
        ),
        (
            {"partial_rotary_factor": 0.5},
            "config.json: partial_rotary_factor 0.5 is not supported; only 1.0 is.",
        ),
        (
            {"kv_lora_rank": 512},
            "config.json: llama has no key kv_lora_rank (here 512). Nearest: rms_norm_eps. Delete "
            "it if the model computes the same without it.",
        ),
        (
            {"num_hidden_layers": 10**9},
            "config.json: num_hidden_layers 1000000000 is more than 4,096.",
        ),
        (
            {"tie_word_embeddings": "no"},
            'config.json: tie_word_embeddings "no" is not true or false.',
        ),
        (
            {"rms_norm_eps": 10**400},
            "config.json: rms_norm_eps 100000000000000000000000...000000000000000000000000 "
            "(401 characters) is not a number above 0.",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "factor": 8.0}},
            "config.json: rope_parameters of type default has no key factor (here 8.0). Keys: "
            "rope_type, type, rope_theta, partial_rotary_factor.",
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 1.0,
                    "original_max_position_embeddings": 8192,
                }
            },
            "config.json: rope_scaling of type llama3 has low_freq_factor 4, which is not below "
            "its high_freq_factor 1.",
        ),
        ({"head_dim": 33}, "config.json: head_dim 33 is odd, and rotary positions turn pairs."),
        ({"rope_scaling": [1]}, "config.json: rope_scaling [1] is not a table."),
        ({"rope_theta": math.nan}, "config.json: rope_theta NaN is not a number above 0."),
        ({"rms_norm_eps": "1e-5"}, 'config.json: rms_norm_eps "1e-5" is not a number above 0.'),
        (
            {"num_attention_heads": 4, "num_key_value_heads": 3},
            "config.json: num_attention_heads 4 cannot share num_key_value_heads 3: it must be a "
            "multiple of it.",
        ),
        (
            {"layer_types": 3},
            'config.json: layer_types 3 is not supported; only "full_attention" is.',
        ),
        ({"vocab_size": None}, "config.json: vocab_size null is not a whole number above 0."),
        (
            {"num_hidden_layers": 2.5},
            "config.json: num_hidden_layers 2.5 is not a whole number above 0.",
        ),
        (
            {"hidden_size": 130},
            "config.json: hidden_size 130 does not divide over num_attention_heads 4, "
            "and there is no head_dim.",
        ),
    ],
)
def test_what_the_decoder_cannot_compute_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        model_from_hf_config({**LLAMA, **changed})
    assert str(caught.value) == message


def test_a_model_that_no_type_describes_is_refused() -> None:
    with pytest.raises(ModelError) as caught:
        hf_config(dataclasses.replace(preset("7m"), qkv_bias=True, qk_norm=True))
    assert str(caught.value) == (
        "No Hugging Face model type has both query/key/value biases (qwen2) and "
        "query/key norms (qwen3). Train with one of them to export."
    )


def test_a_shared_expert_without_biases_survives_the_round_trip() -> None:
    model = dataclasses.replace(preset("qwen2-57b-a14b"), qkv_bias=False)
    config = hf_config(model)
    assert (config["model_type"], config["qkv_bias"]) == ("qwen2_moe", False)
    assert model_from_hf_config(config) == model


def test_a_window_of_mixtral_is_refused() -> None:
    with pytest.raises(ModelError) as caught:
        model_from_hf_config({**LLAMA, "model_type": "mixtral", "sliding_window": 16})
    assert str(caught.value) == ("config.json: sliding_window 16 is not supported; only null is.")


def test_a_config_that_is_no_table() -> None:
    for config in ([1, 2], "llama", None):
        with pytest.raises(ModelError) as caught:
            model_from_hf_config(config)
        shown = {"llama": '"llama"', "None": "null"}.get(str(config), str(config))
        assert str(caught.value) == f"config.json holds {shown}, not a table of sizes."
