"""Hugging Face folder, trained for no step, converted: every file and every bit comes back."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from equipoise.base.errors import CheckpointError
from equipoise.cli.main import main
from equipoise.comm.local import run_ranks
from equipoise.fault.drill.skewed import make_other_dtype
from equipoise.serve.generate import generate
from equipoise.serve.source import open_model
from equipoise.serve.theirs import write_theirs
from equipoise.spec.run.resolved import read_resolved
from support.hf.families import ENGINE_FAMILIES, FAMILIES, config_of, save_family
from support.hf.models import build_engine
from support.make_run import share_curve
from support.ranks import on_ranks

TEXT = "some text to train on, naïve words and more\n" * 40
TOKENS = torch.tensor([[5, 9, 77, 300, 2, 2, 41, 300, 19]])


def flags_of(folder: Path, home: Path) -> list[str]:
    """What a run from a folder is told."""
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
    return [f"--{name}={value}" for name, value in keys.items()]


def prepared(folder: Path, home: Path, *flags: str) -> Path:
    """A run from a folder, with the files that it keeps and no checkpoint."""
    argv = [*flags_of(folder, home), *flags, "--out", str(home / "run"), "--prepare", "--quiet"]
    assert main(["train", *argv]) == 0
    return home / "run"


def train_prepared(*runs: Path) -> None:
    """Train runs for no step, one after another on the same rank: their first weights are saved."""
    run_ranks(1, on_ranks.train_all, {run: read_resolved(run) for run in runs})


def begun(folder: Path, home: Path, *flags: str) -> Path:
    """The same run, with the checkpoint of its first weights."""
    run = prepared(folder, home, *flags)
    train_prepared(run)
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


ROUNDS = {
    **{family: (family, torch.bfloat16, "equipoise") for family in FAMILIES},
    **{
        f"{family} by engine": (family, torch.bfloat16, "transformers")
        for family in ENGINE_FAMILIES
    },
    "llama fp32": ("llama", torch.float32, "equipoise"),
    "llama fp16": ("llama", torch.float16, "equipoise"),
    "mixtral fp32": ("mixtral", torch.float32, "equipoise"),
    "mixtral by engine": ("mixtral", torch.bfloat16, "transformers"),
    "gpt2 fp32 by engine": ("gpt2", torch.float32, "transformers"),
}
"""Families, the dtype of their folders, and whose modules train them."""


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder and a run of each: half a minute, since each engine's family is tried out first."""
    home = tmp_path_factory.mktemp("rounds")
    for name, (family, dtype, engine) in ROUNDS.items():
        source = save_family(family, home / name / "hf", dtype=dtype)
        prepared(source, home / name, f"--model.engine={engine}")
    train_prepared(*(home / name / "run" for name in ROUNDS))
    return home


def load_eagerly(folder: Path) -> Any:
    """With its own dtype, and the attention that caps scores and has sinks."""
    model, facts = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(facts.values()), facts
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("name", ROUNDS)
def test_what_comes_back_is_whole(rounds: Path, name: str) -> None:
    source, run, out = (rounds / name / each for each in ("hf", "run", "out"))
    before = load_eagerly(source)
    files, weights = small_files(source), weights_of(source)
    gone = source.rename(rounds / name / "gone")
    assert main(["convert", str(run), str(out), "--quiet"]) == 0
    assert small_files(out) == files
    assert {each.name for each in out.iterdir()} == {each.name for each in gone.iterdir()}
    assert_same_bits(weights_of(out), weights)
    after = load_eagerly(out)
    assert after.dtype == ROUNDS[name][1]
    assert torch.equal(after(TOKENS).logits, before(TOKENS).logits)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    talk = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(talk, tokenize=False) == "<s><|user|>\nhi\n"
    assert after.generation_config.eos_token_id == [0, 1]
    if after.dtype == torch.float32:  # as the run computes
        ids = tokenizer("def ", return_tensors="pt").input_ids
        told = after.generate(ids, do_sample=False, max_new_tokens=9, pad_token_id=0)
        told = [each for each in told[0, ids.shape[1] :].tolist() if each > 1]
        assert list(generate(run, "def ", tokens=9).ids) == told


def converted(run: Path, out: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> Any:
    capsys.readouterr()
    assert main(["convert", str(run), str(out), "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


ENGINES = ("equipoise", "transformers")


@pytest.fixture(scope="module", params=ENGINES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run from a bf16 folder that is gone, by windows twice as long as its positions."""
    home = tmp_path_factory.mktemp("round")
    source = save_family("llama3-rope", home / "hf", dtype=torch.bfloat16)
    windows = ["--pack.context_tokens=256", "--pack.step_tokens=256"]
    kept = begun(source, home, *windows, f"--model.engine={request.param}")
    source.rename(home / "moved")
    return kept


def test_positions_are_raised_and_said(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = converted(run, tmp_path / "out", capsys)
    assert (said["dtype"], said["tokenizer"], said["chat_template"]) == ("bf16", True, True)
    assert said["remarks"] == [
        "max_position_embeddings and the tokenizer's model_max_length are raised from 128 to 256: "
        "the run trained with windows of 256 tokens."
    ]
    before, after = config_of(run.parent / "moved"), config_of(tmp_path / "out")
    assert after == before | {"max_position_embeddings": 256}
    theirs, ours = small_files(run.parent / "moved"), small_files(tmp_path / "out")
    assert {name for name in theirs if ours[name] != theirs[name]} == {
        "config.json",
        "tokenizer_config.json",
    }


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_another_dtype_is_written_and_said(
    run: Path, tmp_path: Path, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    step = run / "checkpoint" / "step-000000"
    assert converted(step, tmp_path / "out", capsys, "--dtype", dtype)["dtype"] == dtype
    name = {"fp32": "float32", "fp16": "float16"}[dtype]
    assert config_of(tmp_path / "out")["dtype"] == name
    theirs = weights_of(run.parent / "moved")
    expected = {key: weight.to(getattr(torch, name)) for key, weight in theirs.items()}
    assert_same_bits(weights_of(tmp_path / "out"), expected)


def test_a_kept_file_that_changed_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    template, table = copy / "hf" / "chat_template.jinja", copy / "hf" / "kept.json"
    for file, before, after in ((template, "{%", "{ %"), (table, "bfloat16", "float16")):
        whole = file.read_text()
        file.write_text(whole.replace(before, after, 1))
        assert file.read_text() != whole
        assert main(["convert", str(copy), str(tmp_path / "out"), "--quiet"]) == 2
        assert capsys.readouterr().err == (
            f"{file} has changed since the run began. Restore it from a copy of the run, or "
            f"delete {copy / 'hf'} to convert by the sizes alone.\n"
        )
        file.write_text(whole)


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_of_several_dtypes_keep_their_own(
    tmp_path: Path, engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_family("qwen3", tmp_path / "hf", dtype=torch.bfloat16)
    held = load_file(source / "model.safetensors")
    held = {name: each.float() if "norm" in name else each for name, each in held.items()}
    save_file(held, source / "model.safetensors", metadata={"format": "pt"})
    run = begun(source, tmp_path, f"--model.engine={engine}")
    said = converted(run, tmp_path / "out", capsys)
    assert said["dtype"] == "mixed"
    assert_same_bits(weights_of(tmp_path / "out"), held)


YARN = {"rope_type": "yarn", "rope_theta": 1e4}


@pytest.mark.parametrize(
    "given",
    [
        {"rope_parameters": {**YARN, "original_max_position_embeddings": 32, "factor": None}},
        {"rope_parameters": {**YARN, "factor": 4.0}},
        {
            "rope_scaling": {**YARN, "factor": 4.0},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ],
    ids=["no factor", "no original length", "the older spelling, which is the one that is read"],
)
def test_positions_that_rope_is_computed_from_stay(
    given: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_family("olmo2", tmp_path / "hf")
    (source / "config.json").write_text(json.dumps(config_of(source) | given))
    windows = ["--pack.context_tokens=256", "--pack.step_tokens=256"]
    run = begun(source, tmp_path, *windows, "--model.engine=transformers")
    assert converted(run, tmp_path / "out", capsys)["remarks"] == [
        "max_position_embeddings stays 128, because RoPE of type yarn is computed from it; the run "
        "trained with windows of 256 tokens."
    ]
    assert small_files(tmp_path / "out") == small_files(source)


def test_a_folder_without_weights_comes_back_with_random_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_family("olmo2", tmp_path / "hf")
    (source / "model.safetensors").unlink()
    run = begun(source, tmp_path, "--model.engine=transformers")
    assert converted(run, tmp_path / "out", capsys)["dtype"] == "fp32"
    assert small_files(tmp_path / "out") == small_files(source)
    load_eagerly(tmp_path / "out")


def test_masks_that_old_writers_stored_are_no_weights(tmp_path: Path) -> None:
    """As ``attention.bias`` of GPT-NeoX, of flags, beside weights in half precision."""
    theirs = build_engine("gpt2")
    kinds = dict.fromkeys(theirs.state_dict(), "float16") | {"transformer.h.0.attn.mask": "U8"}
    written = write_theirs(theirs, tmp_path / "out", {}, dtype=None, dtypes=kinds)
    assert written == {torch.float16}
    assert {each.dtype for each in weights_of(tmp_path / "out").values()} == {torch.float16}


def test_weights_of_an_engine_in_another_dtype_are_refused(rounds: Path, tmp_path: Path) -> None:
    """Its sums are right, and torch would convert its bits as whole numbers."""
    run = shutil.copytree(rounds / "gpt2 fp32 by engine" / "run", tmp_path / "run")
    checkpoint = run / "checkpoint" / "step-000000"
    name = make_other_dtype(checkpoint).split()[0].removeprefix("model.theirs.")
    with pytest.raises(CheckpointError) as caught:
        open_model(run)
    assert str(caught.value) == (
        f"{checkpoint} holds another model: its {name} is int32, and it is trained in float32. "
        "Restore a copy of it."
    )


def test_another_tokenizer_takes_the_place_of_the_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_family("llama", tmp_path / "hf")
    run = begun(source, tmp_path, "--data.tokenizer=train", "--data.vocab=300")
    said = converted(run, tmp_path / "out", capsys)
    assert said["remarks"] == [
        f"The run's tokenizer is not that of {source}, so it is written instead, with its end "
        "token <|end|> (0); the folder's special tokens and chat template are left out."
    ]
    assert (said["tokenizer"], said["chat_template"]) == (True, False)
    config = config_of(tmp_path / "out")
    ids = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
    assert config == config_of(source) | ids
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["temperature"]) == (0, 0.7)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.eos_token == "<|end|>"
    assert len(tokenizer) < len(transformers.AutoTokenizer.from_pretrained(source))


# Ranks start, find each other and save: half a minute of two cores.
def test_a_run_of_no_step_saves_what_it_began_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_family("qwen2", tmp_path / "hf", dtype=torch.bfloat16)
    run = prepared(source, tmp_path)
    assert main(["train", *flags_of(source, tmp_path), "--layout.dp=2", "--out", str(run)]) == 0
    assert converted(run, tmp_path / "out", capsys)["step"] == 0
    assert small_files(tmp_path / "out") == small_files(source)
    assert_same_bits(weights_of(tmp_path / "out"), weights_of(source))
    # It goes on from there as if it had never stopped.
    steps = ["--train.steps=2", "--train.warmup_steps=0", "--layout.dp=2"]
    losses = []
    for out in (run, share_curve(run, tmp_path / "other")):
        capsys.readouterr()
        argv = [*flags_of(source, tmp_path), *steps, "--out", str(out), "--json"]
        assert main(["train", *argv]) == 0
        losses.append(json.loads(capsys.readouterr().out)["loss"])
    assert losses[0] == losses[1]
