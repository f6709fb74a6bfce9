"""Ranks of the one-call path that were given different packs: they stop, and say which."""

from pathlib import Path
from typing import Any

import pytest

from equipoise.comm.local import run_ranks

# Ranks are other processes: they import by name what these tests hand to ``run_ranks``.
from support.ranks import hf_agree_ranks

FIX = (
    "Give all ranks of the group the same documents in the same order; loaders that accelerate "
    "prepares give each rank its own."
)


@pytest.mark.parametrize(
    ("last", "what"),
    [
        ({"doc_tokens": (31, 40)}, "lengths of documents differ"),
        (
            {"doc_tokens": (30, 40, 1)},
            "rank 1 has 71 tokens in 3 documents, rank 0 has 71 in 2",
        ),
        ({"ids": 1}, "tokens or labels differ"),
        ({"labels_T": "none"}, "tokens or labels differ"),
        ({"step_labels": 500}, "tokens or labels differ"),
        ({"strategy": "ring"}, "strategy or sharding differ"),
        ({"sharding": "head-tail"}, "strategy or sharding differ"),
    ],
    ids=str,
)
def test_one_rank_has_another_pack(last: dict[str, Any], what: str) -> None:
    wanted = f"CheckError: Rank 1 was given another pack than rank 0: {what}. {FIX}"
    assert run_ranks(2, hf_agree_ranks.different_packs, last) == [wanted] * 2


def test_several_ranks_have_another_pack() -> None:
    told = run_ranks(3, hf_agree_ranks.different_packs, {"ids": 1})
    wanted = "Ranks 1, 2 were given another pack than rank 0: tokens or labels differ."
    assert told == [f"CheckError: {wanted} {FIX}"] * 3


def test_batches_that_are_kept_and_taken_in_another_order() -> None:
    for first, second, third in run_ranks(2, hf_agree_ranks.batches_in_another_order):
        assert (first, second) == ("", "")
        assert third.startswith("CheckError: Rank 1 was given another pack than rank 0: tokens")


def test_groups_of_ranks_have_packs_of_their_own() -> None:
    assert run_ranks(4, hf_agree_ranks.groups_apart) == [""] * 4


def test_packs_are_compared_once_in_a_forward_pass() -> None:
    assert run_ranks(2, hf_agree_ranks.collectives_of_a_step) == [(1, 2)] * 2


def test_the_loader_of_trainer_gives_each_rank_its_own(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
    for told in run_ranks(2, hf_agree_ranks.default_loader, str(tmp_path)):
        assert told.startswith("CheckError: Rank 1 was given another pack than rank 0: rank 1 has ")
        assert told.endswith(FIX)
