"""Fast memory goes to the rows with the most lookups for a byte."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balance.tables.tiers import deal_slots
from equipoise.base.errors import SpecError

ROWS = st.lists(st.integers(0, 9), min_size=1, max_size=3)


def served(counts: dict[str, np.ndarray], slots: tuple[int, ...]) -> int:
    chosen = zip(counts.values(), slots, strict=True)
    return int(sum(np.sort(each)[::-1][:count].sum() for each, count in chosen))


@given(st.lists(st.tuples(ROWS, st.integers(1, 4)), max_size=4), st.integers(0, 30), st.booleans())
def test_no_other_choice_serves_more(tables: list, memory: int, is_even: bool) -> None:
    counts = {str(at): np.array(rows) for at, (rows, _) in enumerate(tables)}
    sizes = {str(at): 2 if is_even else size for at, (_, size) in enumerate(tables)}
    answer = deal_slots(counts, sizes, memory)
    assert answer.held_bytes == sum(sizes[n] * c for n, c in answer.slots.items()) <= memory
    ours = served(counts, tuple(answer.slots.values()))
    best = 0
    for slots in itertools.product(*(range(len(rows) + 1) for rows in counts.values())):
        if sum(sizes[n] * c for n, c in zip(counts, slots, strict=True)) <= memory:
            best = max(best, served(counts, slots))
    most = max((int(each.max()) for each in counts.values()), default=0)
    assert best - (0 if is_even else most) <= ours <= best


def test_a_negative_memory_is_refused() -> None:
    with pytest.raises(SpecError, match=r"^A memory of -1 bytes cannot be\. Give 0 or more\.$"):
        deal_slots({}, {}, -1)
