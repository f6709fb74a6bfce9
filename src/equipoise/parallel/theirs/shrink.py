"""A small configuration of the same architecture, on which a model is tried out and checked.

What it decides
    Fewer and narrower layers, of every kind that the model has; fewer heads in the same groups,
    fewer experts, a small vocabulary. Windows become shorter than the documents of a check, and
    caps of scores and logits so low that they matter. Everything else stays as it is: scales,
    biases, norms, positions.

    Architectures tie sizes together in ways that no table knows. So what transformers cannot build
    or run at the small sizes is tried with fewer layers and words alone, and then with fewer
    layers.

Kept true (tests/oracle/test_engine_models.py)
    Small models of many architectures have every kind of layer of the large ones, and run.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from equipoise.base.errors import ModelError
from equipoise.parallel.theirs.build import build_random, read_theirs_config, silenced
from equipoise.parallel.theirs.layers import find_layers
from equipoise.spec.model.other_config import model_from_other_config
from equipoise.spec.model.presets import ModelSpec

_WORDS = 512
_WINDOW = 48
_CAP = 0.5
_WIDTH = 16
"""Width of a head."""
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_MOST = {
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("shared_intermediate_size", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("num_experts_per_tok", "n_group", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 24),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), _WIDTH),
    **dict.fromkeys(("topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    **dict.fromkeys(("sliding_window", "window_size"), _WINDOW),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), _CAP),
    "qk_rope_head_dim": 8,
    "vocab_size": _WORDS,
    "vocab_size_per_layer_input": _WORDS,
    "hidden_size_per_layer_input": 8,
}
"""The largest values of keys whose numbers do not hang together with others'."""
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx")
_LONGEST = 256
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def write_config(config: PreTrainedConfig) -> str:
    """A configuration as text, to be sent to ranks."""
    return json.dumps(config.to_dict())


def read_config(text: str) -> PreTrainedConfig:
    """What ``write_config`` wrote."""
    data = json.loads(text)
    config: PreTrainedConfig = CONFIG_MAPPING[data["model_type"]].from_dict(data)
    return config


def read_small(folder: Path, *, is_whole: bool = False) -> tuple[ModelSpec, str]:
    """What is proven of a folder's model: its sizes, scaled down, and its configuration as text.

    Args:
        folder: Has a config.json.
        is_whole: Keep the sizes.

    Raises:
        ModelError: transformers cannot build it.
    """
    config = read_theirs_config(folder)
    config = config if is_whole else shrink_config(config)
    return model_from_other_config(config.to_dict()), write_config(config)


def name_frozen(text: str) -> tuple[str, ...]:
    """What a check freezes of a model: its table of tokens and its first layer.

    Args:
        text: As ``write_config`` wrote it.
    """
    theirs = build_random(read_config(text), seed=0, device="meta")
    words, first = theirs.get_input_embeddings(), find_layers(theirs)[0]
    return tuple(name for name, part in theirs.named_modules() if part is words or part is first)


def shrink_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The smallest configuration of an architecture that transformers builds and runs.

    Raises:
        ModelError: it runs at no size.
    """
    fault: Exception | None = None
    for data in _candidates(config.to_dict()):
        try:
            with silenced():
                small: PreTrainedConfig = type(config).from_dict(data)
                _run(build_random(small, seed=0))
        except Exception as error:
            fault = fault or error
        else:
            return small
    reason = (str(fault).strip().splitlines() or [type(fault).__name__])[0][:300].rstrip(".")
    raise ModelError(f"transformers runs no small model of type {config.model_type}: {reason}.")


def _run(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 3, dtype=torch.int64), use_cache=False)


def _candidates(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    shallow = _cut_to_kinds(data)
    few_words = _cut_words(shallow)
    yield _narrow(few_words)
    yield few_words
    yield shallow


def cut_layers(data: dict[str, Any], layers: int) -> dict[str, Any]:
    """The last layers of a configuration: those with experts, where only later ones have some."""
    name = _layers_key(data)
    whole = int(data[name]) if name else 0
    cut = {
        key: value[-layers:]
        for key, value in data.items()
        if isinstance(value, list) and len(value) == whole
    }
    dense = {"first_k_dense_replace": 0} if "first_k_dense_replace" in data else {}
    return {**data, **cut, **dense, **({name: layers} if name else {})}


def _layers_key(data: dict[str, Any]) -> str:
    return next((each for each in _LAYERS if isinstance(data.get(each), int)), "")


def _cut_to_kinds(data: dict[str, Any]) -> dict[str, Any]:
    """Two layers, or one of each kind where there are more kinds."""
    name = _layers_key(data)
    if not name:
        return dict(data)
    layers = int(data[name])
    given = [(key, value) for key, value in data.items() if isinstance(value, list)]
    lists = {key: value for key, value in given if len(value) == layers}
    kinds = [json.dumps([value[at] for value in lists.values()]) for at in range(layers)]
    kept = sorted({kinds.index(kind) for kind in kinds})
    dense = data.get("first_k_dense_replace") or 0
    if len(kept) < 2 or dense:  # the first is dense, and one that is not
        kept = sorted({*kept, *range(min(2, layers))})
    cut = {key: [value[at] for at in kept] for key, value in lists.items()}
    return {**data, **cut, name: len(kept)}


def _cut_words(data: dict[str, Any]) -> dict[str, Any]:
    words = min(_WORDS, data["vocab_size"])
    few: dict[str, Any] = {"vocab_size": words}
    for name in _TOKENS:
        if isinstance(data.get(name), int):
            few[name] = min(data[name], words - 1)
        elif isinstance(data.get(name), list):
            few[name] = [min(each, words - 1) for each in data[name]]
    return {**data, **few}


def _narrow(data: dict[str, Any]) -> dict[str, Any]:
    small = dict(data)
    for name, most in _MOST.items():
        value = data.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value > most:
            small[name] = most
    heads = next((int(data[name]) for name in _HEADS if data.get(name)), 1)
    kv_heads = next((int(data[name]) for name in _KV_HEADS if data.get(name)), heads)
    few_kv = min(2, kv_heads)
    few = few_kv * min(3, max(1, heads // kv_heads))
    small |= {name: few for name in _HEADS if data.get(name)}
    small |= {name: few_kv for name in _KV_HEADS if data.get(name)}
    small |= {name: _WIDTH * few for name in _HIDDEN if data.get(name)}
    if "qk_rope_head_dim" in data:
        small |= {name: few for name in _KV_HEADS if data.get(name)}
        small.pop("head_dim", None)
    elif data.get("head_dim"):
        small["head_dim"] = _WIDTH
    if isinstance(data.get("rotary_dim"), int):
        small["rotary_dim"] = min(data["rotary_dim"], _WIDTH)
    if not data.get("rope_parameters"):  # learned positions, one for each token of a check
        small |= {name: max(data[name], _LONGEST) for name in _POSITIONS if data.get(name)}
    groups = small.get("n_group") or 1
    small |= {name: min(data[name], 4 * groups) for name in _EXPERTS if data.get(name)}
    return small
