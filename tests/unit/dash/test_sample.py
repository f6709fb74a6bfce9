import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from equipoise.dash.sample import bucket, choose_evenly


@given(st.integers(0, 5000), st.integers(2, 80), st.integers(0, 20))
def test_even_choices_hold_first_and_last(count: int, most: int, tail: int) -> None:
    chosen = choose_evenly(count, most, tail=tail)
    assert len(chosen) <= most and chosen == sorted(set(chosen))
    assert set(chosen) <= set(range(count))
    if count:
        assert chosen[0] == 0 and chosen[-1] == count - 1
    assert chosen[len(chosen) - min(tail, most - 1, len(chosen)) :] == list(
        range(count - min(tail, most - 1, len(chosen)), count)
    )


def test_everything_is_chosen_where_it_fits() -> None:
    assert choose_evenly(5, 5) == [0, 1, 2, 3, 4] and choose_evenly(0, 5) == []
    assert choose_evenly(100, 6, tail=3) == [0, 48, 96, 97, 98, 99]


@given(st.lists(st.floats(-9, 9) | st.just(float("nan"))), st.integers(1, 50))
def test_buckets_hold_each_known_value_once(values: list[float], most: int) -> None:
    array = np.array(values, dtype=np.float64)
    parts = bucket(array, most)
    assert len(parts) <= most
    joined = np.concatenate(parts) if parts else np.array([], dtype=np.intp)
    assert joined.tolist() == np.flatnonzero(~np.isnan(array)).tolist()
    sizes = [part.size for part in parts]
    assert len(set(sizes[:-1])) <= 1 and (not sizes or 0 < sizes[-1] <= sizes[0])
