"""Balanced micro-batches in Trainer and SFTTrainer: the same steps on any number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import DataCollatorWithFlattening

from equipoise.base.errors import DataError, LayoutError
from equipoise.comm.group import Ranks
from equipoise.comm.local import run_ranks
from equipoise.data.adapters.trainer import balance_trainer
from support.trainers.tiny import GIVEN, LENGTHS, samples, tell_trainers, tiny_llama, words


def make(kind: str, folder: Path, **changed: Any) -> Any:
    given = {**GIVEN, **changed}
    if kind == "sft":
        import trl  # it takes seconds

        arguments = trl.SFTConfig(
            output_dir=str(folder),
            padding_free=True,
            max_length=None,
            activation_checkpointing=False,
            model_init_kwargs=None,
            dataset_kwargs={"skip_prepare_dataset": True},
            **given,
        )
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=words(), eos_token="1", pad_token="0"
        )
        return trl.SFTTrainer(
            tiny_llama(), arguments, train_dataset=samples(), processing_class=tokenizer
        )
    return transformers.Trainer(
        tiny_llama(),
        transformers.TrainingArguments(output_dir=str(folder), **given),
        train_dataset=samples(),
        data_collator=DataCollatorWithFlattening(),
    )


def train(kind: str, folder: Path, **changed: Any) -> Any:
    trainer = make(kind, folder, **changed)
    seen = []
    sampler = balance_trainer(trainer)
    collate = trainer.data_collator

    def count(rows: list[Any]) -> Any:
        seen.extend(len(row["input_ids"]) for row in rows)
        return collate(rows)

    trainer.data_collator = count
    trainer.train()
    return trainer.model, seen, sampler


@pytest.fixture(scope="module", params=["trainer", "sft"])
def trained(request, tmp_path_factory) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    # Sixteen samples in one step of four micro-batches.
    arguments = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 4}
    return request.param, *train(request.param, folder, **arguments)


def test_every_sample_comes_once_an_epoch(trained) -> None:
    _, _, seen, sampler = trained
    assert sorted(seen) == sorted(LENGTHS + LENGTHS)
    assert sampler.steps == 1


def test_the_steps_are_those_of_the_same_samples_in_any_order(trained, tmp_path) -> None:
    kind, model, _, _ = trained
    plain = make(kind, tmp_path, gradient_accumulation_steps=1, per_device_train_batch_size=16)
    plain.train()
    start = tiny_llama().state_dict()
    for name, weight in plain.model.state_dict().items():
        moved = float((weight - start[name]).abs().max())
        apart = float((weight - model.state_dict()[name]).abs().max())
        assert apart <= 1e-5 * max(1.0, moved), name
    assert any(float((w - start[n]).abs().max()) > 1e-4 for n, w in model.state_dict().items())


Weights = dict[str, dict[str, torch.Tensor]]


def train_both(ranks: Ranks, folder: Path) -> Weights:
    """Half the micro-batches on each rank, so the same steps as one rank takes."""
    tell_trainers(ranks)
    weights = {}
    for kind in ("trainer", "sft"):
        changed = {"gradient_accumulation_steps": 2, "ddp_backend": "gloo"}
        model, _, _ = train(kind, folder / kind, **changed)
        weights[kind] = {name: each.detach().clone() for name, each in model.state_dict().items()}
    return weights


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Weights]:
    """Weights of both kinds on each of two ranks."""
    return run_ranks(2, train_both, tmp_path_factory.mktemp("two"))


def test_two_ranks_have_the_weights_of_one(trained, two_ranks: list[Weights]) -> None:
    kind, wanted, _, _ = trained
    for weights in two_ranks:
        for name, weight in wanted.state_dict().items():
            assert float((weight - weights[kind][name]).abs().max()) <= 1e-5, name


def test_steps_without_a_sample_for_every_rank_are_refused(tmp_path) -> None:
    trainer = make("trainer", tmp_path, per_device_train_batch_size=1)
    trainer.args.gradient_accumulation_steps = 20
    with pytest.raises(LayoutError) as caught:
        balance_trainer(trainer)
    assert str(caught.value) == (
        "A step of 16 samples cannot fill 20 micro-batches on each of 1 ranks: the epoch has 16 "
        "samples in 1 steps. Give step_samples=20 or more, or fewer micro-batches."
    )


def test_a_dataset_without_tokens_is_refused(tmp_path) -> None:
    trainer = make("trainer", tmp_path)
    import datasets

    trainer.train_dataset = datasets.Dataset.from_dict({"text": ["a", "b"]})
    with pytest.raises(DataError) as caught:
        balance_trainer(trainer)
    assert str(caught.value) == (
        "The trainer's dataset has no input_ids whose lengths could be balanced. Give it a "
        "tokenized dataset with a length, not a stream."
    )
