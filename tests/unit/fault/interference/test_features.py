"""What a predictor reads does not depend on how fast the machine is."""

import numpy as np

from equipoise.fault.interference.features import WINDOW, Scale, flatten, relative
from equipoise.fault.interference.metrics import METRICS

PROBES = [at for at, name in enumerate(METRICS) if name.startswith("probe_")]


def drawn(count: int) -> np.ndarray:
    return np.random.default_rng(0).lognormal(0, 2, (count, len(METRICS)))


def test_a_machine_half_as_fast_has_the_same_features() -> None:
    rows = drawn(40)
    slower = rows.copy()
    slower[:, PROBES] *= 2
    np.testing.assert_allclose(relative(rows), relative(slower))
    assert not np.shares_memory(rows, relative(rows))


def test_rows_come_out_around_zero_and_unknown_ones_at_zero() -> None:
    rows = drawn(400)
    scale = Scale.learn(relative(rows))
    scaled = scale.apply(relative(rows))
    assert np.abs(scaled.mean(0)).max() < 0.1 and np.abs(scaled).max() <= 4
    rows[:, 5] = np.nan
    rows[:, PROBES[0]] = np.nan
    made = scale.apply(relative(rows))
    assert not made[:, [5, PROBES[0]]].any() and np.isfinite(made).all()


def test_a_window_is_its_last_second_and_its_mean() -> None:
    window = drawn(WINDOW)[None]
    flat = flatten(window)
    assert flat.shape == (1, 2 * len(METRICS))
    np.testing.assert_array_equal(flat[0, : len(METRICS)], window[0, -1])
    np.testing.assert_allclose(flat[0, len(METRICS) :], window[0].mean(0))
