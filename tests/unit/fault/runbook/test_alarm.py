"""After a fault the launcher names the guide that fits."""

from pathlib import Path

import pytest

from equipoise.fault.recover import name_guide
from equipoise.launch.explain import RanksEnd

KILLED = "Rank 1 of 2 (pid 7) was ended by SIGKILL; it left no traceback."


@pytest.mark.parametrize(
    ("kind", "sentence", "guide"),
    [
        ("killed", KILLED, "rank-lost"),
        ("hung", "Rank 0 has waited 31 s in all_gather.", "hung-collective"),
        ("non-finite", "The loss of step 3 is not a number.", "number-gone-bad"),
        ("failed", "Rank 1 of 2 failed: ValueError: a bad document", "rank-lost"),
        ("failed", "Rank 0 of 2 failed: RuntimeError: CUDA out of memory.", "out-of-memory"),
        ("refused", "layout.dp does not fit.", ""),
    ],
)
def test_an_end_names_its_guide(kind: str, sentence: str, guide: str) -> None:
    line = name_guide(Path("runs/my run"), RanksEnd(kind, sentence, 1, 3))
    said = f"To find out why: equipoise drill --runbook {guide} 'runs/my run'\n"
    assert line == (said if guide else "")
