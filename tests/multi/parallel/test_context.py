"""Context parallelism on real ranks over gloo: equal to one rank, and every byte accounted for."""

import itertools

import pytest

from equipoise.base.errors import CheckError, LayoutError
from equipoise.comm.local import run_ranks
from equipoise.schedule.attention.strategies import STRATEGIES
from equipoise.spec.mask import Mask
from support.ranks import context_ranks
from support.ranks.context_ranks import Case

SHARDINGS = ["contiguous", "head-tail", "head-tail-document", "mixed"]
GROUPS = [(2, 2), (4, 2), (6, 2), (9, 3), (7, 1)]


def lengths_of(ranks: int) -> list[tuple[int, ...]]:
    chunks = 2 * ranks
    return [
        (1, chunks - 1, chunks, chunks + 1, 13, 101),
        (300, 2, 17, 1, 1, 64),
        (2,),  # most ranks without a token
        (0, 5, 0),
        (),
    ]


def causal_cases(ranks: int) -> list[Case]:
    """Every strategy with every sharding and every pack, though not all three; heads in turn.

    A sharding has one of the two long packs in fp64, in turn, and a short pack has one sharding.
    Three ranks have half of the long packs, of which each sharding still has some.
    """
    heads, (long, uneven, *short) = itertools.cycle(GROUPS), lengths_of(ranks)
    cases = []
    for at, strategy in enumerate(STRATEGIES):
        pairs = [(sharding, (long, uneven)[(at + n) % 2]) for n, sharding in enumerate(SHARDINGS)]
        if ranks == 3:
            pairs = pairs[at % 2 :: 2]
        pairs += [(SHARDINGS[(at + n) % 4], lengths) for n, lengths in enumerate(short)]
        cases += [Case(pack, strategy, sharding, *next(heads)) for sharding, pack in pairs]
        cases += [Case(uneven, strategy, SHARDINGS[-at % 4], *next(heads), dtype="float32")]
    return cases


MASKS = (
    Mask("window", 7),
    Mask("full"),
    Mask("prefix", prefix_tokens=11, branch_tokens=(20, 1, 14)),
    Mask(),
    Mask("window", 500),
)


def masked_cases(ranks: int) -> list[Case]:
    """Every strategy under every mask, fp64 and fp32; most ranks without a token in some."""
    heads, shardings = itertools.cycle(GROUPS), itertools.cycle(SHARDINGS)
    packs = [((61, 33, 46, 25, 90), MASKS), ((2, 1), Mask("full")), ((3,), Mask("window", 2))]
    kinds = [("float64", packs), ("float32", packs[:1])]
    return [
        Case(lengths, strategy, next(shardings), *next(heads), dtype=dtype, mask=mask)
        for strategy in STRATEGIES
        for dtype, few in (kinds[:1] if ranks == 3 else kinds)
        for lengths, mask in few
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("is_masked", [False, True], ids=["causal", "masked"])
def test_every_strategy_equals_one_rank_and_sends_what_it_says(ranks: int, is_masked) -> None:
    cases = (masked_cases if is_masked else causal_cases)(ranks)
    told = run_ranks(ranks, context_ranks.attend_cases, cases)
    for rank, answers in enumerate(told):  # each rank: an error only at rank > 0 is one, too
        for case, answer in zip(cases, answers, strict=True):
            output, gradient = (1e-12, 1e-12) if case.dtype == "float64" else (2e-6, 1e-5)
            assert answer.output_error <= output, case
            assert answer.gradient_error <= gradient, case
            assert answer.is_bitwise, case
            assert answer.sent_bytes == answer.scheduled_bytes[rank], case
            assert answer.sent_messages == answer.scheduled_messages[rank], case
            assert answer.received_bytes == [row[rank] for row in answer.scheduled_bytes], case


def test_short_documents_cross_no_rank() -> None:
    case = Case((100,) * 8, "needed-kv", "mixed", 4, 2)
    for (answer,) in run_ranks(4, context_ranks.attend_cases, [case]):
        assert answer.sent_bytes == answer.received_bytes == [0] * 4
        assert answer.output_error <= 1e-12


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_sent_are_those_of_the_papers_formulas(ranks: int) -> None:
    """Both passes, fp64, so that sums are as wide as elements: 8 bytes."""
    heads, kv_heads, width, mine = 8, 4, context_ranks.WIDTH, 12
    lengths = (mine * ranks,)
    cases = [
        Case(lengths, strategy, "head-tail", heads, kv_heads, mask=Mask("full"))
        for strategy in ("ring", "pass-q", "ulysses")
    ]
    # Keys there and their gradients back; arXiv:2411.01783.
    pass_kv = 2 * (ranks - 1) * mine * 2 * kv_heads * width * 8
    # Queries there and back; partial outputs with one log-sum-exp, and for their gradients
    # the output, its gradient and one log-sum-exp.
    pass_q = (ranks - 1) * mine * heads * (2 * width + (width + 1) + (2 * width + 1)) * 8
    # Of queries, outputs, keys and values all but a rank's share; arXiv:2309.14509.
    ulysses = 2 * mine * (2 * heads + 2 * kv_heads) * width * 8 * (ranks - 1) // ranks
    for answers in run_ranks(ranks, context_ranks.attend_cases, cases):
        assert [sum(each.sent_bytes) for each in answers] == [pass_kv, pass_q, ulysses]


def test_a_group_that_is_a_part_of_all_ranks() -> None:
    case = Case((40, 9), "needed-kv", "head-tail", 4, 2)
    assert max(run_ranks(3, context_ranks.in_a_part_of_the_ranks, case)) < 1e-13


def test_sharded_tokens_come_back_in_order() -> None:
    lengths = [5, 0, 31, 2, 1]
    ranks = run_ranks(3, context_ranks.round_trips, lengths, SHARDINGS)
    for sharding in SHARDINGS:
        told = [each[sharding] for each in ranks]
        assert all(is_right for is_right, _, _ in told), sharding
        assert sum(tokens for *_, tokens in told) == sum(lengths), sharding
        for rank, (_, sent, tokens) in enumerate(told):
            assert sent == [0 if peer == rank else 8 * tokens for peer in range(3)], sharding


def test_messages_travel_while_tiles_are_computed() -> None:
    """Of a delay below what a round computes, nothing is left when its tiles are done."""
    for waited_s in run_ranks(2, context_ranks.wait_with_delay, 4096, 0.001):
        assert waited_s == [0.0]


def test_of_a_longer_delay_only_what_is_not_computed_is_waited_for() -> None:
    for delay_s in (0.5, 5.0, 50.0):  # a rank of a busy machine may stand still for the first
        waited_s = run_ranks(3, context_ranks.wait_with_delay, 64, delay_s)
        assert [len(each) for each in waited_s] == [2] * 3  # the last of three rounds has no hop
        assert all(each < delay_s for rank in waited_s for each in rank)
        if all(each > 0.0 for rank in waited_s for each in rank):
            return
    raise AssertionError("nothing was waited for")


def test_plans_do_not_depend_on_hashing() -> None:
    assert len(context_ranks.digests_of_fresh_interpreters([0, 1])) == 1


def test_documents_on_ranks_of_their_own_over_one_group() -> None:
    """Three groups of ranks, of which one shares a rank with another: nothing crosses them."""
    told = run_ranks(4, context_ranks.with_pieces_placed_by_hand)
    assert all(error < 1e-13 for error, _ in told)
    token_bytes = 2 * 2 * 16 * 8  # key and value of 2 heads of width 16, fp64; likewise gradients
    assert [sent for _, sent in told] == [
        [0, 30 * token_bytes, 0, 0],
        [30 * token_bytes, 0, 8 * token_bytes, 0],
        [0, 8 * token_bytes, 0, 0],
        [0, 0, 0, 0],
    ]


def test_ranks_that_plan_differently() -> None:
    with pytest.raises(CheckError) as caught:
        run_ranks(2, context_ranks.with_plans_that_differ)
    first, rest = str(caught.value).split(" and rank 0 ")
    assert first.startswith("Rank 1 has planned schedule ")
    assert len(first.split()[-1]) == 8
    assert rest[8:] == ". Give all ranks the same lengths, masks, strategy and sharding."


def test_shares_of_another_sharding() -> None:
    with pytest.raises(LayoutError) as caught:
        run_ranks(1, context_ranks.with_the_share_of_another_sharding)
    assert str(caught.value) == (
        "Rank 0 of 1 holds 13 tokens of this pack in 2 query heads and 2 key/value heads, but "
        "its tensors have 9, 2 and 2. Take its share with shard_tokens, with the same lengths "
        "and the same sharding."
    )
    with pytest.raises(LayoutError) as caught:
        run_ranks(1, context_ranks.with_rows_of_another_sharding)
    assert str(caught.value) == (
        "Rank 0 of 1 holds 13 tokens of this pack under contiguous sharding, not 3. Give one row "
        "per token, and the sharding they were taken with."
    )
    with pytest.raises(LayoutError) as caught:
        run_ranks(1, context_ranks.with_rows_of_another_pack)
    assert str(caught.value) == (
        "The pack has 12 rows, but its 2 documents have 13 tokens. Give one row per token."
    )
