"""Configs of models with sliding windows."""

import pytest

from equipoise.base.errors import ModelError
from equipoise.spec.model.hf_config import model_from_hf_config
from equipoise.spec.model.windows import without_windows

MISTRAL = {"model_type": "mistral", "hidden_size": 64, "max_position_embeddings": 32_768}


def test_everything_else_stays_as_it_was() -> None:
    given = {**MISTRAL, "sliding_window": 16, "rope_theta": 5e5}
    found = without_windows(given)
    assert found is not None
    config, window = found
    assert window == 16
    changed = {key for key in config if config[key] != given.get(key, "absent")}
    assert changed == {"sliding_window", "use_sliding_window", "layer_types"}
    assert model_from_hf_config(config) == model_from_hf_config({**given, "sliding_window": None})


@pytest.mark.parametrize(
    ("config", "window"),
    [
        (MISTRAL, 4096),  # transformers' default
        ({**MISTRAL, "sliding_window": None}, None),
        ({"model_type": "qwen2", "sliding_window": 32}, None),  # turned off by default
        ({"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": True}, 32),
        ({**MISTRAL, "layer_types": ["full_attention", "sliding_attention"]}, 4096),
        ({**MISTRAL, "layer_types": ["chunked_attention"]}, None),
        ({**MISTRAL, "sliding_window": "wide"}, None),
        ({"model_type": "gemma2", "sliding_window": 32}, None),
        ({}, None),
    ],
)
def test_windows_are_those_that_layers_have(config: dict[str, object], window: int | None) -> None:
    found = without_windows(config)
    assert (found and found[1]) == window


def test_an_unknown_key_is_refused() -> None:
    with pytest.raises(ModelError) as caught:
        without_windows({**MISTRAL, "attention_bias": True})
    assert str(caught.value) == "config.json: attention_bias true is not supported; only false is."
