"""What no group plan can hold is refused in one sentence, with the smallest change that fits."""

import pytest

from equipoise.balance.groups.bytescale import Offload, plan_bytescale
from equipoise.balance.groups.cost import GroupCosts
from equipoise.balance.groups.flexsp import plan_flexsp
from equipoise.balance.groups.gangs import plan_gangs
from equipoise.balance.groups.policies import GROUP_POLICIES
from equipoise.base.errors import DataError, EquipoiseError, FitError, LayoutError
from equipoise.cost.curve import LoadCurve, break_even_curve

COSTS = GroupCosts(break_even_curve(1000))


def message(kind: type[EquipoiseError], call) -> str:
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


def test_a_document_over_all_ranks_is_named_with_what_would_fit() -> None:
    text = message(FitError, lambda: plan_gangs([9, 131_073, 7], 8, COSTS, 8192))
    assert text == (
        "Document 1 of 131,073 tokens needs 17 ranks at 8,192 tokens a rank; there are 8. "
        "Smallest changes that fit: 17 ranks, or 16,385 tokens a rank."
    )
    assert plan_gangs([9, 131_073, 7], 17, COSTS, 8192).peak_tokens.max() <= 8192
    assert plan_gangs([9, 131_073, 7], 8, COSTS, 16_385).peak_tokens.max() <= 16_385


def test_flexsp_counts_in_powers_of_two() -> None:
    text = message(FitError, lambda: plan_flexsp([500], 7, COSTS, 100))
    assert text == (
        "Document 0 of 500 tokens needs 8 ranks at 100 tokens a rank; there are 7 (flexsp gives "
        "a document a power of two, here at most 4). Smallest changes that fit: 8 ranks, or 125 "
        "tokens a rank."
    )
    assert plan_flexsp([500], 8, COSTS, 100).peak_tokens.max() <= 100
    assert plan_flexsp([500], 7, COSTS, 125).peak_tokens.max() <= 125
    assert plan_gangs([500], 5, COSTS, 100).peak_tokens.max() <= 100


def test_what_offloading_leaves_is_named() -> None:
    # One layer of a token: 1,000 ns forward, 1,000 bytes at 0.5 GB/s, so half is offloaded.
    curve = LoadCurve(0.0, 3 * 10 * 1000.0, (1.0,), (1e-9,), 1.0, measured=False)
    offload = Offload(10, 1000.0, 0.5e9)
    call = lambda ranks, cap: plan_bytescale([1000], ranks, GroupCosts(curve), cap, offload=offload)  # noqa: E731
    assert message(FitError, lambda: call(2, 200)) == (
        "Document 0 of 1,000 tokens needs 3 ranks at 200 tokens a rank; there are 2 (offloading "
        "leaves 600 of its tokens on the device). Smallest changes that fit: 3 ranks, or 300 "
        "tokens a rank."
    )
    assert call(3, 200).peak_tokens.max() <= 200
    assert call(2, 300).peak_tokens.max() <= 300


@pytest.mark.parametrize("policy", GROUP_POLICIES)
@pytest.mark.parametrize(
    ("lengths", "at", "shown"),
    [
        ([4, 0], 1, "0"),
        ([-5, 3], 0, "-5"),
        ([1.0, float("nan")], 1, "nan"),
        ([1.5], 0, "1.5"),
        ([2**31], 0, "2147483648"),
    ],
)
def test_what_is_no_length_is_named(policy: str, lengths: list[float], at: int, shown: str) -> None:
    text = message(DataError, lambda: GROUP_POLICIES[policy](lengths, 2, COSTS, 10))
    assert text == (
        f"Document {at} has a length of {shown} tokens. Lengths are whole numbers from 1 to "
        f"2,147,483,647."
    )


def test_lengths_are_a_list() -> None:
    assert message(DataError, lambda: plan_gangs([[1, 2]], 2, COSTS, 10)) == (
        "Document lengths have shape (1, 2). Give a list: one whole number of tokens per document."
    )


@pytest.mark.parametrize(("ranks", "cap"), [(0, 10), (2, 0)])
def test_no_ranks_or_no_tokens_hold_nothing(ranks: int, cap: int) -> None:
    assert message(LayoutError, lambda: plan_gangs([1], ranks, COSTS, cap)) == (
        f"Groups need at least 1 rank and 1 token per rank; got {ranks} ranks and {cap} tokens."
    )
