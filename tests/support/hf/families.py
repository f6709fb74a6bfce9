"""Tiny, whole Hugging Face folders, made offline: of families that the decoder computes or not."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from equipoise.data.text.tokenizer import END, train_tokenizer
from support.hf.models import engine_config

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": [0, 1],
    "pad_token_id": None,
    "initializer_range": 0.03,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_moe": (
        "qwen2_moe",
        {**_QWEN_EXPERTS, "shared_expert_intermediate_size": 40, "mlp_only_layers": [0]},
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_moe": ("qwen3_moe", {**_QWEN_EXPERTS, "norm_topk_prob": True, "head_dim": 16}),
    "phi3": ("phi3", {"original_max_position_embeddings": 128}),
    "ernie4_5": ("ernie4_5", {}),
}
"""The model type of each family that the decoder computes, and its further settings."""

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 64,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
ENGINE_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3_text", {}),
    "gpt2": ("gpt2", {}),
    "granite": ("granite", {"rope_parameters": _LINEAR}),
    "gpt_oss": ("gpt_oss", {"rope_parameters": _YARN}),
    "deepseek_v3": ("deepseek_v3", {"rope_parameters": _YARN}),
    "olmo2": ("olmo2", {}),
    "starcoder2": ("starcoder2", {}),
    "cohere": ("cohere", {}),
    "glm4": ("glm4", {}),
    "smollm3": ("smollm3", {}),
    "gpt_neox": ("gpt_neox", {}),
    "phi3-longrope": ("phi3", {"rope_parameters": _LONG}),
    "qwen2-windows": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
}
"""Likewise of families that only transformers' own modules compute."""

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def build_family(family: str, **changed: Any) -> Any:
    """The family's model with weights of the scale of a trained one, in fp32."""
    kind, further = (FAMILIES | ENGINE_FAMILIES)[family]
    further = further | changed
    if family in FAMILIES:
        config = transformers.AutoConfig.for_model(kind, **(SIZES | further))
    else:
        ends = {"bos_token_id": 1, "eos_token_id": [0, 1], "pad_token_id": None}
        config = engine_config(kind, vocab_size=320, **ends, **further)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
            elif "norm" in name:
                weight.uniform_(0.5, 1.5, generator=generator)
            else:
                weight.normal_(generator=generator)
    return model


def save_family(
    family: str, folder: Path, *, dtype: torch.dtype = torch.float32, **changed: Any
) -> Path:
    """Write the family's folder, with a tokenizer, a chat template and a generation config."""
    model = build_family(family, **changed).to(dtype)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=1, eos_token_id=[0, 1], temperature=0.7, do_sample=True, max_length=77
    )
    model.save_pretrained(folder)
    texts = ["def f(x):\n    return x ** 12\n", "naïve 你好 \t\r\n", "some words, and some more"]
    train_tokenizer(texts * 3, 320, folder / "tokenizer.json")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token="<s>",
        eos_token=END,
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        chat_template=TEMPLATE,
        model_max_length=128,
    )
    tokenizer.save_pretrained(folder)
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    """What its config.json says."""
    said: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return said
