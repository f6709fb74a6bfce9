"""``Trainer.evaluate()`` over ranks that share packs: the loss of the documents one by one."""

from pathlib import Path

import pytest
import torch

from equipoise.comm.local import run_ranks
from support.ranks import hf_context_ranks
from support.trainers.page import page_trainers


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_evaluation_over_ranks_is_that_of_the_documents_one_by_one(
    tmp_path: Path, ranks: int
) -> None:
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
    for told in run_ranks(ranks, hf_context_ranks.evaluate_with_trainer, str(tmp_path)):
        for batch, (loss, wanted) in told.items():
            assert loss == pytest.approx(wanted, rel=1e-6), batch
        assert len(told) == 3


def test_trainer_evaluates_adapters_between_its_steps(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
    apart, packed = page_trainers()
    folder, run = str(tmp_path), hf_context_ranks.train_adapters
    ((wanted, wanted_held_out, wanted_adapters),) = run_ranks(1, run, folder, packed, False)
    assert len(wanted) == len(wanted_held_out) == 3
    assert max(wanted_held_out) - min(wanted_held_out) > 1e-4
    for losses, held_out, adapters in run_ranks(2, run, folder, apart, True):
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert held_out == pytest.approx(wanted_held_out, rel=1e-6)
        for adapter, right in zip(adapters, wanted_adapters, strict=True):
            torch.testing.assert_close(adapter, right, rtol=0, atol=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_plain_trainer_evaluates_whole_documents_of_each_rank(tmp_path: Path, ranks: int) -> None:
    """As it did before on as many ranks, which is a mean of means."""
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
    folder, run = str(tmp_path), hf_context_ranks.evaluate_with_plain_trainer
    wanted = run_ranks(ranks, run, folder, False)
    for told, (loss, before, text) in zip(run_ranks(ranks, run, folder, True), wanted, strict=True):
        assert told[0] == pytest.approx(loss, rel=1e-6)
        assert told[2] == text
        assert (before, told[1]) == ("sdpa", "equipoise")


def test_a_collator_that_does_not_share_packs_is_refused() -> None:
    assert hf_context_ranks.refused_collator() == (
        "ContextTrainer evaluates packs over ranks, but its data_collator is DefaultCollator. Give "
        "it data_collator=ContextCollator()."
    )
