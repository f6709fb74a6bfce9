"""What ``balance.batch`` refuses, each with one sentence that says what to do."""

import warnings

import numpy as np
import pytest

from equipoise import balance
from equipoise.base.errors import EquipoiseError, SpecError
from equipoise.spec.catalog import SCHEDULES

S = balance.Shared


class Unreadable:
    """A tensor that needs a gradient, as NumPy sees it."""

    def __array__(self, dtype: object = None, copy: object = None) -> None:
        raise RuntimeError("Can't call numpy() on Tensor that requires grad.")


REFUSED = [
    (
        {"lengths": np.ma.array([3, 4], mask=[0, 1])},
        "Lengths are a masked array, whose masked numbers would count. Give those that are not "
        "masked: values.compressed().",
    ),
    (
        {"lengths": Unreadable()},
        "Lengths are (a Unreadable) that NumPy cannot read: it needs a gradient, is on a device, "
        "is sparse, or has a dtype that NumPy lacks. Give values.tolist().",
    ),
    (
        {"lengths": [5, 5], "divides": True, "max_tokens": 1, "may_be_empty": True},
        "max_tokens is 1, and samples are divided into micro-batches of 2 tokens or more. Give "
        "max_tokens=2 or more, or divides=False.",
    ),
    (
        {"lengths": [5, 5], "max_tokens": 16.0},
        "max_tokens is 16.0. Give a whole number from 1 to 2,147,483,647.",
    ),
    (
        {"lengths": [5, 5], "schedule": "1f1bb"},
        f'No pipeline strategy is called "1f1bb". Nearest: 1f1b. All: {", ".join(SCHEDULES)}.',
    ),
    (
        {"lengths": [5, 5], "pipeline": 2, "schedule": None},
        f"No pipeline strategy is called null. Nearest: interleaved. All: {', '.join(SCHEDULES)}.",
    ),
    (
        {"lengths": []},
        "Lengths have shape (0,), and a batch needs one sample or more. Give one length "
        "per sample, or a row of lengths, one for each kind of token.",
    ),
    (
        {"lengths": [3, -1]},
        "Sample 1 has -1 tokens. Samples have 1 to 2,147,483,647 tokens; leave empty ones out.",
    ),
    (
        {"lengths": [3, 0]},
        "Sample 1 has 0 tokens. Samples have 1 to 2,147,483,647 tokens; leave empty ones out.",
    ),
    (
        {"lengths": [3, 2**40]},
        "Sample 1 has 1,099,511,627,776 tokens. Samples have 1 to 2,147,483,647 tokens; "
        "leave empty ones out.",
    ),
    (
        {"lengths": [3.0, float("nan")]},
        "Sample 1 has nan tokens, which is not a whole number. Count its tokens again.",
    ),
    (
        {"lengths": [3.5, 1.0]},
        "Sample 0 has 3.5 tokens, which is not a whole number. Count its tokens again.",
    ),
    (
        {"lengths": ["abc", "d"]},
        "Lengths are text. Give numbers, such as [412, 96, 2048].",
    ),
    (
        {"lengths": [True, False]},
        "Lengths are flags. Give numbers, such as [412, 96, 2048].",
    ),
    (
        {"lengths": [5, True]},
        "Lengths have flags among them. Give numbers, such as [412, 96, 2048].",
    ),
    (
        {"lengths": [[5, 2], (7, True)]},
        "Lengths have flags among them. Give numbers, such as [412, 96, 2048].",
    ),
    (
        {"lengths": [[1, 2], [3]]},
        "Lengths are ragged. Give one number per sample, such as [412, 96, 2048], or "
        "rows that are all as long.",
    ),
    (
        {"lengths": [5, 5], "pipeline": 10**9},
        "pipeline is 1,000,000,000, more ranks than any model has layers for. Give 1,024 or less.",
    ),
    (
        {"lengths": [5, 5], "ranks": 3},
        "2 samples cannot give each of 3 ranks one. Give 3 samples or more, fewer ranks, "
        "divides=True, or may_be_empty=True.",
    ),
    (
        {"lengths": [5, 5], "ranks": 2, "groups": [[0, 1]]},
        "2 samples in 1 group that stays together cannot give each of 2 ranks one. Give "
        "2 samples or more, fewer ranks, divides=True, or may_be_empty=True.",
    ),
    (
        {"lengths": [5], "ranks": 0},
        "ranks is 0. Give a whole number from 1 to 2,147,483,647.",
    ),
    (
        {"lengths": [5], "ranks": 2.0},
        "ranks is 2.0. Give a whole number from 1 to 2,147,483,647.",
    ),
    (
        {"lengths": [5], "ranks": 2**31 - 1, "may_be_empty": True},
        "2,147,483,647 ranks with 1 micro-batch each are more than 4,194,304 "
        "micro-batches. Give a larger max_tokens, or fewer ranks.",
    ),
    (
        {"lengths": [50, 5], "max_tokens": 20},
        "Sample 0 has 50 tokens, but a micro-batch holds 20. Give max_tokens=50, "
        "divides=True, or a shorter sample.",
    ),
    (
        {"lengths": [15, 15, 15], "max_tokens": 20, "ranks": 2},
        "3 samples cannot fill 2 micro-batches on each of 2 ranks, the fewest that could "
        "hold their tokens. Give a larger max_tokens, may_be_empty=True, or "
        "equal_counts=False with meets_each_turn=False.",
    ),
    (
        {
            "lengths": [5, 5],
            "ranks": 2,
            "multiple_of": 2,
            "meets_each_turn": False,
            "equal_counts": False,
        },
        "2 samples cannot fill at least 2 micro-batches on each of 2 ranks, in multiples of 2. "
        "Give more samples, a smaller min_micro_batches or multiple_of, or may_be_empty=True.",
    ),
    (
        {"lengths": [5], "max_tokens": "20"},
        'max_tokens is "20" for 1 kind of token. Give one number, or one for each kind.',
    ),
    (
        {"lengths": [[5, 6]], "max_tokens": [3], "price": ["7m", "7m"]},
        "max_tokens is [3] for 2 kinds of token. Give one number, or one for each kind.",
    ),
    (
        {"lengths": [[5, 6]]},
        "There are 1 prices for 2 kinds of token. Give one price for each.",
    ),
    (
        {"lengths": [5], "price": None},
        'Samples need one price: price="llama3-8b", your model\'s config or a LoadCurve; '
        "or seconds, one number per sample.",
    ),
    (
        {"lengths": [5], "price": 7},
        "price is 7. Give a preset's name such as llama3-8b, a ModelSpec, the dict of a "
        "config.json, or a LoadCurve.",
    ),
    (
        {"lengths": [5], "price": None, "seconds": [1, 2]},
        "Prices have shape (2,) for 1 samples. Give one price per sample, or a row of "
        "prices, one for each phase.",
    ),
    (
        {"lengths": [5], "price": None, "seconds": [-1.0]},
        "Sample 0 has a price of -1 s. Prices are 0 or more, and finite.",
    ),
    (
        {"lengths": [5], "price": None, "seconds": [float("inf")]},
        "Sample 0 has a price of inf s. Prices are 0 or more, and finite.",
    ),
    (
        {"lengths": [5], "price": None, "seconds": [0]},
        "Prices add up to 0 s, so there is nothing to even out. Give each sample its seconds.",
    ),
    (
        {"lengths": [5, 5], "price": None, "seconds": [1, 1], "groups": [[0, 1]]},
        "Given seconds say what a sample costs, not what its prefix does. Give a price "
        "in place of seconds, or shares_prefix=False.",
    ),
    (
        {"lengths": [5, 5], "groups": [[0, 2]]},
        "Group 0 names sample 2. Samples are 0 to 1.",
    ),
    (
        {"lengths": [5, 5], "groups": [[0], [0]]},
        "Sample 0 is in group 0 and in group 1. Name each sample once.",
    ),
    (
        {"lengths": [5, 5], "groups": [[]]},
        "Group 0 has no samples. Leave it out.",
    ),
    (
        {"lengths": [5, 5], "groups": ["01"]},
        'Group 0 has "01" as members. Give a list of samples, such as [0, 1, 2, 3], or '
        "Shared(tokens, [0, 1, 2, 3]).",
    ),
    (
        {"lengths": [5, 5], "groups": 3},
        "groups is 3. Give a list of groups, each a list of samples or a Shared(tokens, samples).",
    ),
    (
        {"lengths": [5, 5], "groups": [S(6, [0, 1])]},
        "Sample 0 has 5 tokens, and its group's prefix has 6. Give whole lengths, prompt "
        "and answer together.",
    ),
    (
        {"lengths": [5, 5], "groups": [S(-1, [0, 1])]},
        "Group 0 has a prefix of -1 tokens. Give 0 to 2,147,483,647.",
    ),
    (
        {"lengths": [50, 50], "groups": [S(10, [0, 1])], "max_tokens": 60},
        "Group 0 has 90 tokens and stays together, but a micro-batch holds 60. Give "
        "max_tokens=90, or shares_prefix=False.",
    ),
    (
        {"lengths": [[5, 5], [5, 5]], "groups": [[0, 1]], "price": ["7m", "7m"]},
        "Samples that share a prefix must have one kind of token. Give one length per "
        "sample, or shares_prefix=False.",
    ),
    (
        {"lengths": [5], "equal_counts": False},
        "Ranks that meet in each micro-batch need equally many of them. Give "
        "equal_counts=True, or meets_each_turn=False.",
    ),
    (
        {"lengths": [5], "equal_counts": False, "pipeline": 2},
        "Ranks of a pipeline need equally many micro-batches. Give equal_counts=True.",
    ),
    (
        {"lengths": [5], "divides": True, "price": None, "seconds": [1]},
        "Samples of given seconds are not divided. Give divides=False, or leave that out.",
    ),
    (
        {"lengths": [5], "schedule": "1b1f", "pipeline": 2},
        'No pipeline strategy is called "1b1f". Nearest: 1f1b. All: gpipe, 1f1b, '
        "interleaved, zb-h1, zb-h2, interleaved-zb, zb-v, dualpipe-v, v-half, v-min, "
        "auto, skip-partial, skip-reordered.",
    ),
]


@pytest.mark.parametrize(("wrong", "message"), REFUSED)
def test_what_is_refused_says_what_to_do(wrong, message) -> None:
    arguments = {"price": "7m", **wrong}
    with pytest.raises(EquipoiseError) as caught:
        balance.batch(**arguments)
    assert str(caught.value) == message


def test_too_deep_a_tree_is_refused() -> None:
    tree = S(0, [0])
    for _ in range(70):
        tree = S(0, [tree])
    with pytest.raises(EquipoiseError) as caught:
        balance.batch([5], price="7m", groups=[tree])
    assert str(caught.value) == (
        "Group 0 has more than 64 prefixes inside each other. Join those with one member."
    )


def test_what_cannot_be_counted_is_refused() -> None:
    with pytest.raises(EquipoiseError) as caught:
        balance.batch(np.full(3, 2**31 - 1), price="llama3-405b")
    assert str(caught.value).startswith("3 samples of up to 2,147,483,647 tokens cost up to ")


def test_lengths_in_half_precision_are_counted_in_full() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        half = balance.batch(np.array([60_000] * 5, dtype=np.float16), 2, price="7m")
    full = balance.batch([int(np.float16(60_000))] * 5, 2, price="7m")
    assert half.digest == full.digest


def test_a_curve_of_something_else_is_refused() -> None:
    with pytest.raises(SpecError) as refusal:
        balance.device_curve("llama3-8b", None)  # type: ignore[arg-type]
    assert str(refusal.value) == (
        'A curve needs a model and a device, not "llama3-8b" and null. Give their names, as in '
        'device_curve("llama3-8b", "h100-sxm").'
    )
