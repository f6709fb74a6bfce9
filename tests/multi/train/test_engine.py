"""Whole runs of models that transformers builds: every layout the same, resumed, and given back."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from equipoise.base.errors import CheckpointError
from equipoise.cli.main import main
from equipoise.comm.local import run_ranks
from equipoise.spec.model.other_config import model_from_other_config
from equipoise.spec.run.model import ModelSection
from equipoise.spec.run.resolved import write_resolved
from support.hf.models import build_engine
from support.ranks import on_ranks
from support.read_run import events


def save(folder: Path, kind: str, **changed: Any) -> Path:
    build_engine(kind, vocab_size=320, **changed).save_pretrained(folder)
    return folder


@pytest.fixture
def make(make_run: Any) -> Any:
    """A run of a folder, by ``model.engine = "transformers"``."""

    def of(folder: Path, **keys: Any) -> Any:
        config = json.loads((folder / "config.json").read_text())
        model = model_from_other_config(config)
        resolved = make_run(model=model, init_folder=str(folder), **keys)
        section = ModelSection(init=f"hf:{folder}", engine="transformers")
        return dataclasses.replace(resolved, spec=dataclasses.replace(resolved.spec, model=section))

    return of


def run(folder: Path, resolved: Any, **script: Any) -> Any:
    return run_ranks(resolved.ranks, on_ranks.train, folder, resolved, script)[0]


def assert_alike(one: Any, other: Any) -> None:
    assert one.losses == pytest.approx(other.losses, rel=1e-5)
    assert one.weights.keys() == other.weights.keys()
    for name, weight in one.weights.items():
        scale = np.abs(other.weights[name]).max()
        # AdamW divides by the root of the gradient's square: where that is rounding, so is a step.
        assert np.abs(weight - other.weights[name]).max() <= 1e-3 * scale, name


LAYOUTS: dict[str, dict[str, Any]] = {
    "zero 3, recomputed": {"zero": 3, "recompute": "full"},
    "divided documents": {"zero": 1, "policy": "divided"},
    "context parallelism": {"dp": 1, "cp": 2, "zero": 2, "strategy": "ring"},
}


def test_steps_are_the_same_in_every_layout(tmp_path: Path, make: Any) -> None:
    folder = save(tmp_path / "hf", "gemma2")
    plain = run(tmp_path / "plain", make(folder, dp=1, zero=0, steps=3))
    assert plain.losses[-1] < plain.losses[0]
    runs = {name: make(folder, steps=3, **keys) for name, keys in LAYOUTS.items()}
    for ended in run_ranks(2, on_ranks.train_each, tmp_path, runs)[0].values():
        assert_alike(ended, plain)
    (start,) = events(tmp_path / "plain", "start")
    assert start["spec"]["model"]["engine"] == "transformers"
    (memory,) = events(tmp_path / "plain", "memory")
    assert memory["forecast_bytes"] > 0


def test_a_run_goes_on_on_another_number_of_ranks(tmp_path: Path, make: Any) -> None:
    folder = save(tmp_path / "hf", "granite")
    whole = run(tmp_path / "whole", make(folder, steps=4, zero=3))
    run(tmp_path / "cut", make(folder, steps=2, zero=3))
    assert_alike(
        dataclasses.replace(run(tmp_path / "cut", make(folder, dp=3, zero=1, steps=4)), losses=[]),
        dataclasses.replace(whole, losses=[]),
    )


def test_a_checkpoint_of_one_engine_is_not_loaded_by_the_other(
    tmp_path: Path, make: Any, make_run: Any
) -> None:
    folder = save(tmp_path / "hf", "llama")
    resolved = make(folder, dp=1, zero=0, steps=1)
    run(tmp_path / "run", resolved)
    own = make_run(model=resolved.model, dp=1, zero=0, steps=2)
    with pytest.raises(CheckpointError) as caught:
        run(tmp_path / "run", own)
    checkpoint = tmp_path / "run" / "checkpoint" / "step-000001"
    assert str(caught.value) == (
        f'{checkpoint} was trained with model.engine = "transformers", whose weights have other '
        f'names than those of "equipoise". Set model.engine = "transformers", or train into '
        f"another folder with --out."
    )


KINDS = ("gpt2", "deepseek_v3")
"""With a tied head and learned positions; with experts and buffers."""


@pytest.mark.parametrize("kind", KINDS)
def test_shards_come_back_with_the_weights_and_logits_that_went_in(
    tmp_path: Path, make: Any, kind: str
) -> None:
    folder = save(tmp_path / "hf", kind, max_position_embeddings=256)
    resolved = make(folder, zero=3, steps=1, warmup_steps=0, lr=1e-300)
    write_resolved(tmp_path / "run", resolved)
    run(tmp_path / "run", resolved)
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "back"), "--quiet"]) == 0
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(each, attn_implementation="eager")
        for each in (folder, tmp_path / "back")
    )
    states = before.state_dict(), after.state_dict()
    assert states[0].keys() == states[1].keys()
    same = [torch.equal(weight, states[1][name]) for name, weight in states[0].items()]
    assert all(same)
    ids = torch.arange(40)[None] * 7
    with torch.no_grad():
        assert torch.equal(before(ids).logits, after(ids).logits)
    configs = [
        json.loads((each / "config.json").read_text()) for each in (folder, tmp_path / "back")
    ]
    ends = ("bos_token_id", "eos_token_id", "pad_token_id")  # of the run's own tokenizer
    assert [{**each, **dict.fromkeys(ends)} for each in configs] == [
        {**configs[0], **dict.fromkeys(ends)}
    ] * 2
