"""A model's folder: whole or absent, and readable by those who may read a new file."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from equipoise.base.errors import ModelError
from equipoise.nn.hf.folder import whole_folder


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_weights_are_as_readable_as_any_new_file(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with whole_folder(tmp_path / "model") as partial:
            (partial / "config.json").write_text("{}")
            save_file({"a": torch.ones(1)}, partial / "model.safetensors")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()}
    assert modes == {"config.json": 0o666 & ~umask, "model.safetensors": 0o666 & ~umask}


def test_nothing_is_left_of_a_folder_that_could_not_be_written(tmp_path: Path) -> None:
    with (
        pytest.raises(ModelError, match=r"could not be written \(No space left on device\)\. Free"),
        whole_folder(tmp_path / "model") as partial,
    ):
        (partial / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []
