"""The sizes of a decoder that transformers builds, from a config.json of any kind.

Why
    With ``model.engine = "transformers"`` the model is whatever transformers makes of the folder.
    Packing, prices and forecasts still need sizes, and architectures spell these differently.

What it decides
    Sizes are for prices alone: nothing is built from them, and what an architecture computes beside
    them (scales, biases) changes no decision. Windows are read of models that are only forecast.
    A size that no known key gives is refused, because a guess would be a wrong price.

Kept true (tests/oracle/test_engine_models.py)
    With these sizes every family there computes what transformers computes.

Sources
    transformers 5.23, ``models/*/configuration_*.py``.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from equipoise.base.errors import ModelError
from equipoise.base.shown import shown
from equipoise.spec.limits import MOST_EXPERTS, MOST_LAYERS, MOST_SIZE
from equipoise.spec.model.sizes import LatentSpec, ModelSpec, WindowSpec

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_HEAD_WIDTH = ("head_dim", "attention_head_dim", "kv_channels")
_FFN = ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size", "dim_ff", "dff")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
_EXPERT_FFN = ("moe_intermediate_size", "expert_intermediate_size", "expert_ffn_hidden_size")
_UNGATED_NAMES = """
    apertus arcee bert bert-generation big_bird biogpt bloom camembert codegen ctrl data2vec-text
    electra ernie falcon gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gptj jais2
    megatron-bert mpt nanochat nemotron openai-gpt opt persimmon phi rembert roberta
    roberta-prelayernorm roc_bert roformer starcoder2 xglm xlm-roberta xlm-roberta-xl xlnet xmod
"""
_UNGATED = frozenset(_UNGATED_NAMES.split())
"""Model types whose feed-forwards have two products."""
_GATED_SHARED = ("qwen2_moe", "qwen3_next")
"""Model types whose shared expert has a gate."""
_BIASED = ("gpt_oss", "glm4_moe")
"""Model types that are forecast, whose ``attention_bias`` is of queries, keys and values."""

_ROUTED = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
_DENSE = ("n_shared_experts", "first_k_dense_replace")
_LATENT = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
_LOCAL = ("num_local_experts", "num_experts_per_tok")
_STATED = {
    "deepseek_v3": (*_ROUTED, *_DENSE, *_LATENT),
    "kimi_k2": (*_ROUTED, *_DENSE, *_LATENT),
    "glm4_moe": (*_ROUTED, *_DENSE, "num_key_value_heads", "head_dim"),
    "gpt_oss": (*_LOCAL, "num_key_value_heads", "head_dim"),
    "llama4_text": (*_LOCAL, "num_key_value_heads", "intermediate_size_mlp"),
}
"""Sizes without which a model would be priced as another one: transformers' own defaults differ."""

FORECAST = {
    "deepseek_v3": "multi-token prediction is left out",
    "kimi_k2": "it is priced as the deepseek_v3 that it is",
    "glm4_moe": "multi-token prediction is left out",
    "gpt_oss": "each layer is priced as the mean of those with a window and those without",
    "llama4_text": "each layer is priced as the mean of those that attend in chunks and the others",
    "llama4": "its text decoder alone, each layer as the mean of those in chunks and the others",
}
"""Model types that are priced and not trained here, and what their price leaves out."""

_WINDOWS = {"gpt_oss": ("sliding_window", 128, 2), "llama4_text": ("attention_chunk_size", 8192, 4)}
"""The key of a window's tokens, transformers' default, and which layers, from 1, have none: those
whose number is a multiple of the last."""


def forecast_config(config: Mapping[str, Any]) -> ModelSpec:
    """The sizes of a model of ``FORECAST``, of whose several decoders the one of text.

    Raises:
        ModelError: as ``model_from_other_config``.
    """
    kind, text = config.get("model_type"), config.get("text_config")
    if kind == "llama4" and isinstance(text, Mapping):
        return forecast_config({"model_type": "llama4_text", **text})
    model, window = model_from_other_config(config), _window(config)
    return dataclasses.replace(model, window=window, has_sinks=kind == "gpt_oss")


def _window(config: Mapping[str, Any]) -> WindowSpec | None:
    """Layers that read a part of the text; None where all read all."""
    kind = config.get("model_type")
    if kind not in _WINDOWS:
        return None
    name, usual, every = _WINDOWS[kind]
    if config.get(name, usual) is None:
        return None
    layers = _size(config, _LAYERS)
    read_all = layers // every
    # Of transformers' two spellings, the second has a 0 where a layer reads all.
    for key, whole in (("layer_types", "full_attention"), ("no_rope_layers", 0)):
        kinds = config.get(key)
        if isinstance(kinds, list) and kinds:
            if len(kinds) != layers:
                raise ModelError(
                    f"config.json: {key} describes {len(kinds):,} layers of {layers:,}. Give each "
                    f"layer its own."
                )
            read_all = kinds.count(whole)
            break
    tokens = _size(config, (name,), default=usual)
    is_chunk = name == "attention_chunk_size"
    return WindowSpec(tokens, 1.0 - read_all / layers, is_chunk) if read_all < layers else None


def model_from_other_config(config: Mapping[str, Any]) -> ModelSpec:
    """The sizes that a config.json of any decoder gives.

    Args:
        config: The parsed config.json.

    Raises:
        ModelError: a size is missing or not a number, or the model is not a text decoder alone.
    """
    if not isinstance(config, Mapping):
        raise ModelError(f"config.json holds {shown(config)}, not a table of sizes.")
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise ModelError(f"config.json: model_type {shown(kind)} is not a name.")
    if config.get("is_encoder_decoder"):
        raise ModelError(
            f"config.json: {kind} has an encoder, and only decoders can be trained. Choose a "
            f"causal language model."
        )
    if "text_config" in config or "vision_config" in config:
        raise ModelError(
            f"config.json: {kind} is more than a decoder of text. Save its language model alone, "
            f"and name that folder."
        )
    for name in _STATED.get(kind, ()):
        _size(config, (name,), least=0)
    tied = _flag(config, "tie_word_embeddings", default=kind not in FORECAST)
    hidden, heads = _size(config, _HIDDEN), _size(config, _HEADS)
    kv_heads = _kv_heads(config, heads)
    latent = _latent(config)
    head_width = _size(config, _HEAD_WIDTH, default=max(1, hidden // heads))
    if latent is not None:
        head_width, kv_heads = _size(config, ("qk_nope_head_dim",), default=head_width), heads
    if heads % kv_heads:
        raise ModelError(
            f"config.json: {heads} query heads cannot share {kv_heads} key/value heads evenly."
        )
    return ModelSpec(
        layers=_size(config, _LAYERS, most=MOST_LAYERS),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=_size(config, ("intermediate_size_mlp", *_FFN), default=4 * hidden),
        vocab=_size(config, ("vocab_size",)),
        head_width=head_width,
        tied=tied,
        gated=kind not in _UNGATED,
        latent=latent,
        balance="none",
        qkv_bias=kind in _BIASED and _flag(config, "attention_bias", default=kind == "gpt_oss"),
        qk_norm=kind == "glm4_moe" and _flag(config, "use_qk_norm", default=False),
        **_read_experts(config),
    )


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    """Key/value heads; Falcon and GPT BigCode have one unless they say otherwise."""
    kind = config.get("model_type")
    is_one = config.get("multi_query", kind in ("falcon", "gpt_bigcode"))
    if kind == "falcon" and config.get("new_decoder_architecture"):
        is_one = False
    elif kind in ("falcon", "gpt_bigcode") and not is_one:
        return heads
    return 1 if is_one else _size(config, _KV_HEADS, default=heads)


def _sparse_layers(config: Mapping[str, Any], layers: int) -> dict[str, int]:
    """Which layers have experts, as ``dense_layers`` and ``expert_every``.

    Raises:
        ModelError: others than those that can be priced.
    """
    dense, every = (
        _size(config, ("first_k_dense_replace", "num_dense_layers"), default=0, least=0),
        1,
    )
    if config.get("model_type") == "ernie4_5_moe":
        dense = _size(config, ("moe_layer_start_index",), default=1, least=0)
        every = _size(config, ("moe_layer_interval",), default=1)
        if config.get("moe_layer_end_index", -1) not in (-1, layers - 1):
            raise ModelError(
                f"config.json: moe_layer_end_index {shown(config['moe_layer_end_index'])} is not "
                f"supported; only {layers - 1} is, the last layer."
            )
    elif "decoder_sparse_step" in config:
        every = _size(config, ("decoder_sparse_step",))
    priced = [each >= dense and (each + 1) % every == 0 for each in range(layers)]
    kinds, alone = config.get("mlp_layer_types"), config.get("mlp_only_layers")
    if isinstance(kinds, list) and kinds:
        has_experts = [each == "sparse" for each in kinds]
    elif isinstance(alone, list) and alone:
        has_experts = [is_sparse and each not in alone for each, is_sparse in enumerate(priced)]
    else:
        return {"dense_layers": dense, "expert_every": every}
    dense = has_experts.index(True) // every * every if any(has_experts) else layers
    if has_experts != [each >= dense and (each + 1) % every == 0 for each in range(layers)]:
        name = "mlp_layer_types" if isinstance(kinds, list) and kinds else "mlp_only_layers"
        raise ModelError(
            f"config.json: {name} {shown(config[name])} is not supported; only the first layers "
            f"can be without experts."
        )
    return {"dense_layers": dense, "expert_every": every}


def _read_experts(config: Mapping[str, Any]) -> dict[str, Any]:
    experts = _size(config, _EXPERTS, default=0, least=0, most=MOST_EXPERTS)
    if experts < 2 or config.get("is_moe") is False:
        return {}
    top_k = _size(config, _TOP_K, default=2)
    if top_k > experts:
        raise ModelError(
            f"config.json: each token goes to {top_k:,} of {experts:,} experts. Give "
            f"{experts:,} or fewer."
        )
    expert_ffn = _size(config, _EXPERT_FFN, default=_size(config, _FFN))
    if config.get("model_type") == "llama4_text":  # a shared expert as wide as the others
        step, sparse = (
            _size(config, ("interleave_moe_layer_step",), default=1),
            config.get("moe_layers"),
        )
        layers = list(range(step - 1, _size(config, _LAYERS), step))
        if sparse is not None and sparse != layers:
            raise ModelError(
                f"config.json: moe_layers {shown(sparse)} are not those of "
                f"interleave_moe_layer_step {step}, {shown(layers)}, which alone are priced."
            )
        return {
            "experts": experts,
            "top_k": top_k,
            "expert_ffn": expert_ffn,
            "shared_ffn": expert_ffn,
            "expert_every": step,
        }
    shared = _size(
        config,
        ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
        default=0,
        least=0,
    )
    shared_ffn = _size(
        config,
        ("shared_expert_intermediate_size", "shared_intermediate_size"),
        default=shared * expert_ffn,
        least=0,
    )
    pattern = _sparse_layers(config, _size(config, _LAYERS))
    dense, every = pattern["dense_layers"], config.get("moe_layer_freq", 1)
    if config.get("model_type") in FORECAST and every not in (1, None):
        raise ModelError(
            f"config.json: moe_layer_freq {shown(every)} is not supported; only 1 is, every layer "
            f"after the first {dense} with experts."
        )
    if dense >= _size(config, _LAYERS):
        return {}
    groups = _size(config, ("n_group",), default=1)
    kept = groups if groups == 1 else _size(config, ("topk_group",), default=groups)
    if experts % groups or kept > groups or top_k > kept * (experts // groups):
        raise ModelError(
            f"config.json: {experts} experts in n_group = {groups} groups with topk_group = {kept} "
            f"chosen. Groups must hold equally many experts, no more than {groups} can be chosen, "
            f"and those must hold the {top_k} experts of a token."
        )
    grouped = {"expert_groups": groups, "kept_groups": kept} if kept < groups else {}
    return {
        "experts": experts,
        "top_k": top_k,
        "expert_ffn": expert_ffn,
        "shared_ffn": shared_ffn,
        "shared_gate": config.get("model_type") in _GATED_SHARED and shared_ffn > 0,
        **pattern,
        **grouped,
    }


def _latent(config: Mapping[str, Any]) -> LatentSpec | None:
    """Widths of latent attention, where keys and values come from one vector."""
    if not config.get("kv_lora_rank") or not config.get("qk_rope_head_dim"):
        return None
    key, value = (
        _size(config, (name,), default=128) for name in ("qk_nope_head_dim", "v_head_dim")
    )
    if key != value:
        raise ModelError(
            f"config.json: v_head_dim {value} differs from qk_nope_head_dim {key}, and heads are "
            f"priced with one width. Give both the same."
        )
    return LatentSpec(
        query=_size(config, ("q_lora_rank",), default=0),
        key_value=_size(config, ("kv_lora_rank",)),
        rope=_size(config, ("qk_rope_head_dim",)),
    )


def _flag(config: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = config.get(name, default)
    if not isinstance(value, bool):
        raise ModelError(f"config.json: {name} {shown(value)} is not true or false.")
    return value


def _size(
    config: Mapping[str, Any],
    names: tuple[str, ...],
    *,
    default: int | None = None,
    least: int = 1,
    most: int = MOST_SIZE,
) -> int:
    """The first of some keys that is there."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, list) and value and {type(each) for each in value} == {int}:
            value = max(value)  # of each layer
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ModelError(
                f"config.json: {name} {shown(value)} is not a whole number from {least} to "
                f"{most:,}."
            )
        return value
    if default is None:
        raise ModelError(
            f"config.json has no {names[0]}, and packs cannot be priced without it. Save the "
            f"configuration again with transformers, which writes every size."
        )
    return default
