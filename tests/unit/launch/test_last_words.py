"""Words of ranks reach their launcher whatever becomes of any disk."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from equipoise.launch.last_words import VARIABLE, listen, say, say_step

SAY = """
import sys
from equipoise.launch.last_words import say, say_step
for rank in range(40):
    say({"rank": rank, "name": "exception", "message": "m" * 50_000, "traceback": "t" * 50_000})
    say_step(rank)
"""


def test_words_come_whole_and_in_order_from_a_process_that_can_write_nowhere() -> None:
    with listen() as (address, heard):
        done = subprocess.run(
            ["prlimit", "--fsize=0", sys.executable, "-c", SAY],
            env=os.environ | {VARIABLE: address},
            check=False,
        )
    assert done.returncode == 0
    assert [words["rank"] for words in heard.errors] == list(range(40))
    assert {(len(words["message"]), len(words["traceback"])) for words in heard.errors} == {
        (20_000, 20_000)
    }
    assert heard.step is not None and 0 <= heard.step < 40  # those that found no room are lost


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = {"rank": 0, "name": "error", "message": "One sentence.", "traceback": ""}
    monkeypatch.delenv(VARIABLE, raising=False)
    say(words)
    monkeypatch.setenv(VARIABLE, "gone")
    say(words)
    say_step(1)
    assert list(tmp_path.iterdir()) == []
