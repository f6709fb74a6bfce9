from pathlib import Path
from types import ModuleType

import pytest

import support.journals


@pytest.fixture(scope="session")
def journals() -> ModuleType:
    """The writer of made-up journals."""
    return support.journals


@pytest.fixture(scope="session")
def runs(journals: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two runs of two ranks and forty steps on the same documents, by policy."""
    root = tmp_path_factory.mktemp("runs")
    return {
        policy: journals.write_run(root / policy, policy=policy)
        for policy in ("in-order", "by-work")
    }
