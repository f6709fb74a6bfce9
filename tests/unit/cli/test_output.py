"""Standard output that is full, closed or left: one sentence, the exit code, no traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.journals import write_run

COMMAND = (sys.executable, "-m", "equipoise.cli.main")
FULL = (
    "Standard output cannot be written (no space left on device), so not all of the answer was. "
    "Make room, or write it elsewhere: > FILE."
)
CLOSED = "Standard output is closed, so nothing could be printed. Open it, as in > /dev/null."
SMALL = (
    *("--model", "layers=4,hidden=1024,heads=8,vocab=8000", "--cluster", "h100-sxm:4"),
    *("--context-tokens", "4096", "--step-sequences", "16", "--layout", "dp=4,zero=1"),
)
VERBS = {
    "overview": ("--help",),
    "version": ("--version",),
    "init": ("init", "TMP/new"),
    "config": ("config",),
    "pack": ("pack", "--lengths", "wikipedia", "--steps", "2", "--policy", "by-work"),
    "explain attention": ("explain", "attention"),
    "explain pipeline": ("explain", "pipeline", "--json"),
    "explain experts": ("explain", "experts"),
    "explain tables": ("explain", "tables", "criteo-kaggle", "--ranks", "2"),
    "explain boxing": ("explain", "boxing", "S(0) -> B", "--mesh", "4"),
    "simulate": ("simulate", *SMALL),
    "plan": ("plan", *SMALL),
    "report": ("report", "RUN", "--out", "TMP/report.html"),
    "trace": ("trace", "RUN", "--out", "TMP/trace.json"),
    "inspect": ("inspect", "RUN"),
    "launch": ("launch",),
    "doctor": ("doctor",),
    "completion": ("completion", "bash"),
    "systems": ("systems",),
}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "run", steps=3)


def words(verb: str, run_folder: Path, tmp_path: Path) -> list[str]:
    places = {"RUN": str(run_folder), "TMP": str(tmp_path)}
    said = []
    for word in VERBS[verb]:
        for mark, place in places.items():
            word = word.replace(mark, place)
        said.append(word)
    return said


@pytest.mark.long
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("verb", VERBS)
def test_a_full_output_is_one_sentence(verb: str, run_folder: Path, tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        argv = [*COMMAND, *words(verb, run_folder, tmp_path)]
        done = subprocess.run(
            argv, stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path, check=False
        )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == FULL
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@pytest.mark.parametrize("verb", ["overview", "systems", "report", "config"])
def test_a_closed_output_is_one_sentence(verb: str, run_folder: Path, tmp_path: Path) -> None:
    argv = [*COMMAND, *words(verb, run_folder, tmp_path)]
    done = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", *argv], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, f"{CLOSED}\n")
    assert not (tmp_path / "report.html").exists()  # refused before any work


def test_a_reader_who_leaves_is_silent_even_of_tables() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    argv = [*COMMAND, "explain", "attention"]
    done = subprocess.run(argv, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_closed_error_stream_harms_nothing() -> None:
    done = subprocess.run(
        ["sh", "-c", '"$@" 2>&-', "sh", *COMMAND, "systems", "no-such"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")


def test_a_full_standard_error_keeps_the_exit_code() -> None:
    words = [sys.executable, "-m", "equipoise.cli.main", "systems", "--nope"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=full, check=False)
    assert (done.returncode, done.stdout) == (2, b"")
