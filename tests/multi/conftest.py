"""A corpus as tokens, and a way for tests and ranks to find each other's functions."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from equipoise.cli.main import main
from equipoise.comm.local import run_ranks
from equipoise.data.cache.store import TokenStore, prepare
from equipoise.data.progress import SilentProgress
from equipoise.spec.run.spec import DataSpec
from equipoise.train.request import resolve_run
from support.launch.held import OBEY, Held

# Ranks are other processes: they import by name what the tests hand to ``run_ranks``.
from support.make_run import MakeRun, write_run
from support.ranks.curve_ranks import obtain


@pytest.fixture(scope="session")
def store(texts: Path, cache: Path) -> TokenStore:
    """The tokens of the small corpus."""
    spec = DataSpec(source="text", path=str(texts), vocab=300, cache=str(cache))
    return prepare(spec, texts, progress=SilentProgress(), workers=1)


@pytest.fixture
def make_run(store: TokenStore) -> MakeRun:
    return MakeRun(store)


@pytest.fixture(scope="session")
def priced(texts: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the price curve of ``write_run``'s runs on two ranks, for ``share_curve``.

    What is measured while other tests use the cores is not kept in a cache, so each run would
    measure for some seconds.
    """
    root = tmp_path_factory.mktemp("priced")
    run = resolve_run(write_run(root, texts, cache, layout="dp = 2"))
    run_ranks(2, obtain, run.spec, run.model, root / "cache", root)
    return root


@pytest.fixture(scope="session")
def obeying(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder from which ranks import what obeys ``Held``."""
    folder = tmp_path_factory.mktemp("obeying")
    (folder / "sitecustomize.py").write_text(OBEY)
    return folder


@pytest.fixture
def held(obeying: Path, monkeypatch: pytest.MonkeyPatch) -> type[Held]:
    """Gives orders to the ranks of a run, whose launcher is started in this test."""
    monkeypatch.setenv("PYTHONPATH", str(obeying), prepend=os.pathsep)
    return Held


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
