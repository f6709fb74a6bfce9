"""Every key of a config.json, by what this decoder does with it.

Why
    A silently ignored key may change the arithmetic: a window, a bias, a scale. So a key is read,
    must have the one value that this decoder computes, or is known to change nothing here; any
    other is refused by name.

Kept true (tests/oracle/hf/test_hf_keys.py)
    The defaults are those of ``transformers``' configuration classes, and every key of these
    classes is here. A model with a changed key is read with equal logits or refused.

Sources
    transformers 5.23, ``models/*/configuration_*.py`` and ``configuration_utils.py``. Keys that
    no class has are from published config.json files.
"""

from collections.abc import Mapping
from typing import Any

from equipoise.base.errors import ModelError
from equipoise.base.nearest import nearest
from equipoise.base.shown import shorten, shown

_LLAMA: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "partial_rotary_factor": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "layer_types": None,
}
_MISTRAL = _LLAMA | {
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}
_QWEN2 = _LLAMA | {
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
}
READ: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "mixtral": _MISTRAL
    | {
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen2": _QWEN2,
    "qwen2_moe": _QWEN2
    | {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "qkv_bias": True,
    },
    "qwen3": _QWEN2 | {"head_dim": 128},
    "qwen3_moe": _LLAMA
    | {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "num_experts": None,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
    },
    "phi3": _LLAMA
    | {
        "vocab_size": 32_064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "rms_norm_eps": 1e-5,
        "original_max_position_embeddings": 4096,
    },
    "ernie4_5": _LLAMA
    | {
        "vocab_size": 103_424,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_theta": 500_000.0,
    },
}
"""The keys read for each model type, with the values of absent ones."""

ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_bias": (False, None),
    "quantization_config": (None,),
    "compression_config": (None,),
    "per_layer_config": (None,),
    "rope_interleaved": (False, None),
    "use_mrope": (False, None),
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "pruned_heads": ({}, None),
    # These change how a model trains, but not the logits of a trained one.
    "attention_dropout": (0.0, None),
    "resid_pdrop": (0.0, None),
    "embd_pdrop": (0.0, None),
    "router_jitter_noise": (0.0, None),
    "output_router_logits": (False, None),
}
"""Keys that would change the arithmetic, with the values that this decoder computes."""

IGNORED: dict[str, str] = {
    "names and versions": (
        "model_type architectures _name_or_path name_or_path _commit_hash transformers_version "
        "auto_map tokenizer_class is_llama_config unsloth_version unsloth_fixed "
        "transformers.js_config"
    ),
    "dtypes and kernels, which the run chooses": (
        "dtype torch_dtype use_bfloat16 attn_implementation _attn_implementation "
        "_attn_implementation_autoset _attn_implementation_internal experts_implementation "
        "_experts_implementation _experts_implementation_internal _flash_attn_2_enabled "
        "use_flash_attention_2 torchscript tf_legacy_loss pretraining_tp "
        "chunk_size_feed_forward gradient_checkpointing"
    ),
    "weights at the start, which are in the folder": "initializer_range",
    "a length that no arithmetic here depends on": (
        "max_position_embeddings max_sequence_length model_max_length"
    ),
    # A window that no layer has: the reader refuses any other.
    "layers with a window": "max_window_layers",
    "the router's loss, which is a choice of the run": "router_aux_loss_coef",
    "ids of tokens, which are the tokenizer's": (
        "bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id "
        "decoder_start_token_id bos_token eos_token pad_token unk_token"
    ),
    "outputs that nobody asks for here": (
        "output_hidden_states output_attentions return_dict use_return_dict use_cache "
        "tie_last_hidden_states is_decoder tie_encoder_decoder cross_attention_hidden_size"
    ),
    "heads of classifiers": (
        "id2label label2id num_labels problem_type finetuning_task task_specific_params "
        "classifier_dropout prefix"
    ),
    "how text is generated": (
        "assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens "
        "diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size "
        "encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty "
        "forced_bos_token_id forced_eos_token_id length_penalty max_length max_new_tokens "
        "min_length no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule "
        "num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values "
        "repetition_penalty return_dict_in_generate suppress_tokens target_lookbehind "
        "temperature top_k top_p typical_p"
    ),
}
"""The keys that change no number here, by reason."""

_IGNORED = frozenset(" ".join(IGNORED.values()).split())


def known_keys(kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json's values of the keys that are read, with transformers' defaults.

    Args:
        kind: Model type, one of ``READ``.
        config: The parsed config.json.

    Raises:
        ModelError: a key is unknown, or asks for arithmetic that this decoder does not do.
    """
    read = READ[kind]
    for name, value in config.items():
        if name in ONLY:
            if value not in ONLY[name]:
                raise unsupported(name, value, ONLY[name][0])
        elif name not in read and name not in _IGNORED:
            raise ModelError(
                f"config.json: {kind} has no key {shorten(name)} (here {shown(value)}). Nearest: "
                f"{nearest(name, read)}. Delete it if the model computes the same without it."
            )
    return {**read, **{name: value for name, value in config.items() if name in read}}


def unsupported(name: str, value: object, *only: object) -> ModelError:
    """The error for a value that asks for other arithmetic."""
    allowed = " or ".join(shown(each) for each in only)
    return ModelError(f"config.json: {name} {shown(value)} is not supported; only {allowed} is.")
