"""A Hugging Face folder that is evaluated before it is trained: transformers' own loss."""

from pathlib import Path

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy

from equipoise.cli.main import main
from equipoise.comm.local import run_ranks
from equipoise.observe.reader import read_run
from equipoise.spec.run.resolved import read_resolved
from support.hf.families import save_family
from support.ranks import on_ranks

RUNS = {
    "llama3-rope": ("equipoise", ("--layout.dp=2", "--layout.zero=3")),
    "gemma2": ("transformers", ("--layout.dp=1", "--layout.cp=2")),
    "gpt_oss": ("transformers", ("--layout.dp=2", "--layout.zero=1")),
}
"""Families, whose modules evaluate them, and a layout of two ranks."""


def test_a_folder_has_the_loss_of_transformers(tmp_path: Path) -> None:
    held = [f"def held_{n}(x): return {n}\n" * n for n in (1, 2, 3, 5, 8)]
    (tmp_path / "held").mkdir()
    for n, text in enumerate(held):
        (tmp_path / "held" / f"{n}.txt").write_text(text)
    (tmp_path / "text.txt").write_text("some text to train on, naïve words and more\n" * 40)
    for family, (engine, layout) in RUNS.items():
        source = save_family(family, tmp_path / family / "hf")
        flags = {
            "data.source": "text",
            "data.path": str(tmp_path / "text.txt"),
            "data.cache": str(tmp_path / "cache"),
            "eval.path": str(tmp_path / "held"),
            "model.init": f"hf:{source}",
            "model.engine": engine,
            "pack.context_tokens": "128",
            "pack.step_tokens": "256",
            "train.steps": "0",
        }
        argv = [f"--{name}={value}" for name, value in flags.items()]
        out = ["--out", str(tmp_path / family / "run"), "--prepare", "--quiet"]
        assert main(["train", *argv, *layout, *out]) == 0
    runs = [tmp_path / family / "run" for family in RUNS]
    run_ranks(2, on_ranks.train_all, {run: read_resolved(run) for run in runs})
    for family in RUNS:
        made = read_run(tmp_path / family / "run").evaluations
        assert made.step.tolist() == [0]
        assert made.loss[0] == pytest.approx(their_loss(tmp_path / family / "hf", held), rel=1e-6)


@torch.no_grad()
def their_loss(folder: Path, texts: list[str]) -> float:
    """Mean over all labels, each document run alone; the token after a text ends it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    total, labels = 0.0, 0
    for text in texts:
        ids = torch.tensor([*tokenizer(text).input_ids, tokenizer.eos_token_id])
        logits = model(ids[None]).logits[0, :-1].double()
        total += float(cross_entropy(logits, ids[1:], reduction="sum"))
        labels += len(ids) - 1
    return total / labels
