"""The Hugging Face names of our weights.

What it decides
    A table from our names to theirs. Each of our weights is one of theirs, except the matrices of
    experts: ours [X, out, in] stacks those of X experts, which are separate weights there.

Kept true (tests/oracle/test_transformers.py)
    ``transformers`` reads what is written under these names, and what it writes is read here.

Sources
    transformers 5.23, ``models/{llama,qwen2,qwen3}/modeling_*.py`` for the names; for experts
    ``conversion_mapping.py``, since files keep names that its modules no longer use.
"""

import re

_OUTER = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
}
_INNER = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
_EXPERTS = {
    "mixtral": {
        "feed_forward.router": "block_sparse_moe.gate",
        "feed_forward.experts.gate": "block_sparse_moe.experts.{}.w1",
        "feed_forward.experts.up": "block_sparse_moe.experts.{}.w3",
        "feed_forward.experts.down": "block_sparse_moe.experts.{}.w2",
    },
    "qwen2_moe": {
        "feed_forward.router": "mlp.gate",
        "feed_forward.experts.gate": "mlp.experts.{}.gate_proj",
        "feed_forward.experts.up": "mlp.experts.{}.up_proj",
        "feed_forward.experts.down": "mlp.experts.{}.down_proj",
        "feed_forward.shared.gate": "mlp.shared_expert.gate_proj",
        "feed_forward.shared.up": "mlp.shared_expert.up_proj",
        "feed_forward.shared.down": "mlp.shared_expert.down_proj",
        "feed_forward.shared.switch": "mlp.shared_expert_gate",
    },
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


def hf_names(name: str, *, model_type: str = "llama", experts: int = 0) -> list[str]:
    """The Hugging Face names of one of our weights: one, or one for each expert in order.

    Args:
        name: Our name.
        model_type: As in config.json.
        experts: Number of experts, X.

    >>> hf_names("layers.3.attention.query.weight")
    ['model.layers.3.self_attn.q_proj.weight']
    >>> hf_names("layers.0.feed_forward.experts.up.weight", model_type="mixtral", experts=2)[1]
    'model.layers.0.block_sparse_moe.experts.1.w3.weight'
    """
    stem, _, kind = name.rpartition(".")
    if (layer := _LAYER.fullmatch(stem)) is None:
        return [f"{_OUTER[stem]}.{kind}"]
    theirs = (_INNER | _EXPERTS.get(model_type, {}))[layer[2]]
    whole = f"model.layers.{layer[1]}.{theirs}.{kind}"
    return [whole.format(each) for each in range(experts)] if "{}" in whole else [whole]
