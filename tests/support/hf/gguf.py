"""GGUF files of tiny models, written as llama.cpp's converter writes them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import tokenizers
from torch import Tensor

from equipoise.spec.model.presets import ModelSpec

MODEL = ModelSpec(
    layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=9, head_width=4, rope_theta=5e5
)
NAMES = {
    "embed": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "attention_norm": "attn_norm",
    "attention.query": "attn_q",
    "attention.key": "attn_k",
    "attention.value": "attn_v",
    "attention.output": "attn_output",
    "attention.query_norm": "attn_q_norm",
    "attention.key_norm": "attn_k_norm",
    "feed_forward_norm": "ffn_norm",
    "feed_forward.gate": "ffn_gate",
    "feed_forward.up": "ffn_up",
    "feed_forward.down": "ffn_down",
}
TOKENS = ("<|end|>", "a", "b", "1", "2", "Ġ", "ab", "Ġa", "ĠĠ")
MERGES = ("a b", "Ġ a", "Ġ Ġ")


def their_name(name: str) -> str:
    """What GGUF calls a weight of ours."""
    parts = name.split(".")
    if parts[0] != "layers":
        return f"{NAMES[parts[0]]}.{parts[-1]}"
    return f"blk.{parts[1]}.{NAMES['.'.join(parts[2:-1])]}.{parts[-1]}"


def permuted(name: str, weight: Tensor, head_width: int) -> Tensor:
    """Rows as llama.cpp's converter orders them: the two halves of each head interleaved."""
    if not name.endswith(("query.weight", "key.weight")):
        return weight
    rows = [
        head * head_width + half * head_width // 2 + pair
        for head in range(weight.shape[0] // head_width)
        for pair in range(head_width // 2)
        for half in range(2)
    ]
    return weight[rows]


def write_gguf(
    file: Path,
    state: dict[str, Tensor],
    *,
    model: ModelSpec = MODEL,
    architecture: str = "llama",
    tokenizer: str = "gpt2",
    split: str = "smollm",
    tokens: Sequence[str] = TOKENS,
    merges: Sequence[str] = MERGES,
    kinds: Sequence[int] | None = None,
    end: int = 0,
    kind: gguf.GGMLQuantizationType | None = None,
    change: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
) -> Path:
    """Write a model, its matrices in a kind if one is given."""
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_name("tiny")
    writer.add_block_count(model.layers)
    writer.add_context_length(64)
    writer.add_embedding_length(model.hidden)
    writer.add_feed_forward_length(model.ffn)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_rope_freq_base(model.rope_theta)
    writer.add_layer_norm_rms_eps(model.norm_eps)
    if model.head_width * model.heads != model.hidden:
        writer.add_key_length(model.head_width)
        writer.add_value_length(model.head_width)
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre(split)
    writer.add_token_list(list(tokens))
    writer.add_token_merges(list(merges))
    writer.add_token_types(kinds or [3] + [1] * (len(tokens) - 1))
    writer.add_eos_token_id(end)
    change(writer)
    for name, weight in state.items():
        turned = permuted(name, weight, model.head_width) if architecture == "llama" else weight
        if kind is None or weight.dim() == 1:
            writer.add_tensor(their_name(name), turned.numpy())
        else:
            data = gguf.quants.quantize(turned.numpy(), kind)
            writer.add_tensor(their_name(name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def copy_to_gguf(oracle: Any, core: tokenizers.Tokenizer, file: Path) -> Path:
    """Write a model of transformers, and a tokenizer, under the gguf package's own names."""
    config, kind = oracle.config, oracle.config.model_type
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[kind.upper()], config.num_hidden_layers
    )  # llama.cpp's converter names weights by it
    tokens = {number: token for token, number in core.get_vocab().items()}

    def turned(name: str, weight: Tensor) -> Tensor:
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        if kind != "llama" or not ("q_proj" in name or "k_proj" in name):
            return weight
        halves = weight.reshape(heads, 2, -1, weight.shape[-1])
        return halves.swapaxes(1, 2).reshape(weight.shape)

    writer = gguf.GGUFWriter(file, kind)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_width = getattr(config, "head_dim", None)
    if head_width:
        writer.add_key_length(head_width)
        writer.add_value_length(head_width)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([tokens.get(at, f"<unused{at}>") for at in range(config.vocab_size)])
    writer.add_token_merges(
        [" ".join(each) for each in json.loads(core.to_str())["model"]["merges"]]
    )
    writer.add_eos_token_id(0)
    for name, weight in oracle.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(theirs, turned(name, weight).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
