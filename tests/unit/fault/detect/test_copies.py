"""Whose copy has changed."""

from hypothesis import given
from hypothesis import strategies as st

from equipoise.fault.detect.copies import Corruption, judge_copies

NAMES = ("a", "b", "c")


@given(
    st.integers(1, 3).flatmap(
        lambda groups: st.tuples(st.just(groups), st.integers(3, 5), st.integers(0, 10_000))
    )
)
def test_a_minority_is_named_with_its_tensors(drawn: tuple[int, int, int]) -> None:
    """Groups of ranks that hold the same, of which less than half has changed a tensor."""
    groups, size, seed = drawn
    sums = []
    wrong = set()
    for group in range(groups):
        holders = tuple(range(group, groups * size, groups))
        bad = holders[1 + seed % (size - 1)]
        for rank in holders:
            own = {name: (holders, 7 * group + at) for at, name in enumerate(NAMES)}
            if rank == bad:
                own["b"] = (holders, 99)
                wrong.add(rank)
            sums.append((rank, own))
    ordered = [own for _, own in sorted(sums, key=lambda each: each[0])]
    assert judge_copies(ordered) == Corruption(tuple(sorted(wrong)), ("b",), is_certain=True)


def test_two_that_differ_are_both_under_suspicion() -> None:
    pair = (0, 1)
    found = judge_copies([{"a": (pair, 1), "b": (pair, 2)}, {"a": (pair, 1), "b": (pair, 3)}])
    assert found == Corruption((0, 1), ("b",), is_certain=False)
    assert str(found.error(7, 5)) == (
        "One of ranks 0, 1 holds bytes that differ from the others' copy: b. Step 7 has changed "
        "nothing; checkpoints after step 5 are not trusted and were set aside. Run the same "
        "command again to resume from the last checkpoint before; if it happens again, test the "
        "memory of the host."
    )
    assert (found.error(7, 5).verified, found.error(7, 5).rank) == (5, None)
    assert Corruption((2,), ("a",), is_certain=True).error(7, 5).rank == 2


def test_equal_copies_and_what_nobody_else_holds_are_right() -> None:
    assert judge_copies([{"a": ((0, 1), 1), "b": ((0,), 5)}, {"a": ((0, 1), 1)}]) is None
    assert judge_copies([{}, {}]) is None
