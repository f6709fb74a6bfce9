"""Ranks with batches of their own agree on the number of micro-batches, or all refuse."""

from equipoise.comm.local import run_ranks
from support.ranks.balance_ranks import split_own_batch


def test_ranks_agree_on_the_number_of_micro_batches() -> None:
    lengths = [[100, 90, 80, 70, 60, 50, 5, 5], [10] * 8]
    one, other = run_ranks(2, split_own_batch, lengths, 100, 4)
    assert [len(one), len(other)] == [8, 8]
    assert sorted(sum(one, [])) == list(range(8))  # noqa: RUF017


def test_a_rank_that_cannot_go_on_leaves_no_other_waiting() -> None:
    lengths = [[100, 90, 80, 70, 60, 50], [10, 10]]
    one, other = run_ranks(2, split_own_batch, lengths, 100, 1)
    assert one == (
        "Another rank of the data-parallel group cannot split its samples into 6 or more "
        "micro-batches of 100 tokens; its message says why."
    )
    assert other == (
        "2 samples cannot fill 6 or more micro-batches of at most 100 tokens, the number that all "
        "ranks need. Give a larger max_token_len, or this rank more samples."
    )


def test_a_sample_over_the_limit_is_named_on_its_rank() -> None:
    one, other = run_ranks(2, split_own_batch, [[101], [10]], 100, 1)
    assert one == (
        "A sample has 101 tokens, and a micro-batch holds 100. Give max_token_len=101 or more."
    )
    assert other.startswith("Another rank of the data-parallel group cannot split")
