from types import ModuleType

import pytest

import support.chromium
import support.journals


@pytest.fixture(scope="session")
def journals() -> ModuleType:
    """The writer of made-up journals."""
    return support.journals


@pytest.fixture(scope="session")
def devtools() -> ModuleType:
    """The driver of Chromium."""
    return support.chromium
