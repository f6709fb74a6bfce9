"""A Hugging Face config.json as a ModelSpec, and back.

Why
    The sizes of published models are in config.json. What this decoder cannot compute must be
    refused by name: a window or a bias that is silently dropped gives logits that are wrong and
    a run that looks right.

Kept true (tests/unit/spec/test_hf_config.py)
    Every preset survives the round trip; ``transformers`` loads what is written here, and a
    model built from it has ``ModelSpec.params`` weights.

Sources
    transformers 5.23, ``models/{llama,mistral,mixtral,qwen2,qwen2_moe,qwen3}/configuration_*.py``
    for the defaults of absent fields, ``modeling_rope_utils.py`` for the two spellings of rotary
    settings: ``rope_theta`` beside ``rope_scaling`` (4.x), and ``rope_parameters`` with both (5.x).
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from equipoise.base.errors import ModelError
from equipoise.base.nearest import nearest
from equipoise.spec.model import ModelSpec, RopeScaling

MODEL_TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3")
_ROPE_TYPES = ("default", "llama3")
_ARCHITECTURE = {
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Fields that change the arithmetic, with the one value that this decoder computes.
_ONLY: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "router_jitter_noise": 0.0,
    "quantization_config": None,
}
_QWEN3_HEAD_WIDTH = 128  # Qwen3Config.head_dim, when config.json leaves it out
_ROPE_THETA = 10_000.0  # RotaryEmbeddingConfigMixin.default_theta
_NORM_EPS = 1e-6  # rms_norm_eps of all four configurations


def model_from_hf_config(config: Mapping[str, Any]) -> ModelSpec:
    """The sizes that a config.json describes.

    Args:
        config: The parsed config.json of a model of one of ``MODEL_TYPES``.

    Raises:
        ModelError: a field is missing, or has a value that this decoder does not compute.
    """
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        hint = f" Nearest: {nearest(kind, MODEL_TYPES)}." if isinstance(kind, str) else ""
        raise ModelError(
            f"config.json: model_type {_show(kind)} is not one of {', '.join(MODEL_TYPES)}.{hint}"
        )
    for name, only in _ONLY.items():
        value = config.get(name, only)
        if value != only and not (only is False and value is None):
            raise _unsupported(name, value, only)
    _refuse_windows(kind, config)

    hidden = _size(config, "hidden_size")
    heads = _size(config, "num_attention_heads")
    head_width = config.get("head_dim")
    if head_width is None:
        head_width = _QWEN3_HEAD_WIDTH if kind == "qwen3" else _divide(hidden, heads)
    # llama alone documents that an absent count means one key/value head for each query head.
    kv_heads = (
        heads
        if kind == "llama" and config.get("num_key_value_heads") is None
        else _size(config, "num_key_value_heads")
    )
    if heads % kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {heads} cannot share num_key_value_heads "
            f"{kv_heads}: it must be a multiple of it."
        )
    theta, scaling = _rope(config)
    return ModelSpec(
        layers=_size(config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=_size(config, "intermediate_size"),
        vocab=_size(config, "vocab_size"),
        head_width=_size({"head_dim": head_width}, "head_dim"),
        tied=bool(config.get("tie_word_embeddings", False)),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=_number(config, "rms_norm_eps", _NORM_EPS),
        qkv_bias=kind in ("qwen2", "qwen2_moe"),
        qk_norm=kind == "qwen3",
        **_read_experts(kind, config),
    )


def hf_config(model: ModelSpec) -> dict[str, Any]:
    """The config.json of a model, as ``transformers`` 4.48 and later read it.

    The length for which the model was trained and the ids of special tokens are no sizes of
    the model: whoever writes a folder adds ``max_position_embeddings`` and ``*_token_id``.

    Raises:
        ModelError: no published model type has this combination.

    >>> from equipoise.spec.model import preset
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
        **({"attention_bias": False} if kind in ("llama", "qwen3") else {}),
        **({"mlp_bias": False} if kind == "llama" else {}),
        **({"use_sliding_window": False} if kind.startswith("qwen") else {}),
        **_write_experts(kind, model),
    }


def _kind_of_experts(model: ModelSpec) -> str:
    """The model type that computes these experts.

    Raises:
        ModelError: none does.
    """
    every_layer = model.sparse_layers == model.layers
    is_gated = model.shared_ffn > 0 and model.shared_gate
    if model.balance != "bias" and not model.qk_norm:
        if is_gated and model.qkv_bias:
            return "qwen2_moe"
        alike = (model.shared_ffn, model.qkv_bias, model.norm_top_k, model.expert_ffn)
        if every_layer and alike == (0, False, True, model.ffn):
            return "mixtral"
    raise ModelError(
        "No Hugging Face model type has these experts. mixtral has them in every layer, with "
        "weights that sum to one, and no shared expert, bias or norm of queries; qwen2_moe has a "
        "shared expert with a gate, and biases of queries, keys and values; and neither adds a "
        "bias to a router's scores. Train with one of them to export."
    )


def _write_experts(kind: str, model: ModelSpec) -> dict[str, Any]:
    if kind == "mixtral":
        return {"num_local_experts": model.experts, "num_experts_per_tok": model.top_k}
    if kind != "qwen2_moe":
        return {}
    return {
        "num_experts": model.experts,
        "num_experts_per_tok": model.top_k,
        "moe_intermediate_size": model.expert_ffn,
        "shared_expert_intermediate_size": model.shared_ffn,
        "norm_topk_prob": model.norm_top_k,
        "decoder_sparse_step": model.expert_every,
        "mlp_only_layers": list(range(model.dense_layers)),
    }


def _read_experts(kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ModelSpec that say which experts there are."""
    if kind not in ("mixtral", "qwen2_moe"):
        return {}
    name = "num_local_experts" if kind == "mixtral" else "num_experts"
    experts, top_k = _size(config, name), _size(config, "num_experts_per_tok")
    if top_k > experts:
        raise ModelError(f"config.json: num_experts_per_tok {top_k} is more than {name} {experts}.")
    if kind == "mixtral":
        expert_ffn = _size(config, "intermediate_size")
        return {"experts": experts, "top_k": top_k, "expert_ffn": expert_ffn}
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or {type(each) for each in dense} - {int}:
        raise ModelError(f"config.json: mlp_only_layers {_show(dense)} is no list of layers.")
    if sorted(dense) != list(range(len(dense))):
        raise _unsupported("mlp_only_layers", dense, list(range(len(dense))))
    return {
        "experts": experts,
        "top_k": top_k,
        "expert_ffn": _size(config, "moe_intermediate_size"),
        "shared_ffn": _size(config, "shared_expert_intermediate_size"),
        "shared_gate": True,
        "norm_top_k": bool(config.get("norm_topk_prob", False)),
        "dense_layers": len(dense),
        "expert_every": _size({"decoder_sparse_step": 1, **config}, "decoder_sparse_step"),
    }


def _refuse_windows(kind: str, config: Mapping[str, Any]) -> None:
    # qwen writes a sliding_window that use_sliding_window = false turns off; mistral's counts.
    if kind == "mistral":
        # MistralConfig.sliding_window is 4096 when config.json leaves it out.
        window = config.get("sliding_window", 4096)
        if window is not None:
            raise _unsupported("sliding_window", window, None)
    elif config.get("use_sliding_window", False):
        raise _unsupported("use_sliding_window", True, False)
    layer_types = config.get("layer_types") or []
    for layer_type in layer_types if isinstance(layer_types, list) else [layer_types]:
        if layer_type != "full_attention":
            raise _unsupported("layer_types", layer_type, "full_attention")


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(field) or {}
    if not isinstance(rope, dict):
        raise ModelError(f"config.json: {field} {_show(rope)} is not a table.")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPE_TYPES:
        raise _unsupported(f"{field} of type", kind, *_ROPE_TYPES)
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise _unsupported("partial_rotary_factor", partial, 1.0)
    named = rope if "rope_theta" in rope else config
    theta = _number(named, "rope_theta", _ROPE_THETA)
    if kind == "default":
        return theta, None
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if absent := [name for name in names if name not in rope]:
        raise ModelError(f"config.json: {field} of type llama3 has no {', '.join(absent)}.")
    factor, low, high = (_number(rope, name) for name in names[:3])
    return theta, RopeScaling(factor, low, high, _size(rope, names[3]))


def _number(config: Mapping[str, Any], name: str, default: float = 0.0) -> float:
    value = config.get(name, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise ModelError(f"config.json: {name} {_show(value)} is not a number above 0.")
    return float(value)


def _size(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if value is None:
        raise ModelError(f"config.json: no {name}.")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {name} {_show(value)} is not a whole number above 0.")
    return value


def _divide(hidden: int, heads: int) -> int:
    if hidden % heads:
        raise ModelError(
            f"config.json: hidden_size {hidden} does not divide over num_attention_heads {heads}, "
            "and there is no head_dim."
        )
    return hidden // heads


def _unsupported(name: str, value: object, *only: object) -> ModelError:
    allowed = " or ".join(_show(each) for each in only)
    return ModelError(f"config.json: {name} {_show(value)} is not supported; only {allowed} is.")


def _show(value: object) -> str:
    return "(a table)" if isinstance(value, dict) else json.dumps(value)
