"""From a checkpoint of two ranks to a folder that transformers runs, and what inspect says."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from equipoise.base.errors import CheckpointError
from equipoise.checkpoint.export import read_checkpoint_weights
from equipoise.checkpoint.index import name_tensors, parse_index
from equipoise.checkpoint.manifest import read_manifest
from equipoise.cli.main import main
from equipoise.comm.local import run_ranks
from equipoise.data.cache.store import prepare
from equipoise.data.progress import SilentProgress
from equipoise.nn.decoder import Decoder, initialize
from equipoise.nn.hf.write import write_hf
from equipoise.spec.run.resolved import ResolvedFile, write_resolved
from equipoise.spec.run.spec import DataSpec, RunSpec
from support.ranks.first_weights import MODEL, save_steps


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    run_ranks(2, save_steps, str(folder / "checkpoint"))
    text = folder.parent / "some.txt"
    text.write_text("some text to train on, some text more")
    data = DataSpec(source="text", path=str(text), vocab=300, cache=str(folder.parent / "cache"))
    corpus = prepare(data, folder, progress=SilentProgress()).folder
    (folder.parent / "tokens").symlink_to(corpus)
    write_resolved(folder, ResolvedFile(RunSpec(), MODEL, {}, 2, str(corpus), ""))
    return folder


@pytest.fixture
def run(built: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(built, tmp_path / "run"))


def expected(scale: float) -> dict[str, torch.Tensor]:
    decoder = Decoder(MODEL)
    initialize(decoder, 2)
    return {name: scale * weight for name, weight in decoder.state_dict().items()}


def tear(folder: Path) -> str:
    file = sorted(folder.glob("*.bin"))[0]
    file.write_bytes(file.read_bytes()[:-1])
    size = file.stat().st_size
    lost = name_tensors(parse_index(folder), file.name, size, size + 1)
    return (
        f"{folder} is torn: {file.name} has {size:,} bytes, the manifest says {size + 1:,}; it "
        f"lacks {lost}."
    )


def answer(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    capsys.readouterr()
    main([*map(str, argv), "--json"])
    captured = capsys.readouterr()
    assert captured.err == ""
    told: dict[str, Any] = json.loads(captured.out)
    return told


@pytest.mark.parametrize(("step", "scale"), [(2, 1.0), (4, 2.0)])
def test_weights_come_out_bitwise(built: Path, step: int, scale: float) -> None:
    model, weights = read_checkpoint_weights(built / f"checkpoint/step-{step:06d}")
    assert model == MODEL
    assert weights.keys() == expected(scale).keys()
    assert all(torch.equal(weights[name], each) for name, each in expected(scale).items())
    assert not torch.distributed.is_initialized()


def test_a_torn_checkpoint_is_not_read(run: Path) -> None:
    folder = run / "checkpoint/step-000004"
    told = tear(folder)
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint_weights(folder)
    assert str(caught.value) == told


def test_a_manifest_of_another_model(built: Path) -> None:
    folder = built / "checkpoint/step-000004"
    manifest = read_manifest(folder)
    deeper = dataclasses.replace(manifest, model=manifest.model | {"layers": 3})
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint_weights(folder, deeper)
    assert str(caught.value) == (
        f"{folder} is torn: its model has layers.2.attention_norm.weight of shape [32], and the "
        "checkpoint does not have it."
    )
    newer = dataclasses.replace(manifest, model=manifest.model | {"memory_layers": 3})
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint_weights(folder, newer)
    assert str(caught.value) == (
        "The manifest of step 4 was written by equipoise 0, whose model this version cannot read "
        "(it does not know memory_layers). Use that version."
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_run_becomes_a_folder_that_transformers_runs(
    built: Path, tmp_path: Path, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "hf"
    assert main(["convert", str(built), str(folder), "--dtype", dtype]) == 0
    captured = capsys.readouterr()
    step = built / "checkpoint/step-000004"
    assert captured.out.startswith(f"Wrote {folder}: llama, 25.2k parameters in {dtype}, ")
    assert captured.out.endswith(f", with a tokenizer, from {step}.\n")
    oracle, told = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(told.values()), told
    tokens_T = torch.arange(90)
    decoder = Decoder(MODEL)
    decoder.load_state_dict(expected(2.0))
    if dtype == "bf16":
        decoder.to(torch.bfloat16).float()
    with torch.no_grad():
        theirs = oracle.float()(tokens_T[None]).logits[0]
        error = float((decoder(tokens_T, [90]) - theirs).abs().max())
    assert error <= 1e-5
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.decode(tokenizer("some  text 12").input_ids) == "some  text 12"
    config = transformers.AutoConfig.from_pretrained(folder)
    assert config.eos_token_id == tokenizer.eos_token_id
    assert config.max_position_embeddings == 512  # 8 times the 64 tokens that were scaled


def test_the_newest_whole_checkpoint_is_taken(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torn = tear(run / "checkpoint/step-000004")
    assert main(["convert", str(run), str(tmp_path / "hf")]) == 0
    captured = capsys.readouterr()
    assert torn in captured.err
    assert captured.out.endswith("from " + str(run / "checkpoint/step-000002") + ".\n")
    told = answer(capsys, "convert", run, tmp_path / "other")
    assert (told["step"], told["tokenizer"], told["params"]) == (2, True, MODEL.params)


def test_without_its_run_a_checkpoint_has_no_tokenizer(
    built: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "resolved.json").unlink()
    step = run / "checkpoint/step-000004"
    assert main(["convert", str(step), str(tmp_path / "hf")]) == 0
    captured = capsys.readouterr()
    assert (
        f"No tokenizer for {step}: its run's resolved.json or its token cache is missing or "
        "damaged. Give one with --tokenizer.\n"
    ) in captured.err
    assert not (tmp_path / "hf" / "tokenizer.json").exists()
    file = built.parent / "tokens" / "tokenizer.json"
    told = answer(capsys, "convert", step, tmp_path / "with", "--tokenizer", file)
    assert told["tokenizer"]
    assert (tmp_path / "with" / "tokenizer.json").read_bytes() == file.read_bytes()


def test_what_cannot_be_converted(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(source: Path, code: int) -> str:
        assert main(["convert", str(source), str(tmp_path / "new")]) == code
        captured = capsys.readouterr()
        assert captured.out == ""
        return captured.err

    assert main(["convert", str(built), str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"{tmp_path} already exists. Name a new folder, or delete it.\n"
    )
    assert told(tmp_path / "absent", 2) == (
        f"No such file or folder: {tmp_path / 'absent'}. Give a run, a checkpoint, or a .gguf "
        "file.\n"
    )
    assert told(tmp_path, 2) == (
        f"{tmp_path} is neither a run (it has no checkpoint/) nor a checkpoint (it has no "
        "manifest.json). Give one of them, or a .gguf file.\n"
    )
    text = tmp_path / "notes.txt"
    text.write_text("")
    assert told(text, 2) == (
        f"{text} is not a .gguf file. Give a run, a checkpoint, or a .gguf file.\n"
    )
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert told(folder, 2) == (
        f"{folder} is a Hugging Face folder already. A run starts from it with model.init = "
        f'"hf:{folder}".\n'
    )
    young = tmp_path / "young"
    (young / "checkpoint").mkdir(parents=True)
    assert (
        f"{young} has no checkpoint yet. Train it further; checkpoint.every_steps says how often "
        "one is written.\n"
    ) in told(young, 4)
    assert not (tmp_path / "new").exists()


def test_inspect_checkpoints(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = run / "checkpoint/step-000004"
    told = answer(capsys, "inspect", step)
    assert (told["kind"], told["state"], told["step"]) == ("checkpoint", "ok", 4)
    assert (told["ranks"], told["params"]) == (2, MODEL.params)
    torn = tear(step)
    told = answer(capsys, "inspect", run)
    assert told["kind"] == "run"
    assert [each["state"] for each in told["checkpoints"]] == [torn, "ok"]
    assert main(["inspect", str(run), "--quiet"]) == 4
    assert capsys.readouterr() == ("run\n", "")
    assert main(["inspect", str(step)]) == 4
    assert "torn" in capsys.readouterr().out
    assert main(["inspect", str(run / "checkpoint/step-000002")]) == 0


def test_inspect_the_rest(built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "hf"
    assert main(["convert", str(built), str(folder)]) == 0
    told = answer(capsys, "inspect", folder)
    assert (told["kind"], told["state"]) == ("Hugging Face folder", "ok")
    assert (told["params"], told["dtypes"]) == (MODEL.params, {"F32": 20})
    assert (told["tokenizer"], told["generation_config"]) == (True, True)
    assert (told["chat_template"], told["positions"]) == (False, 512)
    assert told["special_tokens"] == {"eos_token": "<|end|>"}
    assert len(told["end_ids"]) == 1
    # The same weights under another name, as folders of Mistral have them, are not read.
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    again = answer(capsys, "inspect", folder)
    assert (again["state"], again["files"], again["dtypes"]) == ("ok", 1, told["dtypes"])
    tied = tmp_path / "tied"
    model = dataclasses.replace(MODEL, tied=True)
    write_hf(tied, model, Decoder(model).state_dict())
    held = load_file(tied / "model.safetensors")
    held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()
    save_file(held, tied / "model.safetensors")
    told = answer(capsys, "inspect", tied)
    assert (told["state"], told["params"], told["tensors"]) == ("ok", model.params, len(held))
    (tied / "model.safetensors").unlink()
    assert answer(capsys, "inspect", tied)["state"] == (
        f"{tied} has neither model.safetensors nor model.safetensors.index.json. Save the model "
        "as safetensors."
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    state = answer(capsys, "inspect", folder)["state"]
    assert state.startswith("config.json calls for ")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert answer(capsys, "inspect", folder)["state"].startswith(
        "model.safetensors cannot be read ("
    )
    told = answer(capsys, "inspect", built.parent / "tokens" / "tokenizer.json")
    assert (told["kind"], told["end_token"]) == ("tokenizer", "<|end|>")
    assert main(["inspect", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"{tmp_path} is nothing that equipoise knows. Give a run, a checkpoint, a Hugging Face "
        "folder, a .gguf file, a token cache, or a tokenizer.json.\n"
    )


# Merged. ---------------------------------------------------------------------------------------


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()


@pytest.mark.parametrize(
    ("flags", "scale", "shares"),
    [
        (["--average", "{run}"], 1.5, [0.5, 0.5]),
        (["--interpolate", "{run}", "0.25"], 1.25, [0.75, 0.25]),
        (["--interpolate", "{run}", "1"], 2.0, [0.0, 1.0]),
    ],
)
def test_checkpoints_are_merged(
    built: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    scale: float,
    shares: list[float],
) -> None:
    one = built / "checkpoint" / "step-000002"  # the other one has twice its weights
    words = [word.format(run=built) for word in flags]
    told = answer(capsys, "convert", one, tmp_path / "merged", *words)
    assert told["merged"] == dict(zip([str(one), str(built)], shares, strict=True))
    assert told["step"] is None
    answer(capsys, "convert", one, tmp_path / "one")
    alone, merged = weights_in(tmp_path / "one"), weights_in(tmp_path / "merged")
    assert alone.keys() == merged.keys()
    for name, weight in alone.items():
        assert torch.equal(merged[name], scale * weight), name


def test_what_cannot_be_merged(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(code: int, *words: object) -> str:
        capsys.readouterr()
        argv = ["convert", built, tmp_path / "to", "--quiet", *words]
        assert main([*map(str, argv)]) == code
        assert not (tmp_path / "to").exists()
        return capsys.readouterr().err.strip()

    other = tmp_path / "other"
    assert refusal(2, "--interpolate", other, "1.5") == (
        "--interpolate: 1.5 is not a share. Give a number from 0 to 1."
    )
    assert refusal(2, "--average", built) == f"{built} is given twice. Give each model once."
    assert refusal(2, "--average", other) == (
        f"No such file or folder: {other}. Give a run, a checkpoint, a Hugging Face folder, or a "
        ".gguf file."
    )
    assert refusal(2, "--average", other, "--adapter") == (
        "--adapter writes adapters alone, which are not merged. Leave it out."
    )
    wider = dataclasses.replace(MODEL, ffn=MODEL.ffn * 2)
    decoder = Decoder(wider)
    initialize(decoder, 2)
    write_hf(other, wider, decoder.state_dict(), files={}, context_tokens=64)
    newest = built / "checkpoint" / "step-000004"
    assert refusal(4, "--average", other) == (
        f"{newest} and {other} are not one model: ffn {MODEL.ffn} and {wider.ffn}. Merge "
        "checkpoints of one model."
    )
