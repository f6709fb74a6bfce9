import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def journals() -> ModuleType:
    """The writer of made-up journals."""
    return load(Path(__file__).with_name("journals.py"))


@pytest.fixture(scope="session")
def runs(journals: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two runs of two ranks and forty steps on the same documents, by policy."""
    root = tmp_path_factory.mktemp("runs")
    return {
        policy: journals.write_run(root / policy, policy=policy)
        for policy in ("in-order", "by-work")
    }
