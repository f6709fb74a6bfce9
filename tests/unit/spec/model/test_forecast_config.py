"""Published configurations that are priced: as many weights as their authors say."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from equipoise.base.errors import ModelError, SpecError
from equipoise.base.shown import shown
from equipoise.cost.step.work import _attention_products
from equipoise.plan.export.settings import EXPORTS, program_of
from equipoise.spec.model.hf_config import MODEL_TYPES
from equipoise.spec.model.other_config import FORECAST, forecast_config
from equipoise.spec.model.presets import PLANNED, LatentSpec, ModelSpec, WindowSpec
from equipoise.spec.words import forecast_note, read_model, unread_of
from support.verbs import run

SCOUT: dict[str, Any] = {
    "model_type": "llama4_text",
    "hidden_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16_384,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "vocab_size": 202_048,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, tuple[dict[str, Any], float, float]] = {
    # Published config.json, weights and active weights in billions.
    "deepseek_v3": (
        {
            "model_type": "deepseek_v3",
            "hidden_size": 7168,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "intermediate_size": 18_432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "vocab_size": 129_280,
            "tie_word_embeddings": False,
        },
        671,
        37,
    ),
    "kimi_k2": (
        {
            "model_type": "kimi_k2",
            "hidden_size": 7168,
            "num_hidden_layers": 61,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "intermediate_size": 18_432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 384,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "vocab_size": 163_840,
            "tie_word_embeddings": False,
        },
        1026,
        32,
    ),
    "gpt_oss": (
        {
            "model_type": "gpt_oss",
            "hidden_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "intermediate_size": 2880,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "vocab_size": 201_088,
            "tie_word_embeddings": False,
        },
        116.8,
        5.7,
    ),
    "glm4_moe": (
        {
            "model_type": "glm4_moe",
            "hidden_size": 5120,
            "num_hidden_layers": 92,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 12_288,
            "moe_intermediate_size": 1536,
            "n_routed_experts": 160,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "vocab_size": 151_552,
            "tie_word_embeddings": False,
        },
        353,
        32,
    ),
    "llama4_text": (SCOUT, 107.8, 17),
    "llama4": ({"model_type": "llama4", "text_config": SCOUT, "vision_config": {}}, 107.8, 17),
    "qwen3_moe": (
        {
            "model_type": "qwen3_moe",
            "hidden_size": 4096,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 12_288,
            "moe_intermediate_size": 1536,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "vocab_size": 151_936,
            "tie_word_embeddings": False,
        },
        235,
        22,
    ),
}


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_weights_are_the_published_ones(kind: str, tmp_path: Path) -> None:
    config, whole, active = CONFIGS[kind]
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = read_model(str(tmp_path))
    assert model.params / 1e9 == pytest.approx(whole, rel=0.01)
    assert model.active_params / 1e9 == pytest.approx(active, rel=0.1)
    note = forecast_note(str(tmp_path))
    if kind == "qwen3_moe":
        assert note == ""
    else:
        said = f"{kind} is forecast, and cannot be trained here: {FORECAST[kind]}."
        assert note == said


@pytest.mark.parametrize("kind", sorted(FORECAST))
def test_a_config_that_does_not_say_so_has_a_head_of_its_own(kind: str) -> None:
    config = CONFIGS[kind][0]
    text = config.get("text_config", config)
    silent = {name: value for name, value in text.items() if name != "tie_word_embeddings"}
    shorter = {**config, "text_config": silent} if text is not config else silent
    assert forecast_config(shorter) == forecast_config(config)
    assert not forecast_config(shorter).tied


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, ("quantization_config",)),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 8},
            ('rope_scaling of type "yarn"',),
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 5.0, "factor": 2.0}},
            ('rope_parameters of type "dynamic"',),
        ),
    ],
)
def test_what_no_price_depends_on_is_left_out_and_said(
    tmp_path: Path, changed: dict[str, Any], words: tuple[str, ...]
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIGS["qwen3_moe"][0] | changed))
    plain = forecast_model(tmp_path / "plain", CONFIGS["qwen3_moe"][0])
    rope = changed.get("rope_parameters", {})
    theta = rope.get("rope_theta", plain.rope_theta)
    assert read_model(str(file)) == dataclasses.replace(plain, rope_theta=theta)
    assert unread_of(str(file)) == words
    said = f"config.json is forecast, and cannot be trained here with {words[0]}."
    assert forecast_note(str(file)) == said
    with pytest.raises(SpecError) as refused:
        program_of("megatron", str(file))
    assert str(refused.value) == (
        f"{words[0]} is not read, and without it Megatron-LM would train another model. Plan "
        f"without export, and take the model's own flags from its authors."
    )
    assert program_of("torchtitan", str(file)) is EXPORTS["torchtitan"][0]
    assert unread_of("deepseek-v3") == ()
    file.write_text(json.dumps(CONFIGS["qwen3_moe"][0] | {"rope_scaling": {"rope_type": 3}}))
    with pytest.raises(ModelError, match="rope_scaling of type 3 is not supported"):
        read_model(str(file))


def forecast_model(folder: Path, config: dict[str, Any]) -> ModelSpec:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return read_model(str(folder))


def test_biases_and_norms_are_counted() -> None:
    config = CONFIGS["glm4_moe"][0] | {"attention_bias": True, "use_qk_norm": True}
    plain, full = forecast_config(CONFIGS["glm4_moe"][0]), forecast_config(config)
    assert full.params - plain.params == 92 * 128 * (96 + 2 * 8 + 2)
    published = forecast_config(CONFIGS["gpt_oss"][0])
    assert published.qkv_bias and published.has_sinks
    # What transformers 5.23 builds, and what the weights' index sums to.
    assert published.params == PLANNED["gpt-oss-120b"].params == 116_829_156_672


def test_layers_with_windows_are_counted() -> None:
    config = CONFIGS["gpt_oss"][0]
    assert forecast_config(config).window == PLANNED["gpt-oss-120b"].window == WindowSpec(128, 0.5)
    types = ["sliding_attention"] * 35 + ["full_attention"]
    spec = forecast_config(config | {"layer_types": types, "sliding_window": 64}).window
    assert spec is not None and (spec.tokens, round(36 * spec.share)) == (64, 35)
    assert forecast_config(config | {"sliding_window": None}).window is None
    assert forecast_config(config | {"layer_types": ["full_attention"] * 36}).window is None
    assert forecast_config(SCOUT).window == WindowSpec(8192, 0.75, is_chunk=True)
    short = SCOUT | {"attention_chunk_size": 4096, "no_rope_layers": [1, 0] * 24}
    assert forecast_config(short).window == WindowSpec(4096, 0.5, is_chunk=True)
    assert forecast_config(CONFIGS["glm4_moe"][0]).window is None
    with pytest.raises(ModelError) as refused:
        forecast_config(config | {"layer_types": types[1:]})
    assert str(refused.value) == (
        "config.json: layer_types describes 35 layers of 36. Give each layer its own."
    )


def test_windows_beyond_what_a_model_was_made_for_are_remarked_on(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for config in (
        CONFIGS["qwen3_moe"][0] | {"max_position_embeddings": 40_960},
        {"model_type": "llama4", "text_config": SCOUT | {"max_position_embeddings": 40_960}},
    ):
        file.write_text(json.dumps(config))
        assert "max_position" not in forecast_note(str(file), 40_960)
        assert forecast_note(str(file), 65_536).endswith(
            "config.json: max_position_embeddings is 40,960, and a window has 65,536 tokens. The "
            "price holds, but the model was not made for them."
        )


@pytest.mark.parametrize(
    ("kind", "name"), [("gpt_oss", "head_dim"), ("glm4_moe", "n_shared_experts")]
)
def test_sizes_with_other_defaults_are_not_guessed(kind: str, name: str) -> None:
    config = {key: value for key, value in CONFIGS[kind][0].items() if key != name}
    with pytest.raises(ModelError) as refused:
        forecast_config(config)
    assert str(refused.value) == (
        f"config.json has no {name}, and packs cannot be priced without it. Save the "
        f"configuration again with transformers, which writes every size."
    )


def test_layers_with_experts_are_those_of_the_step() -> None:
    four = SCOUT | {"num_hidden_layers": 4, "interleave_moe_layer_step": 2}
    assert forecast_config(four | {"moe_layers": [1, 3]}) == forecast_config(four)
    with pytest.raises(ModelError) as refused:
        forecast_config(four | {"moe_layers": [0, 1]})
    assert str(refused.value) == (
        "config.json: moe_layers [0, 1] are not those of interleave_moe_layer_step 2, [1, 3], "
        "which alone are priced."
    )


def test_queries_that_come_from_the_input_have_one_product() -> None:
    # As many weights as transformers 5.23 builds on the meta device.
    small = {
        **CONFIGS["deepseek_v3"][0],
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "intermediate_size": 512,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "vocab_size": 1000,
        "q_lora_rank": None,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    }
    model = forecast_config(small)
    assert model.latent == LatentSpec(query=0, key_value=64, rope=16)
    assert model.params == 2_863_616
    names = [each.inner for each in _attention_products(model, 8.0, 1, 4.0)]
    assert names == [256, 256, 64, 128]
    with pytest.raises(ModelError) as refused:
        forecast_config(small | {"v_head_dim": 64})
    assert str(refused.value) == (
        "config.json: v_head_dim 64 differs from qk_nope_head_dim 32, and heads are priced with "
        "one width. Give both the same."
    )


def test_a_model_that_is_trained_here_needs_no_note() -> None:
    assert forecast_note("llama3-8b") == forecast_note("layers=2,hidden=64,heads=4,vocab=9") == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[1, 2]",
            "model: {file} does not hold a table of sizes. Give the config.json that the model was "
            "published with.",
        ),
        (
            '{"model_type":',
            "model: {file} cannot be read as a config.json (it is not JSON at line 1, column 15: "
            "expecting value). Give the file that the model was published with.",
        ),
        (
            '{"model_type": ["deepseek_v3"]}',
            'config.json: model_type ["deepseek_v3"] is not one of KINDS.',
        ),
    ],
)
@pytest.mark.parametrize("verb", ["simulate", "plan"])
def test_what_is_no_config_is_refused_by_every_verb(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str, text: str, message: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    layout = ["--layout", "dp=8"] if verb == "simulate" else []
    step = ["--cluster", "h100-sxm:8", "--context-tokens", "4096", "--step-sequences", "64"]
    said = message.replace("{file}", str(file)).replace(
        "KINDS", ", ".join((*MODEL_TYPES, *FORECAST))
    )
    assert run(capsys, verb, "--model", file, *step, *layout) == (2, "", f"{said}\n")


def test_a_missing_size_is_refused(tmp_path: Path) -> None:
    config = {name: value for name, value in CONFIGS["gpt_oss"][0].items() if name != "vocab_size"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as refused:
        read_model(str(tmp_path))
    assert str(refused.value) == (
        "config.json has no vocab_size, and packs cannot be priced without it. Save the "
        "configuration again with transformers, which writes every size."
    )


@pytest.mark.parametrize("every", [2, [1] * 61])
def test_experts_in_some_layers_alone_are_not_guessed(every: object) -> None:
    with pytest.raises(ModelError) as refused:
        forecast_config(CONFIGS["deepseek_v3"][0] | {"moe_layer_freq": every})
    assert str(refused.value) == (
        f"config.json: moe_layer_freq {shown(every)} is not supported; only 1 is, every layer "
        f"after the first 3 with experts."
    )
    alike = CONFIGS["deepseek_v3"][0] | {"moe_layer_freq": 1}
    assert forecast_config(alike) == forecast_config(CONFIGS["deepseek_v3"][0])


@pytest.mark.parametrize(("groups", "kept"), [(7, 4), (8, 9), (128, 3)])
def test_groups_that_experts_do_not_fill_are_refused(
    tmp_path: Path, groups: int, kept: int
) -> None:
    config = CONFIGS["deepseek_v3"][0] | {"n_group": groups, "topk_group": kept}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as refused:
        read_model(str(tmp_path))
    assert str(refused.value) == (
        f"config.json: 256 experts in n_group = {groups} groups with topk_group = {kept} chosen. "
        f"Groups must hold equally many experts, no more than {groups} can be chosen, and those "
        f"must hold the 8 experts of a token."
    )


def test_groups_of_experts_are_read(tmp_path: Path) -> None:
    config = CONFIGS["deepseek_v3"][0] | {"n_group": 8, "topk_group": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = read_model(str(tmp_path))
    assert (model.expert_groups, model.kept_groups) == (8, 4)
    assert model.most_nodes(8) == PLANNED["deepseek-v3"].most_nodes(8) == 4


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"num_experts_per_tok": 512},
            "config.json: each token goes to 512 of 256 experts. Give 256 or fewer.",
        ),
        (
            {"tie_word_embeddings": "yes"},
            'config.json: tie_word_embeddings "yes" is not true or false.',
        ),
        *(
            (
                {name: None},
                f"config.json has no {name}, and packs cannot be priced without it. Save the "
                f"configuration again with transformers, which writes every size.",
            )
            for name in ("n_routed_experts", "moe_intermediate_size", "kv_lora_rank")
        ),
    ],
)
def test_sizes_of_experts_are_not_guessed(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    config = CONFIGS["deepseek_v3"][0] | changed
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as refused:
        read_model(str(tmp_path))
    assert str(refused.value) == message


@pytest.mark.parametrize("dense", [61, 100])
def test_a_model_whose_layers_are_all_dense_has_no_experts(tmp_path: Path, dense: int) -> None:
    config = CONFIGS["deepseek_v3"][0] | {"first_k_dense_replace": dense}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model(str(tmp_path)).experts == 0
