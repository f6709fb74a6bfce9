"""What is said of two ranks' plans."""

import dataclasses

from equipoise.train.health.agree import PackedPlan, tell_difference

PLAN = PackedPlan("by-work", [[[[7, 0, 5], [8, 0, 3]], [[9, 0, 4]]], [[[1, 0, 12]]]])


def told(**changes: object) -> str:
    return tell_difference(PLAN, dataclasses.replace(PLAN, **changes), 3)


def test_the_first_difference_is_told() -> None:
    assert told(policy="in-order") == "by by-work on rank 0 and by in-order on rank 3"
    assert told(ranks=PLAN.ranks[:1]) == ("for 2 data-parallel ranks on rank 0 and for 1 on rank 3")
    assert told(ranks=[[[[7, 0, 5]], [[9, 0, 4]]], PLAN.ranks[1]]) == (
        "data-parallel rank 0 has micro-batches of 8, 4 tokens by rank 0 and of 5, 4 tokens by "
        "rank 3"
    )
    assert told(ranks=[PLAN.ranks[0], [[[2, 0, 12]]]]) == (
        "micro-batch 0 of data-parallel rank 1 has documents 1 by rank 0 and 2 by rank 3"
    )
    assert told() == "pieces read other parts of their documents"
