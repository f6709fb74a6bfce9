"""A corpus of a few kilobytes with a long tail, and a home in which nothing was ever measured."""

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Tests run beside each other, and ranks within them: a pool of threads for each would make small
# operators ten times slower. Read by torch when it is imported, and by the processes it starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests send Ctrl-C to what they start; of a job in the background that would be ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A test asserts what is so, never how fast: a slow machine is no counterexample.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "seven", "wizards", "boxing", "jugs"]
SIZES = (4, 12, 20, 40, 40, 80, 160, 420)


@pytest.fixture(scope="session", autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads what this machine was calibrated to do, nor any other of its user's files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty text files of 4 to 420 words, always the same."""
    folder = tmp_path_factory.mktemp("corpus") / "texts"
    folder.mkdir()
    draw = random.Random(0)
    for number in range(40):
        words = draw.choices(WORDS, k=SIZES[number % len(SIZES)])
        (folder / f"{number:02}.txt").write_text(" ".join(words))
    return folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token caches and price curves, shared by the tests of a session."""
    return tmp_path_factory.mktemp("cache")
