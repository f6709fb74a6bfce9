"""A Hugging Face config.json as a ModelSpec, and back.

Why
    The sizes of published models are in config.json. What this decoder cannot compute must be
    refused by name: silently dropping a window or a bias gives wrong logits in a run that looks
    right.

Kept true (tests/unit/spec/model/test_hf_config.py, tests/oracle/hf/test_hf_keys.py)
    Every preset survives the round trip; ``transformers`` loads what is written here, and a
    model built from it has ``ModelSpec.params`` weights.

Sources
    transformers 5.23, ``modeling_rope_utils.py`` for the two spellings of rotary settings:
    ``rope_theta`` beside ``rope_scaling`` (4.x), and ``rope_parameters`` with both (5.x).
    ``spec.model.hf_keys`` has every key.
"""

import sys
from collections.abc import Mapping
from typing import Any

from equipoise.base.errors import ModelError
from equipoise.base.nearest import nearest
from equipoise.base.shown import shorten, shown
from equipoise.spec.limits import MOST_EXPERTS, MOST_LAYERS, MOST_SIZE
from equipoise.spec.model.hf_keys import READ, known_keys, unsupported
from equipoise.spec.model.presets import ModelSpec, RopeScaling

MODEL_TYPES = tuple(READ)
_ROPE_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_LLAMA3_KEYS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)
_MOST = {
    "num_hidden_layers": MOST_LAYERS,
    "num_local_experts": MOST_EXPERTS,
    "num_experts": MOST_EXPERTS,
}
_ROPE_TYPES = {"default": _ROPE_KEYS, "llama3": (*_ROPE_KEYS, *_LLAMA3_KEYS)}
_ARCHITECTURE = {
    "ernie4_5": "Ernie4_5ForCausalLM",
    "llama": "LlamaForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def model_from_hf_config(config: Mapping[str, Any]) -> ModelSpec:
    """The sizes that a config.json describes, with transformers' defaults for absent keys.

    Args:
        config: The parsed config.json of a model of one of ``MODEL_TYPES``.

    Raises:
        ModelError: a key is unknown, or has a value that this decoder does not compute.
    """
    if not isinstance(config, Mapping):
        raise ModelError(f"config.json holds {shown(config)}, not a table of sizes.")
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        hint = f" Nearest: {nearest(kind, MODEL_TYPES)}." if isinstance(kind, str) else ""
        raise ModelError(
            f"config.json: model_type {shown(kind)} is not one of {', '.join(MODEL_TYPES)}.{hint}"
        )
    said = known_keys(kind, config)
    _refuse_windows(kind, said)
    hidden = _size(said, "hidden_size")
    heads = _size(said, "num_attention_heads")
    if said["num_key_value_heads"] is None and kind != "qwen2_moe":
        said["num_key_value_heads"] = heads
    if said["head_dim"] is None and kind != "qwen3":
        said["head_dim"] = _divide(hidden, heads)
    kv_heads, head_width = _size(said, "num_key_value_heads"), _size(said, "head_dim")
    if heads % kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {heads} cannot share num_key_value_heads "
            f"{kv_heads}: it must be a multiple of it."
        )
    if head_width % 2:
        raise ModelError(
            f"config.json: head_dim {head_width} is odd, and rotary positions turn pairs."
        )
    theta, scaling = _rope(kind, said)
    return ModelSpec(
        layers=_size(said, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=_size(said, "intermediate_size"),
        vocab=_size(said, "vocab_size"),
        head_width=head_width,
        tied=_flag(said, "tie_word_embeddings"),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=_number(said, "rms_norm_eps"),
        qkv_bias=kind == "qwen2" or (kind == "qwen2_moe" and _flag(said, "qkv_bias")),
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        **_read_experts(kind, said),
    )


def hf_config(model: ModelSpec) -> dict[str, Any]:
    """The config.json of a model, for ``transformers`` 4.48 and later.

    The trained length and the ids of special tokens are not part of a model's sizes; writers of
    a folder add ``max_position_embeddings`` and ``*_token_id``.

    Raises:
        ModelError: no published model type has this combination.

    >>> from equipoise.spec.model.presets import preset
    >>> config = hf_config(preset("qwen3-8b"))
    >>> config["architectures"], config["num_key_value_heads"], config["head_dim"]
    (['Qwen3ForCausalLM'], 8, 128)
    """
    if model.qkv_bias and model.qk_norm:
        raise ModelError(
            "No Hugging Face model type has both query/key/value biases (qwen2) and "
            "query/key norms (qwen3). Train with one of them to export."
        )
    kind = "qwen2" if model.qkv_bias else "qwen3" if model.qk_norm else "llama"
    if model.experts:
        kind = _kind_of_experts(model)
    rope: dict[str, Any] = {"rope_type": "default"}
    positions: dict[str, Any] = {}
    if (scaling := model.rope_scaling) is not None:
        rope = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_tokens,
        }
        positions = {"max_position_embeddings": int(scaling.factor * scaling.original_tokens)}
    return {
        "architectures": [_ARCHITECTURE[kind]],
        "model_type": kind,
        "hidden_size": model.hidden,
        "intermediate_size": model.expert_ffn if kind == "mixtral" else model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_width,
        "vocab_size": model.vocab,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied,
        "rope_theta": model.rope_theta,
        "rope_scaling": None if model.rope_scaling is None else dict(rope),
        "rope_parameters": {**rope, "rope_theta": model.rope_theta},
        **positions,
        **({"attention_bias": False} if kind in ("llama", "qwen3", "qwen3_moe") else {}),
        **({"mlp_bias": False} if kind == "llama" else {}),
        **({"use_sliding_window": False} if kind.startswith("qwen") else {}),
        **_write_experts(kind, model),
    }


def _kind_of_experts(model: ModelSpec) -> str:
    """The model type that computes these experts.

    Raises:
        ModelError: none does.
    """
    if model.identity_experts:
        raise ModelError(
            f"No Hugging Face model type of this package's has {model.identity_experts} experts "
            f"without weights beside {model.experts} with them. Train with "
            f"model.identity_experts = 0 to export."
        )
    if model.shortcut:
        raise ModelError(
            "No Hugging Face model type of this package's has experts that read what attention "
            "reads. Train with model.shortcut = false to export."
        )
    every_layer = model.sparse_layers == model.layers
    is_gated = model.shared_ffn > 0 and model.shared_gate
    if model.balance != "bias" and model.qk_norm and not model.shared_ffn:
        return "qwen3_moe"
    if model.balance != "bias" and not model.qk_norm:
        if is_gated:
            return "qwen2_moe"
        alike = (model.shared_ffn, model.qkv_bias, model.norm_top_k, model.expert_ffn)
        if every_layer and alike == (0, False, True, model.ffn):
            return "mixtral"
    raise ModelError(
        "No Hugging Face model type has these experts. mixtral has them in every layer, as wide as "
        f"model.ffn (here {model.expert_ffn} and {model.ffn}), with weights that sum to one, and "
        "no shared expert, bias or norm of queries; qwen2_moe has a shared expert with a gate; "
        "qwen3_moe has norms of queries and keys and no shared expert; "
        "and none adds a bias to a router's scores. Train with one of them to export."
    )


def _write_experts(kind: str, model: ModelSpec) -> dict[str, Any]:
    if kind == "mixtral":
        return {"num_local_experts": model.experts, "num_experts_per_tok": model.top_k}
    if not model.experts:
        return {}
    shared = {"shared_expert_intermediate_size": model.shared_ffn, "qkv_bias": model.qkv_bias}
    return {
        "num_experts": model.experts,
        "num_experts_per_tok": model.top_k,
        "moe_intermediate_size": model.expert_ffn,
        "norm_topk_prob": model.norm_top_k,
        "decoder_sparse_step": model.expert_every,
        "mlp_only_layers": list(range(model.dense_layers)),
        **(shared if kind == "qwen2_moe" else {}),
    }


def _read_experts(kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ModelSpec that describe experts."""
    if kind not in ("mixtral", "qwen2_moe", "qwen3_moe"):
        return {}
    name = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    experts, top_k = _size(config, name), _size(config, "num_experts_per_tok")
    if top_k > experts:
        raise ModelError(f"config.json: num_experts_per_tok {top_k} is more than {name} {experts}.")
    if kind == "mixtral":
        expert_ffn = _size(config, "intermediate_size")
        return {"experts": experts, "top_k": top_k, "expert_ffn": expert_ffn}
    dense = config["mlp_only_layers"] or []
    if not isinstance(dense, list) or {type(each) for each in dense} - {int}:
        raise ModelError(f"config.json: mlp_only_layers {shown(dense)} is not a list of layers.")
    if sorted(dense) != list(range(len(dense))):
        raise unsupported("mlp_only_layers", dense, list(range(len(dense))))
    return {
        "experts": experts,
        "top_k": top_k,
        "expert_ffn": _size(config, "moe_intermediate_size"),
        **_read_shared(kind, config),
        "norm_top_k": _flag(config, "norm_topk_prob"),
        "dense_layers": len(dense),
        "expert_every": _size(config, "decoder_sparse_step"),
    }


def _read_shared(kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ModelSpec that describe a shared expert."""
    if kind != "qwen2_moe":
        return {}
    return {"shared_ffn": _size(config, "shared_expert_intermediate_size"), "shared_gate": True}


def _refuse_windows(kind: str, config: Mapping[str, Any]) -> None:
    if config["use_sliding_window"] not in (False, None):
        raise unsupported("use_sliding_window", config["use_sliding_window"], False)
    # qwen writes a sliding_window that use_sliding_window = false turns off; others' counts.
    if not kind.startswith("qwen") and config["sliding_window"] is not None:
        raise unsupported("sliding_window", config["sliding_window"], None)
    layer_types = config["layer_types"] or []
    for layer_type in layer_types if isinstance(layer_types, list) else [layer_types]:
        if layer_type != "full_attention":
            raise unsupported("layer_types", layer_type, "full_attention")


def rope_types(model_type: str) -> tuple[str, ...]:
    """Kinds of rotary positions that are computed here for a model type."""
    return ("default",) if model_type == "phi3" else tuple(_ROPE_TYPES)


def _rope(model_type: str, config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    # If both spellings are given, transformers reads only the older one.
    field = "rope_scaling" if config["rope_scaling"] else "rope_parameters"
    rope = config[field] or {}
    if not isinstance(rope, dict):
        raise ModelError(f"config.json: {field} {shown(rope)} is not a table.")
    kind = rope.get("rope_type", rope.get("type", "default"))
    types = rope_types(model_type)
    if not isinstance(kind, str) or kind not in types:
        raise unsupported(f"{field} of type", kind, *types)
    for name, value in rope.items():
        if value is not None and name not in _ROPE_TYPES[kind]:
            raise ModelError(
                f"config.json: {field} of type {kind} has no key {shorten(name)} (here "
                f"{shown(value)}). Keys: {', '.join(_ROPE_TYPES[kind])}."
            )
    partial = rope.get("partial_rotary_factor", config["partial_rotary_factor"])
    if partial not in (None, 1, 1.0):
        raise unsupported("partial_rotary_factor", partial, 1.0)
    theta = _number(rope if "rope_theta" in rope else config, "rope_theta")
    if kind == "default":
        return theta, None
    if absent := [name for name in _LLAMA3_KEYS if name not in rope]:
        raise ModelError(f"config.json: {field} of type llama3 has no {', '.join(absent)}.")
    factor, low, high = (_number(rope, name) for name in _LLAMA3_KEYS[:3])
    if low >= high:
        raise ModelError(
            f"config.json: {field} of type llama3 has low_freq_factor {low:g}, which is not below "
            f"its high_freq_factor {high:g}."
        )
    return theta, RopeScaling(factor, low, high, _size(rope, _LLAMA3_KEYS[3]))


def _flag(config: Mapping[str, Any], name: str) -> bool:
    value = config[name]
    if not isinstance(value, bool):
        raise ModelError(f"config.json: {name} {shown(value)} is not true or false.")
    return value


def _number(config: Mapping[str, Any], name: str) -> float:
    value = config[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= sys.float_info.max:
        raise ModelError(f"config.json: {name} {shown(value)} is not a number above 0.")
    return float(value)


def _size(config: Mapping[str, Any], name: str) -> int:
    value = config[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {name} {shown(value)} is not a whole number above 0.")
    if value > (most := _MOST.get(name, MOST_SIZE)):
        raise ModelError(f"config.json: {name} {shown(value)} is more than {most:,}.")
    return value


def _divide(hidden: int, heads: int) -> int:
    if hidden % heads:
        raise ModelError(
            f"config.json: hidden_size {hidden} does not divide over num_attention_heads {heads}, "
            "and there is no head_dim."
        )
    return hidden // heads
