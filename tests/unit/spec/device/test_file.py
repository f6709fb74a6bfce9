"""Device files: read back equal; each fault in one sentence."""

import json
import re
from pathlib import Path

import pytest

from equipoise.base.errors import SpecError
from equipoise.spec.device.file import read_device_file, write_device_file
from support.device_files import A_FILE, written


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    file = written(tmp_path, A_FILE)
    assert read_device_file(file) == A_FILE
    assert [path.name for path in tmp_path.iterdir()] == ["device.json"]


def _refused(file: Path, message: str) -> None:
    with pytest.raises(SpecError, match=f"^{re.escape(message)}$"):
        read_device_file(file)


def test_faults(tmp_path: Path) -> None:
    file, again = tmp_path / "device.json", 'Measure again: "equipoise calibrate".'
    _refused(file, f"No such device file: {file}. {again}")
    file.write_text("{")
    _refused(file, f"{file} is not a device file: it is not JSON. {again}")
    file.write_text('{"form": 99}')
    _refused(file, f"{file} is a device file of form 99; this version reads 1. {again}")
    data = json.loads(written(tmp_path, A_FILE).read_text())
    data["stream"]["copy"]["mid"] = "fast"
    file.write_text(json.dumps(data))
    _refused(
        file,
        f"{file} is not a device file: stream.copy.mid must be a number. {again}",
    )


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("a file")
    file = tmp_path / "folder" / "device.json"
    message = f"{file} cannot be written: file exists. Give --out a file in a writable folder."
    with pytest.raises(SpecError, match=f"^{re.escape(message)}$"):
        write_device_file(file, A_FILE)
