"""A folder with a tokenizer and a chat template."""

from pathlib import Path

import pytest

from support.chat.template import write_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "model")
