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
    return load(Path(__file__).parents[1] / "unit" / "dash" / "journals.py")


@pytest.fixture(scope="session")
def devtools() -> ModuleType:
    """The driver of Chromium."""
    return load(Path(__file__).with_name("chromium.py"))
