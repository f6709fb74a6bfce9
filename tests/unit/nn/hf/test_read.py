"""Hugging Face folders: the round trip is bitwise, and nothing is skipped in silence."""

import dataclasses
import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from equipoise.base.errors import ModelError
from equipoise.nn.decoder import Decoder, initialize
from equipoise.nn.hf.read import load_hf, read_hf, weight_shapes
from equipoise.nn.hf.write import write_hf
from equipoise.spec.model.presets import ModelSpec, RopeScaling

MODEL = ModelSpec(layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=31, head_width=4)
MODELS = {
    "llama": MODEL,
    "tied": dataclasses.replace(MODEL, tied=True),
    "scaled": dataclasses.replace(MODEL, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64)),
    "qwen2": dataclasses.replace(MODEL, qkv_bias=True, norm_eps=1e-6),
    "qwen3": dataclasses.replace(MODEL, qk_norm=True, head_width=8),
}
WEIGHTS = "model.safetensors"
QUERY = "model.layers.1.self_attn.q_proj.weight"


def state_of(model: ModelSpec) -> dict[str, Tensor]:
    return {name: torch.randn(shape) for name, shape in weight_shapes(model).items()}


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(ModelError) as caught:
        call()
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "hf"
    write_hf(path, MODEL, state_of(MODEL))
    return path


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    held = load_file(folder / WEIGHTS)
    edit(held)
    save_file(held, folder / WEIGHTS)


@pytest.mark.parametrize("max_shard_bytes", [1, 4000, 1 << 30])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_round_trip_is_bitwise(tmp_path: Path, model: ModelSpec, max_shard_bytes: int) -> None:
    state = state_of(model)
    write_hf(tmp_path / "hf", model, state, max_shard_bytes=max_shard_bytes)
    read, weights = read_hf(tmp_path / "hf")
    assert read == model
    assert list(weights) == list(state)
    assert all(torch.equal(weights[name], state[name]) for name in state)
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    if max_shard_bytes == 1:
        assert len(files) == len(state)
        assert files[0] == f"model-00001-of-{len(state):05d}.safetensors"
    if max_shard_bytes == 1 << 30:
        assert files == [WEIGHTS]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtype_is_the_files_and_a_decoder_keeps_its_own(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {name: weight.to(dtype) for name, weight in state_of(MODEL).items()}
    write_hf(tmp_path / "hf", MODEL, state)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == str(dtype).removeprefix("torch.")
    assert {weight.dtype for weight in read_hf(tmp_path / "hf")[1].values()} == {dtype}
    decoder = Decoder(MODEL)
    load_hf(decoder, tmp_path / "hf")
    assert all(
        torch.equal(weight, state[name].float()) for name, weight in decoder.state_dict().items()
    )


def test_a_decoder_of_other_sizes_is_refused(folder: Path) -> None:
    decoder = Decoder(dataclasses.replace(MODEL, vocab=40, rope_theta=5e5))
    assert refused(lambda: load_hf(decoder, folder)) == (
        f"{folder} holds another model: vocab 31 (here: 40), rope_theta 10000.0 (here: 500000.0). "
        "Leave these sizes out of [model] to take them from the folder."
    )


def test_a_missing_weight_is_named(folder: Path) -> None:
    change(folder, lambda held: held.pop(QUERY))
    assert refused(lambda: read_hf(folder)) == (
        f"{folder}: no {QUERY} among the 20 weights; config.json calls for 21."
    )


def test_many_missing_weights_are_counted(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    layer = "model.layers.2"
    assert refused(lambda: read_hf(folder)) == (
        f"{folder}: no {layer}.input_layernorm.weight, {layer}.self_attn.q_proj.weight, "
        f"{layer}.self_attn.k_proj.weight and 6 more among the 21 weights; config.json calls "
        "for 30."
    )


def test_a_weight_left_over_is_named(folder: Path) -> None:
    bias = "model.layers.0.self_attn.o_proj.bias"
    change(folder, lambda held: held.update({bias: torch.zeros(16)}))
    assert refused(lambda: read_hf(folder)) == (
        f"{folder}: {bias} left over; config.json calls for 21 weights, and this decoder has no "
        "others."
    )


def test_another_shape_is_named(folder: Path) -> None:
    change(folder, lambda held: held.update({QUERY: torch.zeros(8, 16)}))
    assert refused(lambda: read_hf(folder)) == (
        f"{folder}: {QUERY} has shape [8, 16], and config.json calls for [16, 16]."
    )


def test_quantised_weights_are_refused(folder: Path) -> None:
    change(folder, lambda held: held.update({QUERY: torch.zeros(16, 16, dtype=torch.int8)}))
    assert refused(lambda: read_hf(folder)) == (
        f"{folder}: {QUERY} has dtype int8. Only unquantised float weights can be read."
    )


def test_computed_tables_of_old_writers_are_no_weights(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change(folder, lambda held: held.update({name: torch.zeros(2)}))
    assert read_hf(folder)[0] == MODEL


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path: Path) -> None:
    model, folder = MODELS["tied"], tmp_path / "hf"
    state = state_of(model)
    write_hf(folder, model, state)
    change(folder, lambda held: held.update({"lm_head.weight": state["embed.weight"].clone()}))
    assert read_hf(folder)[0] == model
    change(folder, lambda held: held["lm_head.weight"].zero_())
    assert refused(lambda: read_hf(folder)) == (
        f"{folder}: config.json ties the head to the embedding, and lm_head.weight differs from "
        "model.embed_tokens.weight. Set tie_word_embeddings to false to keep it."
    )


def test_no_config(tmp_path: Path) -> None:
    assert refused(lambda: read_hf(tmp_path)) == (
        f"{tmp_path} is not a Hugging Face folder: its config.json cannot be read (no such file or "
        "directory)."
    )


def test_no_safetensors(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    assert refused(lambda: read_hf(folder)) == (
        f"{folder} has neither model.safetensors nor model.safetensors.index.json. It has "
        "pytorch_model.bin, which may run code when it is read. Save the model as safetensors."
    )


def test_a_cut_file(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:-10])
    assert refused(lambda: read_hf(folder)).startswith(f"{folder / WEIGHTS} cannot be read: ")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    path = tmp_path / "sharded"
    write_hf(path, MODEL, state_of(MODEL), max_shard_bytes=4000)
    return path


def test_a_missing_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    assert refused(lambda: read_hf(sharded)).startswith(f"{shard} cannot be read: ")


def test_a_shard_that_is_a_pipe(sharded: Path) -> None:
    shard = next(sharded.glob("*.safetensors"))
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(ModelError, match="a pipe, a socket or a device, not a file"):
        read_hf(sharded)


def test_a_shard_without_what_the_index_says(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    held = load_file(shard)
    name = sorted(held)[0]
    held.pop(name)
    save_file(held, shard)
    assert refused(lambda: read_hf(sharded)) == (
        f"{shard} lacks {name}, which model.safetensors.index.json says it holds. Download it "
        "again."
    )


def test_a_weight_in_two_shards_is_refused(sharded: Path) -> None:
    """Which of them is read depends on the order of files."""
    first, second, *_ = sorted(sharded.glob("*.safetensors"))
    held = load_file(first)
    name = sorted(held)[0]
    save_file(load_file(second) | {name: held[name] + 1}, second)
    assert refused(lambda: read_hf(sharded)) == (
        f"{second} holds {name}, which another file of model.safetensors.index.json holds too. "
        "Download the folder again, or delete the files that are not of this model."
    )


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {"a": 1}}'])
def test_a_damaged_index(sharded: Path, text: str) -> None:
    index = sharded / "model.safetensors.index.json"
    index.write_text(text)
    assert refused(lambda: read_hf(sharded)) == (
        f"{index} is damaged: it has no readable weight_map."
    )


def test_an_index_cannot_lead_out_of_its_folder(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    told: dict[str, Any] = json.loads(index.read_text())
    outside = sharded.parent / "model-00001-of-00001.safetensors"
    save_file(load_file(sorted(sharded.glob("*.safetensors"))[0]), outside)
    told["weight_map"] = dict.fromkeys(told["weight_map"], f"../{outside.name}")
    index.write_text(json.dumps(told))
    message = refused(lambda: read_hf(sharded))
    assert message.startswith(f"{sharded / outside.name} cannot be read: ")


def test_an_existing_folder_is_left_alone(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert refused(lambda: write_hf(folder, MODEL, state_of(MODEL))) == (
        f"{folder} already exists. Name a new folder, or delete it."
    )
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("most_bytes", "reason"),
    [
        (100, "File too large"),
        (2000, "Error while serializing: I/O error: File too large (os error 27)"),
    ],
)
def test_a_write_that_fails_leaves_nothing(tmp_path: Path, most_bytes: int, reason: str) -> None:
    """Of config.json, which Python writes, and of the weights, which safetensors does."""
    folder = tmp_path / "hf"
    with files_of_at_most(most_bytes):
        said = refused(lambda: write_hf(folder, MODEL, state_of(MODEL)))
    assert said == (
        f"{folder} could not be written ({reason}). Free some space or choose another folder."
    )
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_is_not_the_models_is_not_written(tmp_path: Path) -> None:
    state = state_of(MODEL)
    state.pop("head.weight")
    assert refused(lambda: write_hf(tmp_path / "hf", MODEL, state)) == (
        "The state: no head.weight among the 20 weights; the model calls for 21."
    )
    mixed = state_of(MODEL)
    mixed["norm.weight"] = mixed["norm.weight"].bfloat16()
    assert refused(lambda: write_hf(tmp_path / "hf", MODEL, mixed)) == (
        "The weights have dtypes bfloat16 and float32. Convert them to one dtype."
    )
    assert list(tmp_path.iterdir()) == []


def test_ids_of_special_tokens_are_those_that_are_named(tmp_path: Path) -> None:
    """A vocabulary may have the word "None"; the first token may begin texts."""
    words = tokenizers.models.WordLevel({"<s>": 0, "None": 1, "<end>": 2}, unk_token="None")
    tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    for named, begin in (({}, None), ({"bos_token": {"content": "<s>", "lstrip": False}}, 0)):
        out = tmp_path / f"hf{begin}"
        write_hf(
            out,
            MODEL,
            state_of(MODEL),
            tokenizer_file=tmp_path / "tokenizer.json",
            tokenizer_config={"eos_token": "<end>", **named},
        )
        config = json.loads((out / "config.json").read_text())
        ids = {"bos_token_id": begin, "eos_token_id": 2, "pad_token_id": None}
        assert {name: config[name] for name in ids} == ids
        generation = json.loads((out / "generation_config.json").read_text())
        del ids["pad_token_id"]
        assert generation == {name: each for name, each in ids.items() if each is not None}


def test_a_broken_tokenizer_is_not_written(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    message = refused(
        lambda: write_hf(tmp_path / "hf", MODEL, state_of(MODEL), tokenizer_file=file)
    )
    assert message.startswith(f"{file} is not a tokenizer.json: ")
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_weights_of_an_initialized_decoder_are_what_is_written(tmp_path: Path) -> None:
    decoder = Decoder(MODEL)
    initialize(decoder, 3)
    write_hf(tmp_path / "hf", MODEL, decoder.state_dict())
    again = Decoder(MODEL)
    load_hf(again, tmp_path / "hf")
    tokens_T = torch.arange(12)
    assert torch.equal(decoder(tokens_T, [5, 7]), again(tokens_T, [5, 7]))
