"""A rank that sleeps in one part of every step is named with that part, wherever ranks meet.

Each run takes four seconds, most of them asleep; what is slow by a fifth is in
``tests/unit/fault/detect/test_slow.py``, since this machine's own noise may be more.
"""

from equipoise.comm.local import run_ranks
from support.health import slow
from support.read_run import events


def test_a_slow_rank_is_named_with_its_part(tmp_path, make_run) -> None:
    """Under ZeRO 1 ranks meet at the end of a step, under ZeRO 3 in every layer."""
    runs = {
        f"{part}-{zero}": (make_run(steps=16, zero=zero), part)
        for part, zero in (("compute", 3), ("data", 1))
    }
    run_ranks(2, slow.slow_down, tmp_path, runs)
    for name, (_, part) in runs.items():
        assert slow.verdicts(tmp_path / name) == [(1, part, "rank")], name
        (event,) = events(tmp_path / name, "slow")
        assert event["step"] <= 16
        assert event["message"].startswith(f"Rank 1 is slow: since step {event['since']} it has ")
        assert not events(tmp_path / name, "slow", rank=1)  # rank 0 speaks for all
    (own,) = {frozenset(each["own"]) for each in events(tmp_path / "data-1", "step")}
    assert own == {"data_s", "compute_s", "communication_s", "core_s"}
