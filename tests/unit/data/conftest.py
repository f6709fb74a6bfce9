"""A small corpus with a long tail: some files of the standard library, copied."""

import sysconfig
from pathlib import Path

import pytest

from equipoise.base.errors import EquipoiseError
from equipoise.data.cache.store import TokenStore, prepare
from equipoise.data.progress import SilentProgress
from equipoise.spec.run.spec import DataSpec

_FOLDERS = ("json", "email", "asyncio", "unittest", "importlib")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 2 MB in 100 files and several folders, one empty file among them."""
    root = tmp_path_factory.mktemp("corpus") / "texts"
    stdlib = Path(sysconfig.get_path("stdlib"))
    for folder in _FOLDERS:
        for path in sorted((stdlib / folder).rglob("*.py")):
            copy = root / path.relative_to(stdlib)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    (root / "empty.txt").write_text("")
    return root


@pytest.fixture(scope="session")
def store(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """The corpus as tokens, made by this process alone."""
    spec = DataSpec(
        source="text", path=str(corpus), vocab=400, cache=str(tmp_path_factory.mktemp("cache"))
    )
    return prepare(spec, corpus, progress=SilentProgress(), workers=1)


@pytest.fixture
def message():
    """The whole text of the error that a call raises."""

    def of(kind: type[EquipoiseError], call, *args, **kwargs) -> str:
        with pytest.raises(kind) as caught:
            call(*args, **kwargs)
        return str(caught.value)

    return of
