"""What clients may know of a model."""

import dataclasses
import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from equipoise.base.errors import CheckpointError, ModelError
from equipoise.checkpoint.index import Chunk, StoredTensor, write_index
from equipoise.checkpoint.manifest import FORMAT, Manifest
from equipoise.nn.hf.files import CONFIG, GENERATION, ModelFiles, as_json, tokenizer_files
from equipoise.nn.hf.read import weight_shapes
from equipoise.serve.http.served import fingerprint, model_name
from equipoise.serve.prompt import PromptReader
from equipoise.serve.source import open_model
from equipoise.spec.model.presets import ModelSpec
from support.chat.corpus import write_model
from support.checkpoints import replace
from support.checkpoints.sealed import describe_files, write_manifest
from support.serving.engine import END, byte_level

MODEL = ModelSpec(layers=1, hidden=16, heads=2, kv_heads=1, ffn=16, vocab=270, head_width=8)


def test_a_fingerprint_changes_with_weights_and_dtype(tmp_path: Path) -> None:
    write_model(tmp_path / "one", MODEL)
    trained = open_model(tmp_path / "one")
    known = fingerprint(trained, torch.float32)
    assert known == fingerprint(open_model(tmp_path / "one"), torch.float32)
    assert known != fingerprint(trained, torch.bfloat16)
    name = next(iter(trained.state))
    other = {**trained.state, name: trained.state[name] + 1e-3}
    assert known != fingerprint(dataclasses.replace(trained, state=other), torch.float32)


@pytest.mark.parametrize(
    ("path", "name"),
    [("runs/mine", "mine"), ("a.b/tiny.Q8_0.gguf", "tiny.Q8_0"), ("r/checkpoint/step-2", "r")],
)
def test_a_model_is_called_by_its_run_its_folder_or_its_file(
    tmp_path: Path, path: str, name: str
) -> None:
    place = tmp_path / path
    place.parent.mkdir(parents=True)
    if place.suffix == ".gguf":
        place.write_bytes(b"")
    else:
        place.mkdir()
    if "checkpoint" in path:
        (place / "manifest.json").write_text("{}")
    assert model_name(place) == name


def write_checkpoint(root: Path, step: int) -> Path:
    """A whole checkpoint, all of whose weights are the number of its step."""
    folder = root / f"step-{step:06d}"
    folder.mkdir(parents=True)
    index, begin = {}, 0
    for name, shape in weight_shapes(MODEL).items():
        size = 4 * math.prod(shape)
        chunk = Chunk((0,) * len(shape), shape, "shard-00000.bin", begin, size)
        index[f"model.{name}"] = StoredTensor("float32", shape, (chunk,))
        begin += size
    (folder / "shard-00000.bin").write_bytes(np.full(begin // 4, step, np.float32).tobytes())
    write_index(folder, index)
    files, model = describe_files(folder), dataclasses.asdict(MODEL)
    fields = (FORMAT, "0.1.0", step, 1024 * step, 1, model, "c" * 32, 0, 256, files)
    write_manifest(folder, Manifest(*fields))
    return folder


@contextmanager
def training(run: Path, *, replaced: int) -> Iterator[None]:
    """A process that replaces a run's checkpoint this many times, each while it is being read."""
    for step in range(1, replaced + 2):
        write_checkpoint(run / "waiting", step)
    root = run / "checkpoint"
    root.mkdir()
    command = [sys.executable, replace.__file__, run / "waiting", root, str(replaced)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"ready\n"
        try:
            yield
            assert trainer.wait(240) == 0  # all but the last were opened, and replaced
        finally:
            trainer.kill()
    assert [each.name for each in root.iterdir()] == [f"step-{replaced + 1:06d}"]


@pytest.mark.parametrize("replaced", [0, 1, 4])
def test_a_run_that_replaces_its_checkpoints_while_they_are_read_is_opened(
    replaced: int, tmp_path: Path
) -> None:
    with training(tmp_path / "run", replaced=replaced):
        opened = open_model(tmp_path / "run")
    assert opened.step == replaced + 1
    assert {float(each.unique()) for each in opened.state.values()} == {replaced + 1.0}


def test_a_run_that_replaces_its_checkpoints_too_fast_is_refused(tmp_path: Path) -> None:
    with training(tmp_path / "run", replaced=5), pytest.raises(CheckpointError) as told:
        open_model(tmp_path / "run")
    assert str(told.value) == (
        f"{tmp_path / 'run'} replaces its checkpoints before they are read. Wait until it is "
        "trained, or let it keep more (checkpoint.keep)."
    )


def test_a_torn_checkpoint_that_nobody_replaces_is_not_waited_for(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "run" / "checkpoint", 1)
    (folder / "shard-00000.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"The only checkpoint in .* is not whole"):
        open_model(tmp_path / "run")


def test_an_end_that_is_not_in_the_vocabulary_ends_nothing() -> None:
    ends = as_json({"eos_token_id": [5, -1, 270, 10**9]})
    contents = {**tokenizer_files(byte_level().to_str().encode(), {}), GENERATION: ends}
    assert PromptReader(ModelFiles(contents, "small"), MODEL).end_ids == {5}


def test_a_tokenizers_end_counts_where_nobody_says_how_the_model_generates() -> None:
    core = byte_level()
    end, name = END, core.id_to_token(END)
    tokenizer = tokenizer_files(core.to_str().encode(), {"eos_token": name})
    for said, ends in (
        ({}, {end}),
        ({CONFIG: as_json({"eos_token_id": 5})}, {5, end}),
        ({GENERATION: as_json({"eos_token_id": [5, 6]})}, {5, 6}),
    ):
        assert PromptReader(ModelFiles({**tokenizer, **said}, "small"), MODEL).end_ids == ends


def test_a_text_without_tokens_begins_with_one_that_the_model_has() -> None:
    for first, begun in ((7, [7]), (-1, [5]), (10**9, [5]), (True, [5])):
        settings = as_json({"bos_token_id": first, "eos_token_id": 5})
        contents = {**tokenizer_files(byte_level().to_str().encode(), {}), GENERATION: settings}
        assert PromptReader(ModelFiles(contents, "small"), MODEL).encode("") == begun


def test_a_model_without_a_tokenizer_says_how_it_gets_one() -> None:
    for contents, fix in (
        (
            {CONFIG: as_json({})},
            "Write the model's there: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...) does.",
        ),
        (
            {},
            "Write a folder with both: equipoise convert a.gguf FOLDER --tokenizer tokenizer.json",
        ),
    ):
        with pytest.raises(ModelError) as told:
            PromptReader(ModelFiles(contents, "a.gguf"), MODEL)
        assert str(told.value) == (
            f"a.gguf has no tokenizer.json, which turns text into tokens. {fix}"
        )
