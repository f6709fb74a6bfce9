"""Bits that flip in the memory of one rank, in every kind of its state, at every stage of ZeRO.

Each run is a proof that its fault was injected: without ``fault.fingerprint_steps`` it ends well.
"""

import pytest

from equipoise.comm.local import run_ranks
from support.health import flips

PARTS = {
    "weight": (4, "weight", "flip"),
    "zero": (4, "exp_avg", "sign"),
    "swap": (5, "exp_avg_sq", "swap"),
    "double": (6, "weight", "two equal flips"),
    "nan": (7, "weight", "nan"),
}
"""On one rank alone: after which step, in which kind of tensor, in which way."""


@pytest.mark.parametrize("zero", [1, 3])
def test_what_one_rank_holds_is_compared_with_itself(tmp_path, make_run, zero: int) -> None:
    """A checkpoint is saved at every second step; that of the step of the fault is not trusted."""
    resolved = make_run(steps=9, every_steps=2, zero=zero)
    for ended in run_ranks(2, flips.flip, tmp_path, resolved, PARTS):
        for (said, left, done), (step, kind, _) in zip(ended, PARTS.values(), strict=True):
            of = "" if kind == "weight" else f"{kind} of "
            assert said == (
                "Rank 1 holds bytes that have changed though nothing wrote to them: "
                f"{of}layers.0.feed_forward.down.weight. Step {step + 1} has changed nothing; "
                f"checkpoints after step {step - 1} are not trusted and were set aside. Run the "
                "same command again to resume from the last checkpoint before; if it happens "
                "again, test the memory of the host."
            )
            assert done == [step]
            trusted = [f"step-{each:06d}" for each in range(2, step, 2)][-2:]
            assert [name for name in left if name.startswith("step-")][-1:] == trusted[-1:]
            assert f"step-{step:06d}" not in left


COPIES = {
    "weight": (4, "weight", "flip"),
    "swap": (6, "exp_avg", "swap"),
    "nan": (6, "weight", "nan"),
}


@pytest.mark.parametrize("ranks", [2, 3])
def test_copies_are_compared_with_each_other(tmp_path, make_run, ranks: int) -> None:
    """Every 8 steps, and after each save: at steps 6 and 7. Two ranks cannot say whose is right."""
    resolved = make_run(steps=12, every_steps=5, zero=0, dp=ranks, fingerprint_steps=8)
    who = "One of ranks 0, 1 holds bytes that differ from the others' copy"
    if ranks == 3:
        who = "Rank 2 holds bytes that have changed though nothing wrote to them"
    (ended,) = {
        tuple(map(str, each)) for each in run_ranks(ranks, flips.flip, tmp_path, resolved, COPIES)
    }
    at_6, at_8, at_nan = ended
    assert f"{who}: " in at_6 and "layers.0.feed_forward.down.weight" in at_6
    assert "Step 6 has changed nothing; checkpoints after step 0 are not trusted" in at_6
    assert "'corrupt-step-000005'], [5]" in at_6
    assert "Step 8 has changed nothing; checkpoints after step 5 are not trusted" in at_8
    assert "'step-000005'], [7]" in at_8
    assert "Step 7 has changed nothing" in at_nan  # as soon as a loss is not a number


def test_without_fingerprints_the_same_fault_goes_unseen(tmp_path, make_run) -> None:
    resolved = make_run(steps=9, every_steps=2, zero=1, fingerprint_steps=0)
    faults = {"weight": PARTS["weight"]}
    for ((said, left, done),) in run_ranks(2, flips.flip, tmp_path, resolved, faults):
        assert (said, done) == ("", [9])
        assert "step-000009" in left
