"""A corpus of a few kilobytes with a long tail, and a home in which nothing was ever measured."""

import gc
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from support.launch.stems import keep_stems

# Tests run beside each other, and ranks within them: a pool of threads for each would make small
# operators ten times slower. Read by torch when it is imported, and by the processes it starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")

gc.disable()  # until all tests are collected, which makes hardly any garbage

# Tests send Ctrl-C to what they start; of a job in the background that would be ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A test asserts what is so, never how fast: a slow machine is no counterexample.
# Examples are others in each run, so 25 of each test find in two runs what fifty do in one.
settings.register_profile("unhurried", deadline=None, max_examples=25)
settings.register_profile("quick", deadline=None, max_examples=10)  # for make quick alone
settings.load_profile("unhurried")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Let the quick profile bound a test's own ``max_examples``, too, which would else win."""
    test = getattr(item, "function", None)
    # Hypothesis has no public way to read or change what a test was decorated with.
    asked = getattr(test, "_hypothesis_internal_use_settings", None)
    if asked is None or settings.get_current_profile_name() != "quick":
        return
    most = settings.get_profile("quick").max_examples
    if asked.max_examples > most:
        vars(test)["_hypothesis_internal_use_settings"] = settings(asked, max_examples=most)


def pytest_collection_finish() -> None:
    """Leave what thousands of tests and their imports hold out of every collection of garbage."""
    gc.collect()
    gc.freeze()
    gc.enable()


WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "seven", "wizards", "boxing", "jugs"]
SIZES = (4, 12, 20, 40, 40, 80, 160, 420)


@pytest.fixture(scope="session", autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads what this machine was calibrated to do, nor what its terminal is like."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.delenv("COLUMNS", raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def _stems(_home: None) -> Iterator[None]:
    """Runs that are started in this process share what takes seconds to import."""
    with keep_stems():
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


def _can_mount() -> bool:
    probe = ["unshare", "-m", "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/mnt"]
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mount real disks for one test: ``mount(1000)`` is one of 1,000 KiB.

    ``breaks=True`` makes it one that turns read-only at ``break_disk``.
    """
    if not _can_mount():
        pytest.skip("file systems can be mounted by root alone")
    mounted: list[Path] = []

    def make(size_kib: int, *, breaks: bool = False) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        words = ["-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs"]
        if breaks:
            image = tmp_path / f"disk{len(mounted)}.img"
            with image.open("wb") as file:
                file.truncate(size_kib << 10)
            subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
            words = ["-o", "loop,errors=remount-ro", str(image)]
        subprocess.run(["mount", *words, str(folder)], check=True)
        mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _break(folder: Path) -> None:
    """Let a disk's file system find itself damaged, which makes it read-only."""
    device = subprocess.run(
        ["findmnt", "-no", "SOURCE", str(folder)], check=True, capture_output=True, text=True
    ).stdout.strip()
    trigger = Path("/sys/fs/ext4") / Path(device).name / "trigger_fs_error"
    trigger.write_text("1")


@pytest.fixture
def break_disk() -> Callable[[Path], None]:
    """Turns a disk that ``mount`` made with ``breaks`` read-only under its writers."""
    return _break
