"""Caches of rows: what is in a slot, what leaves, and what no policy can beat."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.base.errors import SpecError
from equipoise.schedule.tiers.cache import CACHE_POLICIES, SetCache
from equipoise.schedule.tiers.replay import bound_hits, replay_hits

STEPS = st.lists(
    st.sets(st.integers(0, 11), max_size=5).map(
        lambda rows: np.array(sorted(rows), dtype=np.int64)
    ),
    max_size=14,
)


@given(STEPS, st.integers(0, 7), st.integers(1, 4), st.sampled_from(CACHE_POLICIES))
def test_a_row_is_in_one_slot_or_none(steps: list, slots: int, ways: int, policy: str) -> None:
    cache = SetCache(12, slots, policy, ways=ways)
    if policy == "trace":
        cache.expect(steps, 0)
    inside: dict[int, int] = {}
    for rows in steps:
        found = cache.find(rows)
        assert found.tolist() == [inside.get(row, -1) for row in rows.tolist()]
        admission = cache.admit(rows)
        assert not set(admission.leaving.tolist()) & set(rows.tolist())
        for row, slot in zip(admission.leaving.tolist(), admission.left.tolist(), strict=True):
            assert inside.pop(row) == slot
        for row, slot in zip(rows.tolist(), admission.slots.tolist(), strict=True):
            assert row not in inside or inside[row] == slot  # who is in stays
            if slot >= 0:
                inside[row] = slot
        assert len(set(inside.values())) == len(inside) <= cache.slots <= slots
    assert replay_hits(steps, slots, policy, ways=ways).sum() <= bound_hits(steps, slots)


@settings(max_examples=20)
@given(st.lists(st.sampled_from([[0], [1], [2], [0, 1], [1, 2]]), max_size=6), st.integers(1, 2))
def test_the_bound_is_that_of_brute_force(trace: list, slots: int) -> None:
    steps = [np.array(rows, dtype=np.int64) for rows in trace]
    best = {frozenset[int](): 0}
    for rows in trace:
        now: dict[frozenset[int], int] = {}
        for held, hits in best.items():
            hits += len(held & set(rows))
            every = held | set(rows)
            for size in range(min(slots, len(every)) + 1):
                for kept in map(frozenset, itertools.combinations(sorted(every), size)):
                    now[kept] = max(now.get(kept, 0), hits)
        best = now
    assert bound_hits(steps, slots) == max(best.values())


def test_policies_keep_what_they_value() -> None:
    steps = [np.array([row]) for row in (0, 0, 0, 1, 2, 0, 3, 1)]
    hits = {p: replay_hits(steps, 2, p, ways=2).tolist() for p in CACHE_POLICIES}
    assert hits["lru"] == [0, 1, 1, 0, 0, 0, 0, 0]
    assert hits["lfu"] == [0, 1, 1, 0, 0, 1, 0, 1]
    assert hits["trace"] == [0, 1, 1, 0, 0, 1, 0, 1]
    assert bound_hits(steps, 2) == 4


def test_a_cache_goes_on_from_its_arrays() -> None:
    source = np.random.default_rng(0)
    steps = [np.unique(source.integers(0, 40, 9)) for _ in range(30)]
    for policy in CACHE_POLICIES:
        whole, begun, gone_on = (SetCache(40, 12, policy, ways=4) for _ in range(3))
        for cache in (whole, begun):
            cache.expect(steps, 0)
            for rows in steps[:15]:
                cache.admit(rows)
        assert gone_on.restore({name: part.copy() for name, part in begun.arrays().items()})
        gone_on.expect(steps, 0)
        for rows in steps[15:]:
            assert gone_on.admit(rows).slots.tolist() == whole.admit(rows).slots.tolist(), policy
        assert not SetCache(40, 8, policy, ways=4).restore(whole.arrays())


def test_what_is_wrong_is_one_sentence() -> None:
    with pytest.raises(
        SpecError, match=r'^"mru" is not a policy of a cache\. Choose from lru, lfu, trace\.$'
    ):
        SetCache(4, 2, "mru")
    with pytest.raises(
        SpecError,
        match=r"^A cache of -1 slots in sets of 2 cannot be\. Give 0 or more slots, and sets of 1 "
        r"or more\.$",
    ):
        SetCache(4, -1, ways=2)
    with pytest.raises(SpecError) as error:
        SetCache(1 << 31, 2)
    assert str(error.value) == (
        "A cache before 2,147,483,648 rows cannot be: its tags have 4 bytes. Divide the table over "
        "more shards."
    )
