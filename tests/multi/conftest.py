"""A corpus as tokens, and a way for tests and ranks to find each other's functions."""

from collections.abc import Callable
from pathlib import Path

import pytest

from equipoise.cli.main import main
from equipoise.data.cache.store import TokenStore, prepare
from equipoise.data.progress import SilentProgress
from equipoise.spec.run.spec import DataSpec

# Ranks are other processes: they import by name what the tests hand to ``run_ranks``.
from support.make_run import MakeRun


@pytest.fixture(scope="session")
def store(texts: Path, cache: Path) -> TokenStore:
    """The tokens of the small corpus."""
    spec = DataSpec(source="text", path=str(texts), vocab=300, cache=str(cache))
    return prepare(spec, texts, progress=SilentProgress(), workers=1)


@pytest.fixture
def make_run(store: TokenStore) -> MakeRun:
    return MakeRun(store)


@pytest.fixture
def refused(
    tmp_path: Path, texts: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[[list[str]], str]:
    """What ``equipoise train`` says to flags that it refuses, on one line."""

    def run(flags: list[str]) -> str:
        data = [f"--data.path={texts}", "--data.source=text", f"--data.cache={cache}"]
        assert main(["train", "--out", str(tmp_path / "run"), *data, *flags]) == 2
        return " ".join(capsys.readouterr().err.split())

    return run
