"""A corpus as tokens, and a way for tests and ranks to find each other's functions."""

import sys
from pathlib import Path

import pytest

from equipoise.data.progress import SilentProgress
from equipoise.data.store import TokenStore, prepare
from equipoise.spec.run import DataSpec

# Ranks are other processes: they import by name what the tests hand to ``run_ranks``.
sys.path.insert(0, str(Path(__file__).parent))

from make_run import MakeRun


@pytest.fixture(scope="session")
def store(texts: Path, cache: Path) -> TokenStore:
    """The tokens of the small corpus."""
    spec = DataSpec(source="text", path=str(texts), vocab=300, cache=str(cache))
    return prepare(spec, texts, progress=SilentProgress(), workers=1)


@pytest.fixture
def make_run(store: TokenStore) -> MakeRun:
    return MakeRun(store)
