"""GGUF files written here: rows come back in order, and what is not computed is refused."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from equipoise.base.errors import ModelError
from equipoise.nn.hf.gguf import gguf_tokenizer, read_gguf, read_gguf_header
from equipoise.nn.hf.read import weight_shapes
from equipoise.spec.model.presets import ModelSpec
from support.hf.gguf import MODEL, TOKENS
from support.hf.gguf import write_gguf as write


def state_of(model: ModelSpec) -> dict[str, Tensor]:
    return {name: torch.randn(shape) for name, shape in weight_shapes(model).items()}


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(ModelError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_come_back_bitwise(tmp_path: Path, tied: bool) -> None:
    model = dataclasses.replace(MODEL, tied=tied)
    state = state_of(model)
    file = write(tmp_path / "a.gguf", state)
    read, weights, tokenizer_json = read_gguf(file)
    assert read == model
    assert all(torch.equal(weights[name], state[name]) for name in state)
    assert list(weights) == list(state)
    assert tokenizer_json == gguf_tokenizer(file).to_str()
    header = read_gguf_header(file)
    assert (header.name, header.model, header.context_tokens) == ("tiny", model, 64)
    assert header.quantisations == {"F32": len(state)}
    assert header.tensor_bytes == 4 * model.params
    assert header.tokenizer_config == {"eos_token": "<|end|>"}


def test_digits_stand_alone_where_the_file_says_so(tmp_path: Path) -> None:
    texts = {}
    for split in ("smollm", "gpt-2"):
        core = gguf_tokenizer(write(tmp_path / f"{split}.gguf", state_of(MODEL), split=split))
        texts[split] = core.encode("ab a  12<|end|>").tokens
        assert core.decode(core.encode("ab a  12").ids) == "ab a  12"
    assert texts["smollm"] == ["ab", "Ġa", "ĠĠ", "1", "2", "<|end|>"]
    assert texts["gpt-2"] == ["ab", "Ġa", "Ġ", "Ġ", "1", "2", "<|end|>"]


def test_whole_words_are_pieces_and_begin_with_a_token_where_llama_3_has_them(
    tmp_path: Path,
) -> None:
    def begin(writer: gguf.GGUFWriter) -> None:
        writer.add_bos_token_id(0)

    file = write(
        tmp_path / "a.gguf",
        state_of(MODEL),
        split="llama-bpe",
        tokens=("<|end|>", "a", "b", "1", "2", "Ġ", "ab", "Ġa", "112"),
        merges=("a b", "Ġ a"),
        change=begin,
    )
    core = gguf_tokenizer(file)
    # Digits are cut in threes; 112 is a piece without merges that would make it.
    assert core.encode("ab1121").tokens == ["<|end|>", "ab", "112", "1"]


@pytest.mark.parametrize(("kind", "split"), [("bert", "default"), ("gpt2", "tekken")])
def test_a_tokenizer_of_another_kind(tmp_path: Path, kind: str, split: str) -> None:
    file = write(tmp_path / "a.gguf", state_of(MODEL), tokenizer=kind, split=split)
    assert read_gguf(file)[2] is None
    assert refused(lambda: gguf_tokenizer(file)) == (
        f'{file}: a tokenizer with model "{kind}" and pre-tokenizer "{split}" cannot be rebuilt; '
        'only model "gpt2" with "smollm", "gpt-2", "qwen2", "llama-bpe", and model "llama", can. '
        "Supply the model's tokenizer.json."
    )


def test_pieces_without_scores(tmp_path: Path) -> None:
    file = write(tmp_path / "a.gguf", state_of(MODEL), tokenizer="llama")
    assert read_gguf(file)[2] is None
    assert refused(lambda: gguf_tokenizer(file)) == (
        f"{file}: its tokenizer cannot be rebuilt (it has 9 pieces and 0 scores). Supply the "
        "model's tokenizer.json."
    )


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (lambda writer: writer.add_expert_count(8), ("expert_count is 8", "0")),
        (
            lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR),
            ("rope.scaling.type is linear", "none"),
        ),
        (
            lambda writer: writer.add_rope_dimension_count(2),
            ("rope.dimension_count is 2", "4"),
        ),
        (
            lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(2, np.float32)),
            ("rope_freqs.weight is there", "absent"),
        ),
    ],
    ids=["experts", "scaling", "partial", "factors"],
)
def test_what_is_not_computed_is_refused(
    tmp_path: Path, change: Callable[[Any], object], refusal: tuple[str, str]
) -> None:
    file = write(tmp_path / "a.gguf", state_of(MODEL), change=change)
    assert refused(lambda: read_gguf(file)) == (
        f"{file}: {refusal[0]}; this decoder computes only {refusal[1]}. Convert the model's "
        "Hugging Face folder instead."
    )


def test_a_part_of_a_file_says_how_it_becomes_whole(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.gguf",
        state_of(MODEL),
        change=lambda writer: writer.add_uint16("split.count", 3),
    )
    assert refused(lambda: read_gguf(file)) == (
        f"{file} is one of 3 parts of a model. Join them: llama-gguf-split --merge {file} FILE.gguf"
    )


def test_weights_of_every_kind_that_can_be_written_come_back(tmp_path: Path) -> None:
    """Rows are put back in order behind dequantisation."""
    model = dataclasses.replace(MODEL, layers=1, hidden=256, ffn=256, head_width=64)
    state = state_of(model)
    for kind in ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"):
        type_ = gguf.GGMLQuantizationType[kind]
        file = write(tmp_path / f"{kind}.gguf", state, model=model, kind=type_)
        read, weights, _ = read_gguf(file)
        assert read == model
        kinds = read_gguf_header(file).quantisations
        assert kinds == {"F32": 3, kind: len(state) - 3}
        for name, weight in state.items():
            wanted = weight.numpy()
            if weight.dim() > 1:
                wanted = gguf.quants.dequantize(gguf.quants.quantize(wanted, type_), type_)
            assert torch.equal(weights[name], torch.from_numpy(wanted)), (kind, name)


def test_a_setting_that_is_unknown(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.gguf", state_of(MODEL), change=lambda writer: writer.add_sliding_window(64)
    )
    assert refused(lambda: read_gguf(file)) == (
        f"{file}: llama.attention.sliding_window is 64, and this decoder has no such setting. "
        "Convert the model's Hugging Face folder instead."
    )


def test_another_architecture(tmp_path: Path) -> None:
    file = write(tmp_path / "a.gguf", state_of(MODEL), architecture="gemma2")
    assert refused(lambda: read_gguf(file)) == (
        f'{file} has architecture "gemma2"; only "llama", "qwen2", "qwen3" can be read. Convert '
        "the model's Hugging Face folder instead."
    )
    file = write(tmp_path / "b.gguf", state_of(MODEL), architecture="qwen2")
    assert refused(lambda: read_gguf(file)) == (
        f"{file}: no layers.0.attention.query.bias, layers.0.attention.key.bias, "
        "layers.0.attention.value.bias and 3 more among the 21 weights; its metadata calls for 27."
    )


def test_missing_and_surplus_tensors(tmp_path: Path) -> None:
    state = state_of(MODEL)
    bias = np.zeros(16, np.float32)
    file = write(
        tmp_path / "a.gguf",
        state,
        change=lambda writer: writer.add_tensor("blk.0.attn_q.bias", bias),
    )
    assert refused(lambda: read_gguf(file)) == (
        f"{file} has weights that this decoder lacks: blk.0.attn_q.bias."
    )
    state.pop("norm.weight")
    file = write(tmp_path / "b.gguf", state)
    assert refused(lambda: read_gguf(file)) == (
        f"{file}: no norm.weight among the 20 weights; its metadata calls for 21."
    )


def test_a_token_that_is_not_text(tmp_path: Path) -> None:
    file = write(tmp_path / "a.gguf", state_of(MODEL))
    end = TOKENS[0].encode()
    file.write_bytes(file.read_bytes().replace(end, b"\x80" * len(end)))
    assert refused(lambda: read_gguf(file)) == (
        f"{file} is not a GGUF file, or is damaged (a text in it is not UTF-8)."
    )


def test_a_merge_of_a_token_that_there_is_not(tmp_path: Path) -> None:
    """Its weights are read all the same."""
    file = write(tmp_path / "a.gguf", state_of(MODEL))
    file.write_bytes(file.read_bytes().replace(b"a b", b"a z"))
    said = refused(lambda: gguf_tokenizer(file))
    assert said.startswith(f"{file}: its tokenizer cannot be rebuilt (")
    assert said.endswith("). Supply the model's tokenizer.json.")
    model, _, tokenizer_json = read_gguf(file)
    assert (model, tokenizer_json) == (MODEL, None)


def test_no_file_and_no_gguf(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    assert refused(lambda: read_gguf(file)) == f"No such file: {file}"
    file.write_bytes(b"hello, this is text, and long enough to be read")
    assert refused(lambda: read_gguf(file)) == (
        f"{file} is not a GGUF file, or is damaged (it does not begin like a GGUF file)."
    )


def test_every_cut_file_is_an_error(tmp_path: Path) -> None:
    data = write(tmp_path / "a.gguf", state_of(MODEL)).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in range(4, len(data), 97):
        cut.write_bytes(data[:length])
        assert refused(lambda: read_gguf(cut)).startswith(f"{cut}")


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    file = tmp_path / "a.gguf"
    assert refused(lambda: read_gguf(file)) == (
        f'{file} needs the gguf package to be read. Install it: pip install "equipoise[gguf]".'
    )


def test_its_template_and_ends_come_along(tmp_path: Path) -> None:
    def talk(writer: gguf.GGUFWriter) -> None:
        writer.add_chat_template("{{ messages }}")
        writer.add_bos_token_id(1)
        writer.add_add_bos_token(True)
        writer.add_eot_token_id(2)

    file = write(tmp_path / "a.gguf", state_of(MODEL), change=talk)
    header = read_gguf_header(file)
    assert header.tokenizer_config == {
        "bos_token": "a",
        "eos_token": "<|end|>",
        "chat_template": "{{ messages }}",
    }
    assert header.generation_config == {"bos_token_id": 1, "eos_token_id": [0, 2]}
    assert header.end_ids == [0, 2]
    core = gguf_tokenizer(file)
    assert core.encode("ab").ids == [1, 6]
    assert core.encode("ab", add_special_tokens=False).ids == [6]
    plain = write(tmp_path / "b.gguf", state_of(MODEL))
    assert read_gguf_header(plain).generation_config == {"eos_token_id": 0}
    assert read_gguf_header(plain).architecture == "llama"
    assert gguf_tokenizer(plain).encode("ab").ids == [6]
