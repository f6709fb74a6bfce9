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

SAY_STEPS = """
from equipoise.launch.last_words import say_step
for step in range(1, 500):
    say_step(step)
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
    # As messages, since it may write to no file at all: those that found no room are lost.
    assert heard.step is not None and 0 <= heard.step < 40


def test_the_last_step_is_known_however_many_came_while_nobody_took_them() -> None:
    with listen() as (address, heard):
        assert heard.step is None
        environment = os.environ | {VARIABLE: address}
        subprocess.run([sys.executable, "-c", SAY_STEPS], env=environment, check=True)
        assert (heard.step, heard.said) == (499, None)  # no message was needed
    assert heard.step == 499


def test_a_step_is_left_in_no_other_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As where the launcher is gone and another process has its number."""
    file = tmp_path / "another"
    file.write_text("another program's")
    monkeypatch.setenv(VARIABLE, f"gone:{file}")
    say_step(1)
    assert file.read_text() == "another program's"


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = {"rank": 0, "name": "error", "message": "One sentence.", "traceback": ""}
    monkeypatch.delenv(VARIABLE, raising=False)
    say(words)
    monkeypatch.setenv(VARIABLE, "gone")
    say(words)
    say_step(1)
    assert list(tmp_path.iterdir()) == []
