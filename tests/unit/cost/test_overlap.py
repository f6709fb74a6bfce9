"""Parts of rows on their way: what they hide, and how many are best."""

from hypothesis import given
from hypothesis import strategies as st
from pytest import approx

from equipoise.cost.overlap import PARTS, best_parts, parts_s

seconds = st.floats(1e-6, 1.0)


@given(seconds, seconds, st.floats(0.0, 0.1), st.floats(0.0, 1.0))
def test_the_choice_is_the_best_and_never_slower_than_one_part(
    compute_s: float, move_s: float, part_s: float, shared: float
) -> None:
    known = {"compute_s": compute_s, "move_s": move_s, "part_s": part_s, "shared": shared}
    times = {parts: parts_s(parts, **known) for parts in PARTS}
    least = min(times.values())
    assert times[best_parts(**known)] == least <= (compute_s + move_s) * (1 + 1e-12)
    assert times[1] == approx(compute_s + move_s)
    bytes_s = move_s - min(part_s, move_s)
    assert least * (1 + 1e-12) >= max(compute_s + min(part_s, move_s), bytes_s)


@given(seconds, seconds, st.floats(0.0, 0.1), st.floats(0.0, 1.0))
def test_one_way_is_never_slower_in_the_best_parts_than_in_one(
    compute_s: float, move_s: float, part_s: float, shared: float
) -> None:
    known = {"compute_s": compute_s, "move_s": move_s, "part_s": part_s, "shared": shared}
    times = {parts: parts_s(parts, ways=1, **known) for parts in PARTS}
    best = best_parts(ways=1, **known)
    assert times[best] == min(times.values()) <= times[1] * (1 + 1e-12)
    assert times[1] == approx(compute_s + move_s)
    assert times[best] * (1 + 1e-12) >= max(compute_s, move_s - min(part_s, move_s))


def test_half_of_what_travels_one_way_hides_in_two_parts() -> None:
    assert parts_s(2, compute_s=1.0, move_s=1.0, part_s=0.0, ways=1) == approx(1.5)
    assert parts_s(4, compute_s=2.0, move_s=1.0, part_s=0.0, ways=1) == approx(2.25)


def test_cores_that_send_hide_nothing() -> None:
    assert best_parts(compute_s=1.0, move_s=1.0, part_s=1e-9, shared=1.0) == 1
    assert best_parts(compute_s=1.0, move_s=1.0, part_s=1e-9) == 16


def test_starts_hide_behind_bytes_that_are_on_the_link() -> None:
    known = {"compute_s": 1.0, "move_s": 10.0, "part_s": 0.5}
    assert parts_s(1, **known) == approx(11.0)
    assert parts_s(2, **known) == approx(0.25 + 9.5)  # the link never waits after its first start
    assert parts_s(4, **known) == approx(0.25 + 9.5)
