"""Tiny configurations for the tests of ``model.engine = "transformers"``."""

from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from support.hf_models import tiny_config

_NAMES = """
    llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi3 granite olmo2 starcoder2 gpt2 cohere
    cohere2 glm smollm3 mixtral qwen3_moe gpt_oss deepseek_v3
"""
FAMILIES = _NAMES.split()

_CHANGED: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": 0.3, "final_logit_softcapping": 0.3},
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.7},
}


def engine_config(kind: str, **changed: Any) -> Any:
    """A tiny model of a family, whose scales and caps matter."""
    data = tiny_config(kind).to_dict() | _CHANGED.get(kind, {}) | changed
    return CONFIG_MAPPING[kind].from_dict(data)


def build_engine(kind: str, **changed: Any) -> Any:
    """It with random weights, norms and biases too, and eager attention."""
    torch.manual_seed(1)
    config = engine_config(kind, **changed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.02 * torch.randn_like(weight)
    return model.float()
