"""How a trial ended: each cause is told apart, and a trial over its limit leaves nothing behind."""

from pathlib import Path

import pytest

from equipoise.launch.trial import TrialEnd, cause_of, last_words, run_trial

KILLED = (
    "Rank 1 of 2 (pid 7) was ended by SIGKILL; it left no traceback. Run the same command again to "
    "resume from the last checkpoint."
)
ALLOCATES = (
    "Rank 0 of 2 failed: RuntimeError: [enforce fail at alloc_cpu.cpp:123] DefaultCPUAllocator: "
    "can't allocate memory: you tried to allocate 9 bytes. Run the same command again to resume "
    "from the last checkpoint.\nTraceback (most recent call last):\n  File"
)
HANGS = (
    "Rank 0 has waited 30 s in all-reduce 4 (step 2), to which rank 1 has not come: it is silent. "
    "Run the same command again to resume from the last checkpoint; if a rank was only slow, "
    "raise layout.deadline_s = 30."
)


@pytest.mark.parametrize(
    ("code", "said", "cause"),
    [
        (2, "layout.tp = 3 does not divide 4 heads.", "refused"),
        (3, "It needs 9 GiB.", "does not fit"),
        (6, KILLED, "killed"),
        (6, ALLOCATES, "out of memory"),
        (6, "Rank 0 of 1 failed: OutOfMemoryError: CUDA out of memory.", "out of memory"),
        (6, HANGS, "hang"),
        (6, "Step 3: the loss is nan.", "fault"),
        (1, "Traceback (most recent call last):\n  File\nMemoryError", "out of memory"),
        (-11, "", "fault"),
    ],
)
def test_causes(code: int, said: str, cause: str) -> None:
    assert cause_of(code, said) == cause


def test_last_words() -> None:
    assert last_words(6, KILLED) == (
        "Rank 1 of 2 (pid 7) was ended by SIGKILL; it left no traceback."
    )
    assert last_words(6, ALLOCATES).endswith(
        "can't allocate memory: you tried to allocate 9 bytes."
    )
    assert last_words(6, HANGS).endswith("to which rank 1 has not come: it is silent.")
    assert last_words(1, "Traceback (most recent call last):\n  File\nValueError: no") == (
        "ValueError: no"
    )
    assert last_words(-11, "") == "It returned -11 without a word."


def test_a_refused_run(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    found = run_trial([str(file)], tmp_path / "trial", limit_s=60)
    text = f'No such file: {file}. "equipoise init" writes a run.toml to start from.'
    assert found == TrialEnd(None, "refused", text, found.wall_s)


def test_a_trial_over_its_limit(tmp_path: Path) -> None:
    found = run_trial([], tmp_path / "trial", limit_s=0.01)
    text = "No end after 0.01 s. Raise --trial-seconds if it was only slow."
    assert found == TrialEnd(None, "time limit", text, found.wall_s)
    assert found.wall_s < 30
