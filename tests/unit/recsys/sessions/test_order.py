"""Sessions: cut by gaps, whole in an epoch, each sample once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.base.errors import DataError
from equipoise.recsys.sessions.order import find_sessions, shuffle_sessions

SAMPLES = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), max_size=30)


@given(SAMPLES, st.integers(0, 100))
def test_sessions_are_cut_by_gaps_and_stay_whole(samples: list, seed: int) -> None:
    owners = np.array([owner for owner, _ in samples], dtype=str)
    stamps = np.cumsum([step for _, step in samples]).astype(float)
    sessions = find_sessions(owners, stamps, 12, "x")
    last: dict[str, tuple[float, int]] = {}
    for owner, stamp, session in zip(owners.tolist(), stamps, sessions.tolist(), strict=True):
        if owner in last:
            assert (session == last[owner][1]) == (stamp - last[owner][0] <= 12)
        last[owner] = (stamp, session)
    first = list(dict.fromkeys(sessions.tolist()))
    assert first == sorted(first)
    order = shuffle_sessions(sessions, np.random.default_rng(seed))
    assert sorted(order.tolist()) == list(range(len(samples)))
    walked = sessions[order]
    assert 1 + np.count_nonzero(np.diff(walked)) == len(first) or not samples
    assert all((np.diff(order[walked == each]) > 0).all() for each in first)


def test_an_empty_session_is_refused() -> None:
    with pytest.raises(
        DataError,
        match=r"^clicks\.csv, the column of sessions: 2 of 3 rows are empty, the first is row 2 in "
        r"order of time\. Fill them or leave these rows out\.$",
    ):
        find_sessions(np.array(["a", "", " "]), None, 1.0, "clicks.csv")
