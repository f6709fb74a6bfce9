"""Sizes read from a config.json against the modules that transformers builds from it."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from equipoise.base.errors import ModelError
from equipoise.spec.model.other_config import model_from_other_config

MODELS: list[tuple[str, dict[str, Any]]] = [
    ("falcon", {}),
    (
        "falcon",
        {
            "new_decoder_architecture": True,
            "num_kv_heads": 8,
            "hidden_size": 8192,
            "num_attention_heads": 128,
        },
    ),
    ("falcon", {"multi_query": False}),
    ("gpt_bigcode", {}),
    ("gpt_bigcode", {"multi_query": False}),
    ("mpt", {"expansion_ratio": 3}),
    ("ctrl", {}),
    ("nanochat", {}),
    ("apertus", {}),
    ("roberta", {"is_decoder": True}),
    ("afmoe", {"num_hidden_layers": 6}),
    ("doge", {}),
    ("ernie4_5_moe", {}),
    ("ernie4_5_moe", {"moe_layer_start_index": 3, "moe_layer_interval": 2}),
    ("qwen2_moe", {}),
    ("qwen3_moe", {"decoder_sparse_step": 2}),
    ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}),
    ("qwen3_moe", {"mlp_only_layers": [0, 1], "decoder_sparse_step": 2}),
    ("hy_v3", {"num_hidden_layers": 4}),
    ("olmoe", {}),
]


@pytest.mark.parametrize(("kind", "given"), MODELS, ids=lambda part: str(part)[:60])
def test_weights_are_those_of_the_built_model(kind: str, given: dict[str, Any]) -> None:
    config = CONFIG_MAPPING[kind](**given)
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    model = model_from_other_config(config.to_dict())
    # Learned positions and biases are left out; weights of a table alone are a percent here.
    assert model.params == pytest.approx(
        sum(weight.numel() for weight in built.parameters()), rel=0.011
    )
    routers = [name for name, _ in built.named_modules() if name.endswith((".gate", ".router"))]
    if model.experts:
        sparse = {name.split(".")[2] for name in routers}
        assert {str(at) for at in range(model.layers) if model.is_sparse(at)} == sparse
    keys = [
        part.weight.shape[0]
        for name, part in built.named_modules()
        if name.endswith("k_proj") and isinstance(part, nn.Linear)
    ]
    assert set(keys) <= {model.kv_heads * model.head_width}


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (
            "qwen3_moe",
            {"mlp_only_layers": [1, 3]},
            "config.json: mlp_only_layers [1, 3] is not supported; only the first layers can be "
            "without experts.",
        ),
        (
            "ernie4_5_moe",
            {"moe_layer_end_index": 20},
            "config.json: moe_layer_end_index 20 is not supported; only 27 is, the last layer.",
        ),
    ],
)
def test_experts_in_other_layers_are_refused(
    kind: str, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError) as caught:
        model_from_other_config(CONFIG_MAPPING[kind](**given).to_dict())
    assert str(caught.value) == message
