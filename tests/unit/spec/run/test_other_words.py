"""Other trainers' words lead to the keys of run.toml."""

from pathlib import Path

import pytest

from equipoise.base.errors import SpecError
from equipoise.cli.main import main
from equipoise.spec.run.keys import keys
from equipoise.spec.run.load import read_run
from equipoise.spec.run.other_words import OTHER_WORDS


def test_every_word_leads_to_a_key_and_none_is_one() -> None:
    assert set(OTHER_WORDS.values()) <= set(keys())
    assert not set(OTHER_WORDS) & {name.rpartition(".")[2] for name in keys()}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("train.learning_rate", "train.lr"),
        ("train.gradient_accumulation_steps", "pack.step_tokens"),
        ("train.batch-size", "pack.step_tokens"),
        ("train.num_train_epochs", "train.steps"),
        ("pack.max_seq_length", "pack.context_tokens"),
        ("train.warmup_ratio", "train.warmup_steps"),
        ("journal.sinks", "journal.tensorboard"),
        ("train.step", "train.steps"),
        ("lora.lora_alpha", "lora.alpha"),
        ("lora.target-modules", "lora.targets"),
    ],
)
def test_a_wrong_key_names_the_right_one(name: str, meant: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_run(None, [(name, "1")])
    assert str(caught.value) == f"--{name}: no such key. Nearest: --{meant}"


def test_what_is_absent_says_why(tmp_path: Path) -> None:
    reason = (
        "adapters have no dropout, because a random mask would have to be the same on every "
        "layout. Remove it; weight decay (train.weight_decay) also keeps adapters small."
    )
    (tmp_path / "run.toml").write_text("[lora]\nrank = 4\ndropout = 0.05\n")
    with pytest.raises(SpecError) as caught:
        read_run(tmp_path / "run.toml")
    assert str(caught.value).splitlines()[-1] == f"run.toml:3  lora.dropout: {reason}"
    with pytest.raises(SpecError) as caught:
        read_run(None, [("lora.lora-dropout", "0.05")])
    assert str(caught.value) == f"--lora.lora-dropout: {reason}"
    with pytest.raises(SpecError) as caught:
        read_run(None, [("train.dropout", "0.05")])
    assert "no such key" in str(caught.value)


def test_in_a_file_and_as_a_bare_flag(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text("learning_rate = 1\n[train]\ngrad_accum = 4\n")
    with pytest.raises(SpecError) as caught:
        read_run(path)
    assert str(caught.value) == (
        "run.toml:1  learning_rate: no such key. Nearest: train.lr\n"
        "run.toml:3  train.grad_accum: no such key. Nearest: pack.step_tokens"
    )
    assert main(["config", "--learning-rate", "1"]) == 2
    assert capsys.readouterr().err == (
        "equipoise config: --learning-rate: no such flag. Nearest: --train.lr\n"
    )
