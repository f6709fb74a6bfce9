"""Tiny models of the causal architectures that transformers can build."""

from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

KINDS = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

_WIDTHS = (
    "hidden_size",
    "d_model",
    "n_embd",
    "embed_dim",
    "dim",
    "emb_size",
    "word_embed_proj_dim",
)
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_INNER = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "d_ff", "dim_ff")
_LONGEST = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_DROPOUTS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "attn_pdrop",
    "embd_pdrop",
    "resid_pdrop",
    "hidden_dropout",
    "embedding_dropout",
    "resid_dropout",
)
SIZES: dict[str, Any] = {
    **dict.fromkeys(_WIDTHS, 32),
    **dict.fromkeys(_LAYERS, 2),
    **dict.fromkeys(_HEADS, 4),
    **dict.fromkeys(_INNER, 48),
    **dict.fromkeys(_LONGEST, 128),
    **dict.fromkeys(_EXPERTS, 4),
    **dict.fromkeys(_DROPOUTS, 0.0),
    **{
        f"{side}_{what}": n
        for side in ("decoder", "encoder")
        for what, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))
    },
    "num_key_value_heads": 2,
    "n_head_kv": 2,
    "head_dim": 8,
    "d_kv": 8,
    "vocab_size": 61,
    "vocab_size_per_layer_input": 61,
    "hidden_size_per_layer_input": 8,
    "embedding_size": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "rotary_dim": 4,
    "sliding_window": 16,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "is_decoder": True,
    "experts_implementation": "eager",
}
_EVEN_WHERE_NONE = {"num_key_value_heads", "head_dim", "pad_token_id"}

CHANGED: dict[str, dict[str, Any]] = {
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_text": {"num_kv_shared_layers": 0},
    "minicpm3": {"num_key_value_heads": 4},
    "xmod": {"default_language": "en_XX"},
    "deepseek_v2": {"num_experts_per_tok": 2, "num_key_value_heads": 4},
    "deepseek_v3": {"num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
}
"""Further settings that some architectures need."""


def tiny_config(kind: str) -> Any:
    """Its default configuration with sizes that a laptop's core runs in milliseconds."""
    cls = CONFIG_MAPPING[kind]
    default = cls()
    if default.get_text_config() is not default:
        raise NotImplementedError("its decoder is a part of it")
    given: dict[str, Any] = {}
    for name, value in SIZES.items():
        if isinstance(getattr(cls, name, None), property):
            continue
        try:
            now = getattr(default, name)
        except Exception:  # not one number, but one of each layer
            continue
        if now is not None or name in _EVEN_WHERE_NONE:
            given[name] = value
    if "qk_rope_head_dim" in given:
        given.pop("head_dim", None)
        given["num_key_value_heads"] = 4
    types = getattr(default, "layer_types", None)
    if types and not isinstance(getattr(cls, "layer_types", None), property):
        given["layer_types"] = (list(dict.fromkeys(types)) * 2)[: max(2, len(set(types)))]
        for name in _LAYERS:
            if name in given:
                given[name] = len(given["layer_types"])
    return cls(**{**given, **CHANGED.get(kind, {})})


def build_tiny(kind: str) -> Any:
    """Draw all weights from one seed, norms and biases too."""
    model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
    config = tiny_config(kind)
    torch.manual_seed(1)
    model = model_class._from_config(config).float()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.02 * torch.randn_like(weight)
    return model


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
