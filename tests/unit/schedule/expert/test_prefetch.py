"""Prefetch of experts: whatever the sizes, everything is there before it is used, and fits."""

import dataclasses
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.base.errors import LayoutError
from equipoise.schedule.expert.check_prefetch import check_prefetch
from equipoise.schedule.expert.prefetch import (
    Ahead,
    Buffer,
    SliceBytes,
    schedule_prefetch,
    there_and_back,
    updates,
    upward,
)


@settings(max_examples=20, deadline=None)
@given(
    layers=st.integers(1, 8),
    slice_bytes=st.integers(1, 5),
    ranks=st.integers(1, 4),
    moments=st.integers(0, 3),
    more=st.integers(0, 60),
    phases=st.lists(st.sampled_from(["train", "eval", "update"]), min_size=1, max_size=5),
    ahead=st.sampled_from([None, Ahead(0, 0), Ahead(0, 1)]),
)
def test_everything_is_there_before_it_is_used(
    layers: int,
    slice_bytes: int,
    ranks: int,
    moments: int,
    more: int,
    phases: list[str],
    ahead: Ahead | None,
) -> None:
    whole = slice_bytes * ranks if ranks > 1 else 0
    sizes = SliceBytes(slice_bytes, slice_bytes * moments, whole)
    capacity = sizes.least + more
    visits = {"train": there_and_back, "eval": upward, "update": updates}
    held: frozenset[Buffer] = frozenset()
    for phase in phases:
        asked = visits[phase](layers)
        plan = schedule_prefetch(
            sizes, capacity, asked, before=held, later=there_and_back(layers), ahead=ahead
        )
        check_prefetch(plan)
        assert [turn.visit for turn in plan.turns] == asked
        assert plan.peak_bytes <= capacity
        if ahead is None:
            # Both ways are a layer ahead: only the first visit asks for itself.
            assert not any(turn.demand for turn in plan.turns[1:])
        again = schedule_prefetch(
            sizes, capacity, asked, before=held, later=there_and_back(layers), ahead=ahead
        )
        assert again.turns == plan.turns
        held = plan.after
    if capacity >= layers * (slice_bytes + sizes.moments + whole):
        one, other = (
            schedule_prefetch(sizes, capacity, there_and_back(layers), before=held)
            for _ in range(2)
        )
        # Memory for everything: what was fetched once stays.
        assert (
            schedule_prefetch(sizes, capacity, there_and_back(layers), before=one.after).moves == []
        )
        assert other.turns == one.turns


def test_the_layers_at_the_turn_are_gathered_once() -> None:
    sizes, layers = SliceBytes(1, 2, 2), 6
    plan = schedule_prefetch(sizes, sizes.least, there_and_back(layers))
    # Upward all of them; downward all but the last two, which are still there.
    assert plan.gathers == layers + layers - 2
    assert plan.read_bytes == plan.gathers * sizes.slice
    again = schedule_prefetch(sizes, sizes.least, there_and_back(layers), before=plan.after)
    assert again.gathers == 2 * (layers - 2)
    update = schedule_prefetch(sizes, sizes.least, updates(layers), before=again.after)
    assert update.written_bytes == layers * 3
    on_demand = schedule_prefetch(sizes, sizes.least, there_and_back(layers), ahead=Ahead(0, 0))
    assert on_demand.demanded > plan.demanded == 2


def test_a_schedule_with_one_move_more_or_less_is_refused() -> None:
    sizes = SliceBytes(1, 2, 2)
    plan = schedule_prefetch(sizes, sizes.least, there_and_back(4))
    refused = []
    for at, turn in enumerate(plan.turns):
        for part in ("demand", "ahead"):
            moves = getattr(turn, part)
            for n, move in enumerate(moves):
                for other in ((), (move, move)):
                    changed = dataclasses.replace(
                        turn, **{part: (*moves[:n], *other, *moves[n + 1 :])}
                    )
                    turns = (*plan.turns[:at], changed, *plan.turns[at + 1 :])
                    with pytest.raises(LayoutError) as caught:
                        check_prefetch(dataclasses.replace(plan, turns=turns))
                    refused.append(str(caught.value))
    text = "\n".join(refused)
    for said in (
        "which is not in memory.",
        "which is in memory.",
        "whose slice is not in memory.",
        "holds 7 B, more than 6 B.",
    ):
        assert said in text, said
    with pytest.raises(LayoutError, match="more than 5 B"):
        check_prefetch(dataclasses.replace(plan, capacity=5))


def test_what_does_not_hold_two_layers_is_refused() -> None:
    sizes = SliceBytes(1 << 20, 2 << 20, 0)
    sizes.require(6 << 20, layers=4)
    with pytest.raises(LayoutError) as caught:
        sizes.require((6 << 20) - 1, layers=4)
    assert str(caught.value).endswith("Set it to 6 or more, or to 0 for no limit.")


@pytest.mark.parametrize("slice_bytes", [1, 1000, 4_315_743_915, 1 << 40])
def test_the_capacity_that_a_refusal_names_is_enough(slice_bytes: int) -> None:
    sizes = SliceBytes(slice_bytes, 2 * slice_bytes, 0)
    with pytest.raises(LayoutError) as caught:
        sizes.require(sizes.least - 1, layers=3)
    named = re.search(r"Set it to ([\d.]+) or more", str(caught.value))
    assert named is not None
    sizes.require(int(float(named[1]) * 2**20), layers=3)
