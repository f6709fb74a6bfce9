"""run.toml and flags: what is read, where it came from, and the whole text of every fault."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from equipoise.base.errors import SpecError
from equipoise.spec.model.hf_config import hf_config
from equipoise.spec.model.presets import PRESETS, preset
from equipoise.spec.run.load import nearest_key, read_run
from equipoise.spec.run.spec import RunSpec

PACK = RunSpec().pack


def write(folder: Path, text: str, name: str = "run.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def faults(path: Path | None, *overrides: tuple[str, str]) -> str:
    with pytest.raises(SpecError) as caught:
        read_run(path, overrides)
    return str(caught.value)


def test_without_a_file_everything_is_a_default() -> None:
    run = read_run(None)
    assert run.spec == RunSpec()
    name = RunSpec().model.preset
    assert run.model == preset(name)
    assert run.base == Path.cwd()
    assert run.origins["train.steps"] == "default"
    assert run.origins["model.layers"] == f"preset {name}"
    assert run.origins["model.vocab"] == "data.vocab"


def test_values_know_where_they_come_from(tmp_path: Path) -> None:
    write(tmp_path, "[train]\nsteps = 7\nlr = 1\nwarmup_steps = 2\n", "base.toml")
    path = write(tmp_path, 'extends = "base.toml"\nname = "a"\n\ntrain.lr = 0.5\n')
    run = read_run(path, [("train.steps", "70"), ("name", "7"), ("layout.dp", "2")])
    assert (run.spec.name, run.spec.train.steps, run.spec.train.lr) == ("7", 70, 0.5)
    assert (run.spec.train.warmup_steps, run.spec.layout.dp) == (2, 2)
    assert run.base == tmp_path
    assert {name: run.origins[name] for name in ("name", "train.steps", "train.lr")} == {
        "name": "--name",
        "train.steps": "--train.steps",
        "train.lr": "run.toml:4",
    }
    assert run.origins["train.warmup_steps"] == "base.toml:4"
    assert run.origins["train.seed"] == "default"


def test_the_digest_names_values_and_not_their_origins(tmp_path: Path) -> None:
    path = write(tmp_path, "[train]\nsteps = 50\nlr = 1\n")
    flags = [("train.steps", "50"), ("train.lr", "1.0")]
    assert read_run(path).digest == read_run(None, flags).digest
    assert read_run(path).digest != read_run(None).digest


def test_flags_take_toml_values_and_text_stays_text() -> None:
    run = read_run(
        None,
        [
            ("data.field", "3"),
            ("layout.pin", "true"),
            ("layout.dp", "cores"),
            ("train.lr", "2"),
            ("pack.policy", "in-order"),
            ("train.steps", "20"),
            ("train.steps", "30"),
        ],
    )
    assert (run.spec.data.field, run.spec.layout.pin, run.spec.layout.dp) == ("3", True, "cores")
    assert (run.spec.train.lr, run.spec.pack.policy) == (2.0, "in-order")
    assert run.spec.train.steps == 30


def test_no_environment_variable_changes_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    before = read_run(None)
    for name in ("TRAIN_STEPS", "EQUIPOISE_TRAIN_STEPS", "train__steps", "NAME", "name"):
        monkeypatch.setitem(os.environ, name, "5")
    assert read_run(None) == before


def test_every_fault_is_told_at_once_in_the_order_of_the_files(tmp_path: Path) -> None:
    write(tmp_path, "[checkpoint]\nkeep = 0\n", "base.toml")
    path = write(
        tmp_path,
        'extends = "base.toml"\n'
        "[train]\n"
        'precision = "fp33"\n'
        "steps = -1\n"
        "warmup_steps = 5000\n"
        "[pack]\n"
        "step_tokens = 5000\n"
        "context_tokens = 4096\n"
        "[layout]\n"
        "cpp = 2\n",
    )
    assert faults(path, ("train.lr", "fast"), ("train.step", "3")) == (
        'run.toml:3  train.precision: "fp33" is not one of "fp32", "bf16", "fp8". '
        'Nearest: "fp32".\n'
        "run.toml:4  train.steps: -1 is too small; it must be at least 0.\n"
        "run.toml:7  pack.step_tokens: 5000 is not a multiple of pack.context_tokens = "
        "4096 (run.toml:8). Nearest: 4096 or 8192.\n"
        "run.toml:10  layout.cpp: no such key. Nearest: layout.cp\n"
        "base.toml:2  checkpoint.keep: 0 is too small; it must be at least 1.\n"
        '--train.lr: needs a number, got "fast" (text).\n'
        "--train.step: no such key. Nearest: --train.steps"
    )


ONE_KEY: list[tuple[str, str]] = [
    ("[layout]\ndpp = 1", "run.toml:2  layout.dpp: no such key. Nearest: layout.dp"),
    ("steps = 1", "run.toml:1  steps: no such key. Nearest: train.steps"),
    ("[trian]\nsteps = 1", "run.toml:1  trian: no such key. Nearest: train"),
    ('"train.steps" = 1', 'run.toml:1  "train.steps": no such key. Nearest: train.steps'),
    (
        "[train]\nmax_tokens = 1",
        "run.toml:2  train.max_tokens: no such key. Nearest: pack.max_tokens",
    ),
    ("train = 3", "run.toml:1  train: needs a table, got 3 (a whole number)."),
    ("[[train]]\nsteps = 3", "run.toml:1  train: needs a table, got a list."),
    ('train.steps = "ten"', 'run.toml:1  train.steps: needs a whole number, got "ten" (text).'),
    ("train.steps = 1.0", "run.toml:1  train.steps: needs a whole number, got 1.0 (a number)."),
    (
        "train.steps = true",
        "run.toml:1  train.steps: needs a whole number, got true (true or false).",
    ),
    ("train.steps = [1]", "run.toml:1  train.steps: needs a whole number, got a list."),
    ("[train.steps]\nx = 1", "run.toml:1  train.steps: needs a whole number, got a table."),
    (
        "train.lr = 2026-08-01",
        "run.toml:1  train.lr: needs a number, got 2026-08-01 (a date or a time).",
    ),
    ("train.lr = nan", "run.toml:1  train.lr: nan is not a finite number."),
    ("train.lr = 0", "run.toml:1  train.lr: 0 is too small; it must be more than 0."),
    ("train.beta1 = 1", "run.toml:1  train.beta1: 1 is too large; it must be less than 1."),
    (
        "checkpoint.rank_mtbf_hours = 1e306",
        "run.toml:1  checkpoint.rank_mtbf_hours: 1e+306 is too large; it must be at most "
        "1000000000.",
    ),
    (
        "train.final_lr_ratio = 1.5",
        "run.toml:1  train.final_lr_ratio: 1.5 is too large; it must be at most 1.",
    ),
    ("name = 3", "run.toml:1  name: needs text, got 3 (a whole number)."),
    (
        'name = "a run"',
        'run.toml:1  name: "a run" is not a name. Use letters, digits, ".", "_" and "-", '
        "and begin with a letter or a digit.",
    ),
    ("layout.pin = 1", "run.toml:1  layout.pin: needs true or false, got 1 (a whole number)."),
    ("layout.zero = 4", "run.toml:1  layout.zero: 4 is not one of 0, 1, 2, 3."),
    ("layout.zero = true", "run.toml:1  layout.zero: true is not one of 0, 1, 2, 3."),
    ("layout.zero = 1.0", "run.toml:1  layout.zero: 1.0 is not one of 0, 1, 2, 3."),
    ('layout.zero = "1"', 'run.toml:1  layout.zero: "1" is not one of 0, 1, 2, 3.'),
    ("layout.zero = [1]", "run.toml:1  layout.zero: needs one of 0, 1, 2, 3, got a list."),
    (
        'layout.dp = "core"',
        'run.toml:1  layout.dp: needs a whole number or "cores", got "core" (text). '
        'Nearest: "cores".',
    ),
    ("layout.dp = 0", "run.toml:1  layout.dp: 0 is too small; it must be at least 1."),
    ("layout.cp = 0", "run.toml:1  layout.cp: 0 is too small; it must be at least 1."),
    (
        "checkpoint.every_steps = 0",
        "run.toml:1  checkpoint.every_steps: 0 is too small; it must be at least 1.",
    ),
    (
        'checkpoint.every_steps = "often"',
        'run.toml:1  checkpoint.every_steps: needs a whole number or "auto", got "often" (text). '
        'Nearest: "auto".',
    ),
    (
        "checkpoint.rank_mtbf_hours = 0",
        "run.toml:1  checkpoint.rank_mtbf_hours: 0 is too small; it must be more than 0.",
    ),
    (
        'layout.strategy = "rings"',
        'run.toml:1  layout.strategy: "rings" is not one of "needed-kv", "all-gather", "ring", '
        '"double-ring", "pass-q", "token-ring", "gather-q", "ulysses", "usp". Nearest: "ring".',
    ),
    (
        'layout.sharding = "head-tails"',
        'run.toml:1  layout.sharding: "head-tails" is not one of "mixed", "head-tail-document", '
        '"head-tail", "by-work", "contiguous", "hierarchical", "auto". Nearest: "head-tail".',
    ),
    ("extends = 3", "run.toml:1  extends: needs text, got 3 (a whole number)."),
    (
        'extends = "no.toml"',
        'run.toml:1  extends: cannot read "no.toml": no such file or directory.',
    ),
]


@pytest.mark.parametrize(("text", "message"), ONE_KEY)
def test_one_wrong_key(tmp_path: Path, text: str, message: str) -> None:
    assert faults(write(tmp_path, text)) == message


BETWEEN_KEYS: list[tuple[str, str]] = [
    (
        "checkpoint.every_steps = 9\ncheckpoint.rank_mtbf_hours = 5",
        "run.toml:2  checkpoint.rank_mtbf_hours: 5 is given, but checkpoint.every_steps = 9 "
        '(run.toml:1) does not follow from it. Set checkpoint.every_steps = "auto", or remove it.',
    ),
    (
        "train.steps = 50\ntrain.warmup_steps = 60",
        "run.toml:2  train.warmup_steps: 60 is more than train.steps = 50 (run.toml:1). "
        "Give at most 50.",
    ),
    (
        'train.steps = 50\ntrain.decay_steps = 45\ntrain.schedule = "wsd"',
        "run.toml:2  train.decay_steps: 45 and train.warmup_steps = 10 (default) are more than "
        "train.steps = 50 (run.toml:1). Give at most 40.",
    ),
    (
        "pack.step_tokens = 10000\npack.context_tokens = 4096",
        "run.toml:1  pack.step_tokens: 10000 is not a multiple of pack.context_tokens = "
        "4096 (run.toml:2). Nearest: 8192 or 12288.",
    ),
    (
        "pack.step_tokens = 1000",
        "run.toml:1  pack.step_tokens: 1000 is not a multiple of pack.context_tokens = "
        f"{PACK.context_tokens} (default). Nearest: {PACK.context_tokens}.",
    ),
    (
        "pack.context_tokens = 3000",
        f"run.toml:1  pack.context_tokens: pack.step_tokens = {PACK.step_tokens} (default) is not "
        f"a multiple of 3000. Set pack.step_tokens to {PACK.step_tokens // 3000 * 3000} or "
        f"{PACK.step_tokens // 3000 * 3000 + 3000}.",
    ),
    (
        "layout.ranks_per_node = 3\nlayout.context = 4",
        "run.toml:1  layout.ranks_per_node: 3 does not divide layout.cp = 4 (run.toml:2). "
        "Nearest: 2.",
    ),
    (
        "layout.skip = 0.5",
        "run.toml:1  layout.skip: 0.5 needs a pipeline, but layout.pp = 1 (default). Set layout.pp "
        "to 2 or more.",
    ),
    (
        "layout.virtual = 2",
        "run.toml:1  layout.virtual: 2 needs a pipeline, but layout.pp = 1 (default). Set "
        "layout.pp to 2 or more.",
    ),
    (
        "layout.skip = 0.5\nlayout.pipeline = 4",
        'run.toml:1  layout.skip: 0.5 leaves out stages, but layout.schedule = "1f1b" (default) '
        'runs all of them. Set layout.schedule to "skip-partial" or "skip-reordered", which train '
        "another model, or layout.skip to 0.",
    ),
    (
        'layout.schedule = "skip-partial"\nlayout.pipeline = 4',
        'run.toml:1  layout.schedule: "skip-partial" leaves out stages and so trains another '
        "model, but layout.skip = 0.0 (default) leaves out none. Set layout.skip to the share of "
        "stages that each micro-batch leaves out.",
    ),
    (
        "layout.ranks_per_node = 2",
        "run.toml:1  layout.ranks_per_node: 2 does not divide layout.cp = 1 (default). Nearest: 1.",
    ),
    (
        "pack.max_tokens = 1000",
        f"run.toml:1  pack.max_tokens: 1000 is fewer than pack.context_tokens = "
        f"{PACK.context_tokens} (default): a whole window must fit. "
        f"Give at least {PACK.context_tokens}.",
    ),
    (
        'data.source = "jsonl"',
        'run.toml:1  data.source: "jsonl" reads data.path, which is empty. '
        "Set data.path to a file or a folder.",
    ),
    (
        'data.path = "a.txt"',
        'run.toml:1  data.path: "a.txt" is given, but data.source = "python-stdlib" (default) '
        "reads no path. Remove it, or set data.source.",
    ),
    (
        'model.preset = "llama3-8"',
        'run.toml:1  model.preset: "llama3-8" is not a preset. Nearest: "llama3-8b". '
        f"All: {', '.join(PRESETS)}.",
    ),
    (
        'train.recompute = "mla_up_proj+mlp"',
        'run.toml:1  train.recompute: "mla_up_proj+mlp" names modules of a layer, and train '
        "recomputes a layer, its attention core, or all but that core. Give one of "
        '"none", "attention", "selective", "every-2", "every-3", "every-4", "full".',
    ),
    (
        'model.init = "zeros"',
        'run.toml:1  model.init: "zeros" is not one of "random", "hf:DIR".',
    ),
    ('model.init = "hf:"', 'run.toml:1  model.init: "hf:" is not one of "random", "hf:DIR".'),
    (
        "model.hidden = 250\nmodel.preset = '7m'",
        "run.toml:1  model.hidden: 250 does not divide into heads of an even width by "
        "model.heads = 4 (preset 7m). Nearest: 248 or 256; or give model.head_width.",
    ),
    (
        "model.heads = 6\nmodel.preset = '7m'",
        "run.toml:1  model.heads: model.hidden = 256 (preset 7m) does not divide into 6 heads of "
        "an even width. Set model.hidden to 252 or 264, or give model.head_width.",
    ),
    (
        "model.head_width = 33\nmodel.preset = '7m'",
        "run.toml:1  model.head_width: 33 is odd; rotary angles turn pairs. Nearest: 32 or 34.",
    ),
    (
        "model.kv_heads = 3\nmodel.preset = '7m'",
        "run.toml:1  model.kv_heads: 3 does not divide model.heads = 4 (preset 7m). Nearest: 2.",
    ),
    (
        "model.heads = 1\nmodel.preset = '7m'",
        "run.toml:1  model.heads: 1 is not a multiple of model.kv_heads = 2 (preset 7m). "
        "Set model.kv_heads to 1.",
    ),
    (
        "model.vocab = 1000",
        "run.toml:1  model.vocab: 1000 is fewer than data.vocab = 4096 (default), the size of the "
        "tokenizer that is trained. Give at least 4096.",
    ),
    (
        "model.top_k = 2",
        "run.toml:1  model.top_k: 2 says something of experts, and there are none: "
        "model.experts = 0 (preset 2m). Set model.experts.",
    ),
    (
        "model.experts = 4\nmodel.top_k = 6",
        "run.toml:2  model.top_k: a token cannot pass through 6 of 4 experts. Set model.top_k to "
        "4 or less.",
    ),
    (
        "model.experts = 4\nmodel.top_k = 0",
        "run.toml:2  model.top_k: 0 leaves 4 experts without anything to compute. Give 1 or more, "
        "or leave it out.",
    ),
    (
        "model.experts = 4\nmodel.expert_ffn = 0",
        "run.toml:2  model.expert_ffn: 0 leaves 4 experts without anything to compute. Give 1 or "
        "more, or leave it out.",
    ),
    (
        "model.experts = 1\nmodel.preset = 'moe-3m'",
        "run.toml:1  model.experts: a token cannot pass through 2 of 1 experts. Set model.top_k "
        "to 1 or less.",
    ),
    (
        "model.dense_layers = 4\nmodel.preset = 'moe-3m'",
        "run.toml:1  model.dense_layers: none of 4 layers has experts: not the first 4, and of "
        "the others those whose number is a multiple of 1. Lower model.dense_layers or "
        "model.expert_every.",
    ),
    (
        'model.init = "hf:none"',
        "run.toml:1  model.init: cannot read none/config.json: no such file or directory. "
        "Name a folder that holds config.json and *.safetensors.",
    ),
]


@pytest.mark.parametrize(("text", "message"), BETWEEN_KEYS)
def test_one_key_that_is_wrong_beside_another(tmp_path: Path, text: str, message: str) -> None:
    assert faults(write(tmp_path, text)) == message


def test_experts_alone_are_as_much_work_as_the_feed_forward_that_they_replace() -> None:
    run = read_run(None, [("model.experts", "8")])
    dense = read_run(None).model
    assert (run.model.top_k, run.model.expert_ffn) == (2, dense.ffn // 2)
    assert run.origins["model.expert_ffn"] == "model.ffn // model.top_k"
    assert run.model.matmul_params == dense.matmul_params + 8 * dense.hidden * dense.layers
    one = read_run(None, [("model.experts", "1"), ("model.expert_ffn", "40")]).model
    assert (one.top_k, one.expert_ffn) == (1, 40)


def test_a_published_model_is_balanced_as_the_run_says(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    published = preset("mixtral-8x7b")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(hf_config(published)))
    text = 'model.init = "hf:hf"\nmodel.balance = "bias"\ndata.tokenizer = "a.json"\n'
    run = read_run(write(tmp_path, text))
    assert run.model == dataclasses.replace(published, balance="bias")
    assert run.origins["model.balance"] == "run.toml:2"
    assert run.origins["model.balance_rate"] == "hf/config.json"


def test_a_faulty_key_is_not_blamed_twice(tmp_path: Path) -> None:
    path = write(tmp_path, 'train.steps = "ten"\ntrain.warmup_steps = 5000\nmodel.heads = 0\n')
    assert faults(path) == (
        'run.toml:1  train.steps: needs a whole number, got "ten" (text).\n'
        "run.toml:3  model.heads: 0 is too small; it must be at least 1."
    )


def test_a_flag_mends_a_rule_but_not_a_wrong_line(tmp_path: Path) -> None:
    path = write(tmp_path, "train.steps = 5\n")
    assert read_run(path, [("train.steps", "20")]).spec.train.steps == 20
    path = write(tmp_path, "train.steps = -1\n")
    message = "run.toml:1  train.steps: -1 is too small; it must be at least 0."
    assert faults(path, ("train.steps", "20")) == message


def test_flags_at_fault_are_named_as_flags() -> None:
    assert faults(None, ("train.steps", "5"), ("train.warmup_steps", "6")) == (
        "--train.warmup_steps: 6 is more than train.steps = 5 (--train.steps). Give at most 5."
    )
    assert faults(None, ("train", "5")) == "--train: no such key. Nearest: --train.lr"
    assert faults(None, ("data.path", "\udcff")) == (
        "--data.path: the value has bytes that are not UTF-8."
    )


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (5, 2), (9, 4), (10, 10), (100, 10)])
def test_the_default_warm_up_fits_any_number_of_steps(steps: int, warmup: int) -> None:
    run = read_run(None, [("train.steps", str(steps))])
    assert run.spec.train.warmup_steps == warmup
    origin = "half of train.steps" if steps < 10 else "default"
    assert run.origins["train.warmup_steps"] == origin


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("train.steps", "1e23", "needs a whole number, got 1e+23 (a number)."),
        ("train.steps", "1.0", "needs a whole number, got 1.0 (a number)."),
        (
            "pack.context_tokens",
            "1" + "0" * 12,
            f"1{'0' * 12} is too large; it must be at most 2147483647.",
        ),
        ("model.hidden", str(2**63), f"{2**63} is too large; it must be at most 2147483647."),
        (
            "pack.step_tokens",
            str(2**31 - 2),
            "2,147,483,646 is 1,073,741,823 windows of pack.context_tokens = 2 "
            "(--pack.context_tokens); give at most 1,048,576 windows.",
        ),
    ],
)
def test_absurd_sizes_are_refused_at_once(name: str, value: str, message: str) -> None:
    small = [("pack.context_tokens", "2")] if name == "pack.step_tokens" else []
    assert faults(None, *small, (name, value)).splitlines()[-1] == f"--{name}: {message}"


def test_a_mark_of_byte_order_is_no_key(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf[train]\nsteps = 7\n")
    run = read_run(path)
    assert (run.spec.train.steps, run.origins["train.steps"]) == (7, "run.toml:2")


def test_a_base_does_not_extend(tmp_path: Path) -> None:
    write(tmp_path, '\nextends = "other.toml"\n', "base.toml")
    path = write(tmp_path, 'extends = "base.toml"\n')
    assert faults(path) == (
        "base.toml:2  extends: run.toml extends this file, so it cannot extend another; "
        "one level is allowed."
    )
    write(tmp_path, "a = \n", "base.toml")
    assert faults(path) == ("run.toml:1  extends: base.toml:1  not TOML: Invalid value (column 5).")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "no.toml"
    assert faults(missing) == (
        f'No such file: {missing}. "equipoise init" writes a run.toml to start from.'
    )
    assert faults(tmp_path) == f"Cannot read {tmp_path}: is a directory."
    bad = write(tmp_path, "[train]\nsteps 3\n")
    assert faults(bad) == (
        "run.toml:2  not TOML: Expected '=' after a key in a key/value pair (column 7)."
    )
    bad.write_text('a = 1\nb = """\nc\n')
    assert faults(bad) == "run.toml:3  not TOML: Unterminated string (end of the file)."
    bad.write_bytes(b"a = 1\nb = '\xff'\n")
    assert faults(bad) == "run.toml:2  not UTF-8 text. Save the file as UTF-8."


def test_sizes_replace_the_presets(tmp_path: Path) -> None:
    run = read_run(
        write(tmp_path, "[model]\nhidden = 128\nlayers = 2\ntied = true\npreset = '7m'\n")
    )
    assert run.model == dataclasses.replace(
        preset("7m"), hidden=128, layers=2, head_width=32, tied=True
    )
    assert run.origins["model.head_width"] == "model.hidden // model.heads"
    assert run.origins["model.layers"] == "run.toml:3"
    wide = read_run(write(tmp_path, "[model]\nhidden = 128\nhead_width = 64\npreset = '7m'\n"))
    assert (wide.model.hidden, wide.model.head_width) == (128, 64)


def test_the_vocabulary_follows_the_tokenizer(tmp_path: Path) -> None:
    assert read_run(None, [("data.vocab", "300")]).model.vocab == 300
    assert read_run(None, [("data.vocab", "300"), ("model.vocab", "512")]).model.vocab == 512
    given = read_run(None, [("data.tokenizer", "a.json"), ("model.preset", "30m")])
    assert (given.model.vocab, given.origins["model.vocab"]) == (8192, "preset 30m")


def write_hf(folder: Path, **changed: Any) -> None:
    (folder / "hf").mkdir(exist_ok=True)
    config = {**hf_config(preset("qwen3-8b")), **changed}
    (folder / "hf" / "config.json").write_text(json.dumps(config))


def test_sizes_come_from_a_hugging_face_folder(tmp_path: Path) -> None:
    write_hf(tmp_path)
    path = write(tmp_path, 'model.init = "hf:hf"\n')
    run = read_run(path)
    assert run.model == preset("qwen3-8b")
    assert run.origins["model.layers"] == "hf/config.json"
    assert run.origins["model.init"] == "run.toml:1"


def test_sizes_beside_a_hugging_face_folder_are_refused(tmp_path: Path) -> None:
    write_hf(tmp_path)
    path = write(tmp_path, '[model]\ninit = "hf:hf"\npreset = "7m"\nlayers = 2\n')
    rest = (
        'given beside model.init = "hf:hf" (run.toml:2), whose config.json holds the sizes. '
        "Remove one of them."
    )
    assert faults(path) == f"run.toml:3  model.preset: {rest}\nrun.toml:4  model.layers: {rest}"


def test_hugging_face_folders_that_do_not_do(tmp_path: Path) -> None:
    path = write(tmp_path, 'model.init = "hf:hf"\n')
    write_hf(tmp_path, hidden_act="gelu")
    assert faults(path) == (
        'run.toml:1  model.init: hf/config.json: hidden_act "gelu" is not supported; '
        'only "silu" is. To train it as it is, set model.engine = "transformers".'
    )
    write_hf(tmp_path, vocab_size=300)
    assert faults(path) == (
        "run.toml:1  model.init: its vocabulary of 300 is smaller than data.vocab = 4096 "
        "(default), the size of the tokenizer that is trained. Set data.tokenizer to the "
        "folder's tokenizer.json, or data.vocab to 300 or less."
    )
    (tmp_path / "hf" / "config.json").write_text("[]")
    assert faults(path) == (
        "run.toml:1  model.init: hf/config.json cannot be read: it does not hold an object."
    )
    (tmp_path / "hf" / "config.json").write_text("{")
    assert faults(path) == (
        "run.toml:1  model.init: hf/config.json cannot be read: it is not JSON at line 1, column "
        "2: expecting property name enclosed in double quotes."
    )


def test_nearest_key_prefers_the_same_last_word() -> None:
    assert nearest_key("train.max_tokens") == "pack.max_tokens"
    assert nearest_key("train.sead") == "train.seed"


def test_the_old_names_of_layout_keys_are_taken_and_the_new_ones_named(tmp_path: Path) -> None:
    path = write(tmp_path, "[layout]\ndp = 1\ncontext = 2\nexpert = 2\n")
    run = read_run(path, [("layout.tensor", "2")])
    assert (run.spec.layout.cp, run.spec.layout.ep, run.spec.layout.tp) == (2, 2, 2)
    assert run.origins["layout.cp"] == "run.toml:3"
    assert run.notes == (
        "run.toml:3  layout.context is now layout.cp; 0.2 drops the old name.",
        "run.toml:4  layout.expert is now layout.ep; 0.2 drops the old name.",
        "--layout.tensor is now --layout.tp; 0.2 drops the old name.",
    )
    today = write(tmp_path, "[layout]\ndp = 1\ncp = 2\nep = 2\ntp = 2\n")
    assert read_run(today).notes == () and read_run(today).digest == run.digest


def test_a_key_under_both_names_is_refused_in_one_file_and_a_flag_stands_over_it(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, "[layout]\npipeline = 2\npp = 2\n")
    assert faults(path) == (
        "run.toml:2  layout.pipeline: the old name of layout.pp, which is given too."
    )
    path = write(tmp_path, "[layout]\npipeline = 4\n")
    assert read_run(path, [("layout.pp", "2")]).spec.layout.pp == 2


def test_a_recommender_is_told_by_one_sentence(tmp_path: Path) -> None:
    text = '[model]\nkind = "recommend"\nwidth = 16\n[data]\nids = ["user"]\n[tables]\nlr = 1.0\n'
    assert faults(write(tmp_path, text)) == (
        "run.toml:2  model.kind: only train, report, pack, plan, simulate and calibrate know "
        'model.kind, for runs of recommenders (model.kind = "recommend"). Leave it out of any '
        "other run."
    )
