"""``Trainer.evaluate()`` over ranks that share packs: the loss of the documents one by one."""

from pathlib import Path

import pytest

from equipoise.comm.local import run_ranks
from support.ranks import hf_context_ranks


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_evaluation_over_ranks_is_that_of_the_documents_one_by_one(
    tmp_path: Path, ranks: int
) -> None:
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
    for told in run_ranks(ranks, hf_context_ranks.evaluate_with_trainer, str(tmp_path)):
        for batch, (loss, wanted) in told.items():
            assert loss == pytest.approx(wanted, rel=1e-6), batch
        assert len(told) == 3


def test_a_collator_that_does_not_share_packs_is_refused() -> None:
    assert hf_context_ranks.refused_collator() == (
        "ContextTrainer evaluates packs over ranks, but its data_collator is DefaultCollator. Give "
        "it data_collator=ContextCollator()."
    )
