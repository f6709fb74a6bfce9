"""Parts of rows on their way: what they hide, and how many are best."""

from hypothesis import given
from hypothesis import strategies as st

from equipoise.cost.overlap import PARTS, best_parts, parts_s

seconds = st.floats(1e-6, 1.0)


@given(seconds, seconds, st.floats(0.0, 0.1), st.floats(0.0, 1.0))
def test_the_choice_is_the_best_and_never_slower_than_one_part(
    compute_s: float, move_s: float, part_s: float, shared: float
) -> None:
    known = {"compute_s": compute_s, "move_s": move_s, "part_s": part_s, "shared": shared}
    times = {parts: parts_s(parts, **known) for parts in PARTS}
    assert times[best_parts(**known)] == min(times.values()) <= compute_s + move_s
    assert min(times.values()) >= max(compute_s, move_s)


def test_cores_that_send_hide_nothing() -> None:
    assert best_parts(compute_s=1.0, move_s=1.0, part_s=1e-9, shared=1.0) == 1
    assert best_parts(compute_s=1.0, move_s=1.0, part_s=1e-9) == 16
