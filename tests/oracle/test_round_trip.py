"""Hugging Face folder, trained for no step, converted: every file and every bit comes back."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from equipoise.cli.main import main
from equipoise.comm.local import run_ranks
from support.hf_families import FAMILIES, save_family
from support.ranks.first_weights import save_first

TEXT = "some text to train on, naïve words and more\n" * 40
TOKENS = torch.tensor([[5, 9, 77, 300, 2, 2, 41, 300, 19]])


def prepared(folder: Path, home: Path, *flags: str) -> Path:
    """A run from a folder, with the files that it keeps and no checkpoint."""
    text = home / "text.txt"
    text.write_text(TEXT)
    keys = {
        "data.source": "text",
        "data.path": str(text),
        "data.tokenizer": str(folder / "tokenizer.json"),
        "data.cache": str(home / "cache"),
        "model.init": f"hf:{folder}",
        "pack.context_tokens": "64",
        "pack.step_tokens": "256",
        "train.steps": "0",
        "layout.dp": "1",
    }
    argv = [f"--{name}={value}" for name, value in keys.items()]
    assert main(["train", *argv, *flags, "--out", str(home / "run"), "--prepare", "--quiet"]) == 0
    return home / "run"


def begun(folder: Path, home: Path, *flags: str) -> Path:
    """The same run, with the checkpoint of its first weights."""
    run = prepared(folder, home, *flags)
    run_ranks(1, save_first, str(run))
    return run


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    held: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        held |= load_file(file)
    return held


def assert_same_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert ours[name].dtype == weight.dtype, name
        assert torch.equal(ours[name].view(torch.uint8), weight.view(torch.uint8)), name


def small_files(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if not path.name.startswith("model")
    }


def load(folder: Path) -> Any:
    model, facts = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(facts.values()), facts
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "dtype"),
    [(family, torch.bfloat16) for family in FAMILIES]
    + [("llama", torch.float32), ("llama", torch.float16), ("mixtral", torch.float32)],
)
def test_what_comes_back_is_whole(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    source = save_family(family, tmp_path / "hf", dtype=dtype)
    expected = load(source)(TOKENS).logits
    run = begun(source, tmp_path)
    files, weights = small_files(source), weights_of(source)
    shutil.rmtree(source)
    out = tmp_path / "out"
    assert main(["convert", str(run), str(out), "--quiet"]) == 0
    assert small_files(out) == files
    assert_same_bits(weights_of(out), weights)
    model = load(out)
    assert model.dtype == dtype
    assert torch.equal(model(TOKENS).logits, expected)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    talk = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(talk, tokenize=False) == "<s><|user|>\nhi\n"
    assert model.generation_config.eos_token_id == [0, 1]
