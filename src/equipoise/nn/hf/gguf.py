"""Weights and tokenizer of a GGUF file, which holds a whole model in one file.

Why
    Many machines and packages have a GGUF of a small model and no Hugging Face folder.
    Dequantised, it is a starting point for training.

What it decides
    Under the architecture "llama", which Mistral's models have too, llama.cpp turns neighbouring
    rotary pairs, so its converter reorders the rows of queries and keys; they are put back here
    (``nn.hf.names`` draws both orders). Under "qwen2" and "qwen3" rows have our order.

    Settings that this decoder does not compute (experts, scaled or partial rotation) are
    refused by name.

Kept true (tests/oracle/test_smollm2.py, tests/oracle/serving/test_serving_engine.py)
    Logits equal those of ``transformers`` on the same file.

Sources
    gguf.md of github.com/ggml-org/ggml for the keys; llama.cpp, ``convert_hf_to_gguf.py``,
    ``LlamaModel.permute`` for the order of rows.
"""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from equipoise.base.errors import ModelError
from equipoise.base.read import reason
from equipoise.base.shown import shown
from equipoise.nn.hf.bpe import rebuild_bpe
from equipoise.nn.hf.names import half_split
from equipoise.nn.hf.read import check_weights, weight_shapes
from equipoise.spec.model.presets import ModelSpec

if TYPE_CHECKING:
    import tokenizers

_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
}
"""What the models of each have beside the sizes in a file."""
_TURNS_NEIGHBOURS = ("llama",)

_OUTER = {"embed": "token_embd", "norm": "output_norm", "head": "output"}
_INNER = {
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
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_PERMUTED = re.compile(r".+\.attention\.(query|key)\.weight")
_ROPE_THETA = 10_000.0  # llama.cpp's default of rope.freq_base
# Keys of the architecture that are read, or that change no number.
_KEYS = frozenset(
    (
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "attention.value_length",
        "block_count",
        "context_length",
        "embedding_length",
        "expert_count",
        "feed_forward_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.type",
        "vocab_size",
    )
)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A GGUF file's metadata, read without its weights."""

    name: str
    architecture: str
    model: ModelSpec
    context_tokens: int | None
    tensors: int
    tensor_bytes: int
    quantisations: dict[str, int]
    """Number of tensors of each kind."""
    tokenizer_config: dict[str, str]
    """``eos_token`` and the like, and the chat template, for tokenizer_config.json."""
    generation_config: dict[str, Any]
    """Tokens that begin and end texts, for generation_config.json; empty if it names none."""

    @property
    def end_ids(self) -> list[int]:
        """Tokens that end a text."""
        ids = self.generation_config.get("eos_token_id", [])
        return ids if isinstance(ids, list) else [ids]


def read_gguf_header(file: Path) -> GgufHeader:
    """Read the sizes and the special tokens of a GGUF file.

    Raises:
        ModelError: as ``read_gguf``.
    """
    with _refusing_damage(file):
        return _header(file, _open(file))


def read_gguf(file: Path) -> tuple[ModelSpec, dict[str, Tensor], str | None]:
    """Read a GGUF file of an architecture in ``_ARCHITECTURES``, dequantised.

    Returns:
        The model; its weights by our names in fp32; and the text of a tokenizer.json, or None
        if the file has none that can be rebuilt.

    Raises:
        ModelError: gguf is not installed, the file is damaged, or it holds something that the
            decoder does not compute.

    Cost: 4 bytes of memory per weight.
    """
    header, state, tokenizer_json = read_gguf_whole(file)
    return header.model, state, tokenizer_json


def read_gguf_whole(file: Path) -> tuple[GgufHeader, dict[str, Tensor], str | None]:
    """The header and, as ``read_gguf`` returns them, the weights and the tokenizer."""
    with _refusing_damage(file):
        return _read_whole(file, _open(file))


def _read_whole(file: Path, reader: Any) -> tuple[GgufHeader, dict[str, Tensor], str | None]:
    header = _header(file, reader)
    model = header.model
    from gguf.quants import dequantize

    tensors = {str(tensor.name): tensor for tensor in reader.tensors}
    state: dict[str, Tensor] = {}
    for name in weight_shapes(model):
        if (tensor := tensors.pop(_gguf_name(name), None)) is None:
            continue
        try:
            values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        except NotImplementedError:
            raise ModelError(
                f"{file}: {tensor.name} is quantised as {tensor.tensor_type.name}, which the gguf "
                "package cannot dequantise. Use a file with another quantisation."
            ) from None
        weight = torch.from_numpy(values)
        is_turned = header.architecture in _TURNS_NEIGHBOURS and _PERMUTED.fullmatch(name)
        state[name] = half_split(weight, model.head_width) if is_turned else weight
    if tensors:
        raise ModelError(
            f"{file} has weights that this decoder lacks: {', '.join(sorted(tensors)[:3])}."
        )
    check_weights(f"{file}", state, weight_shapes(model), described_by="its metadata")
    try:
        core = _tokenizer(file, reader)
    except ModelError:
        return header, state, None
    return header, state, core.to_str()


def gguf_tokenizer(file: Path) -> "tokenizers.Tokenizer":
    """Rebuild the BPE of a GGUF file.

    Raises:
        ModelError: the file is damaged, or has a tokenizer of another kind.
    """
    with _refusing_damage(file):
        return _tokenizer(file, _open(file))


@contextmanager
def _refusing_damage(file: Path) -> Iterator[None]:
    """What a damaged file makes the gguf package raise, as a ModelError."""
    try:
        yield
    except FileNotFoundError:
        raise ModelError(f"No such file: {file}") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ModelError(f"{file} is not a GGUF file, or is damaged ({reason(error)}).") from None


def _open(file: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ModelError(
            f'{file} needs the gguf package to be read. Install it: pip install "equipoise[gguf]".'
        ) from None

    class Reader(GGUFReader):
        """Reads through a plain array: numpy's memmap makes each slice of it ten times slower."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, np.asarray(value) if name == "data" else value)

    return Reader(file)


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if (layer := _LAYER.fullmatch(stem)) is None:
        return f"{_OUTER[stem]}.{kind}"
    return f"blk.{layer[1]}.{_INNER[layer[2]]}.{kind}"


def _field(reader: Any, key: str, default: Any = None) -> Any:
    field = reader.fields.get(key)
    return default if field is None else field.contents()


def _header(file: Path, reader: Any) -> GgufHeader:
    architecture = _field(reader, "general.architecture")
    if architecture not in _ARCHITECTURES:
        known = ", ".join(f'"{each}"' for each in _ARCHITECTURES)
        raise ModelError(
            f'{file} has architecture "{architecture}"; only {known} can be read. '
            "Convert the model's Hugging Face folder instead."
        )
    if (parts := _field(reader, "split.count", 1)) not in (0, 1):
        raise ModelError(
            f"{file} is one of {parts} parts of a model. Join them: llama-gguf-split --merge "
            f"{file} FILE.gguf"
        )
    prefix = f"{architecture}."

    def say(key: str, default: Any = None) -> Any:
        return _field(reader, f"{prefix}{key}", default)

    def size(key: str) -> int:
        value = say(key)
        if not isinstance(value, int) or value < 1:
            raise ModelError(
                f"{file}: {prefix}{key} is {value}, which is not a whole number above 0."
            )
        return value

    named = {key.removeprefix(prefix) for key in reader.fields if key.startswith(prefix)}
    if unknown := sorted(named - _KEYS):
        raise ModelError(
            f"{file}: {prefix}{unknown[0]} is {shown(say(unknown[0]))}, and this decoder has no "
            "such setting. Convert the model's Hugging Face folder instead."
        )
    shapes = {str(tensor.name): tensor.shape for tensor in reader.tensors}
    if "token_embd.weight" not in shapes:
        raise ModelError(f"{file} has no token_embd.weight, so it is not a language model.")
    hidden, heads = size("embedding_length"), size("attention.head_count")
    width = say("attention.key_length", hidden // heads)
    # name, the file's value, the only value that the decoder computes
    for name, value, only in (
        ("expert_count", say("expert_count", 0), 0),
        ("rope.scaling.type", say("rope.scaling.type", "none"), "none"),
        ("rope.dimension_count", say("rope.dimension_count", width), width),
        ("attention.value_length", say("attention.value_length", width), width),
        ("rope_freqs.weight", "there" if "rope_freqs.weight" in shapes else "absent", "absent"),
    ):
        if value != only:
            raise ModelError(
                f"{file}: {name} is {value}; this decoder computes only {only}. Convert the "
                "model's Hugging Face folder instead."
            )
    if (said_eps := say("attention.layer_norm_rms_epsilon")) is None:
        raise ModelError(
            f"{file}: no {prefix}attention.layer_norm_rms_epsilon; the file is damaged."
        )
    # Stored as fp32; the shortest decimal that reads back as it is the number that was meant.
    eps = float(str(np.float32(said_eps)))
    theta = float(str(np.float32(say("rope.freq_base", _ROPE_THETA))))
    model = ModelSpec(
        layers=size("block_count"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads
        if say("attention.head_count_kv") is None
        else size("attention.head_count_kv"),
        ffn=size("feed_forward_length"),
        vocab=int(shapes["token_embd.weight"][1]),  # GGUF names the fastest dim first
        head_width=width,
        tied="output.weight" not in shapes,
        rope_theta=theta,
        norm_eps=eps,
        **_ARCHITECTURES[architecture],
    )
    return GgufHeader(
        name=str(_field(reader, "general.name", file.stem)),
        architecture=architecture,
        model=model,
        context_tokens=say("context_length"),
        tensors=len(shapes),
        tensor_bytes=sum(int(tensor.n_bytes) for tensor in reader.tensors),
        quantisations=dict(Counter(tensor.tensor_type.name for tensor in reader.tensors)),
        tokenizer_config=_tokenizer_config(reader),
        generation_config=_generation_config(reader),
    )


def _tokenizer_config(reader: Any) -> dict[str, str]:
    settings: dict[str, str] = {}
    for kind, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = _field(reader, f"tokenizer.ggml.{key}_token_id")
        tokens = reader.fields.get("tokenizer.ggml.tokens")
        if number is not None and tokens is not None:
            settings[f"{kind}_token"] = tokens.contents(int(number))
    template = _field(reader, "tokenizer.chat_template")
    if template is not None:
        settings["chat_template"] = template
    return settings


def _generation_config(reader: Any) -> dict[str, Any]:
    ends = [_field(reader, f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    ids = list(dict.fromkeys(int(each) for each in ends if each is not None))
    begin = _field(reader, "tokenizer.ggml.bos_token_id")
    settings: dict[str, Any] = {} if begin is None else {"bos_token_id": int(begin)}
    return settings | ({"eos_token_id": ids[0] if len(ids) == 1 else ids} if ids else {})


def _tokenizer(file: Path, reader: Any) -> "tokenizers.Tokenizer":
    def say(key: str, default: Any = None) -> Any:
        return _field(reader, f"tokenizer.ggml.{key}", default)

    return rebuild_bpe(file, say)
