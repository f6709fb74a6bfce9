"""Ranks that meet: the same verdict for all, on differences and on those who do not come."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from equipoise.base.errors import EquipoiseError, FaultError, LayoutError
from equipoise.comm.meet import meet, name_ranks, tell_differences

MEND = "Start every rank from one prepared folder and in one environment."


def verdicts(facts: list[dict[str, str] | None], deadline_s: float = 5.0) -> list[str]:
    """What each rank is told; None is one that does not come."""
    store = dist.HashStore()

    def be(rank: int) -> str:
        mine = facts[rank]
        if mine is None:
            return "away"
        try:
            meet(store, rank, len(facts), mine, deadline_s=deadline_s)
        except EquipoiseError as error:
            return f"{type(error).__name__}: {error}"
        return "met"

    with ThreadPoolExecutor(len(facts)) as pool:
        return list(pool.map(be, range(len(facts))))


def test_the_same_facts_meet() -> None:
    assert verdicts([{"equipoise": "1"}]) == ["met"]
    assert verdicts([{"equipoise": "1", "train.seed": "7"}] * 4) == ["met"] * 4


def test_every_rank_is_told_what_differs_and_where() -> None:
    mine = {"equipoise": "0.1.0", "train.seed": "7"}
    other = mine | {"equipoise": "0.2.0", "train.seed": "8"}
    text = (
        "Not all ranks run the same: equipoise is 0.2.0 on rank 1 and 0.1.0 on rank 0; train.seed "
        f"is 8 on rank 1 and 7 on rank 0. {MEND}"
    )
    assert verdicts([mine, other, mine, mine]) == [f"LayoutError: {text}"] * 4
    assert tell_differences({1: other, 2: mine, 3: mine | {"train.seed": "9"}}, mine) == (
        text.replace("8 on rank 1", "8 on rank 1, 9 on rank 3")
    )


def test_many_differences_and_facts_that_one_side_does_not_know() -> None:
    mine = {f"key.{n}": "0" for n in range(9)}
    assert tell_differences({1: {}, 2: {}, 3: mine}, mine) == (
        "Not all ranks run the same: "
        + "; ".join(f"key.{n} is not known on ranks 1, 2 and 0 on rank 0" for n in range(6))
        + f"; and 3 more. {MEND}"
    )
    assert tell_differences({1: {"new": "1"}}, {}) == (
        f"Not all ranks run the same: new is 1 on rank 1 and not known on rank 0. {MEND}"
    )
    assert tell_differences({1: mine}, mine) == ""


def test_ranks_that_do_not_come() -> None:
    facts = {"equipoise": "1"}
    text = (
        "HungError: Rank 1 of 3 has not come within 0.3 s of rank 0. Start it, or look into its "
        "log; where starting takes longer, raise layout.deadline_s."
    )
    assert verdicts([facts, None, facts], 0.3) == [text, "away", text]
    assert verdicts([facts, None, None], 0.3)[0] == (
        "HungError: Ranks 1, 2 of 3 have not come within 0.3 s of rank 0. Start them, or look "
        "into their log; where starting takes longer, raise layout.deadline_s."
    )


def test_a_difference_is_told_rather_than_who_is_late() -> None:
    told = verdicts([{"WORLD_SIZE": "3"}, None, {"WORLD_SIZE": "2"}], 0.3)
    assert told[0] == told[2]
    assert told[0] == (
        "LayoutError: Not all ranks run the same: WORLD_SIZE is 2 on rank 2 and 3 on rank 0. "
        f"{MEND}"
    )


def test_nobody_comes_to_rank_0s_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.comm.meet._GRACE_S", 0.1)
    with pytest.raises(FaultError) as caught:
        meet(dist.HashStore(), 1, 2, {}, deadline_s=0.2)
    assert str(caught.value) == (
        "Rank 0 of 2 has not come within 0.2 s of rank 1. Start it, or look into its log; where "
        "starting takes longer, raise layout.deadline_s."
    )


def test_a_thousand_ranks_are_named_in_a_sentence() -> None:
    assert name_ranks(list(range(1000))) == f"ranks {', '.join(map(str, range(16)))} and 984 more"


def test_differences_are_the_users_to_mend_and_absence_is_a_fault() -> None:
    assert (LayoutError.exit_code, FaultError.exit_code) == (2, 6)
