"""resolved.json: read back as it was written, by this version or the one before, or refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from equipoise.base.errors import SpecError
from equipoise.spec.names import RESOLVED
from equipoise.spec.run.load import read_run
from equipoise.spec.run.resolved import ResolvedFile, read_resolved, write_resolved


def written(folder: Path) -> tuple[ResolvedFile, dict[str, Any]]:
    run = read_run(None, [("layout.dp", "1"), ("layout.cp", "2"), ("layout.tp", "2")])
    file = ResolvedFile(run.spec, run.model, run.origins, 4, "corpus", "", stage_edges=(0, 4))
    write_resolved(folder, file)
    return file, json.loads((folder / RESOLVED).read_text())


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    file, _ = written(tmp_path)
    assert read_resolved(tmp_path) == file


def test_the_degrees_of_an_earlier_version_are_kept(tmp_path: Path) -> None:
    file, row = written(tmp_path)
    layout = row["spec"]["layout"]
    for old, new in (("context", "cp"), ("tensor", "tp"), ("pipeline", "pp"), ("expert", "ep")):
        layout[old] = layout.pop(new)
    layout["expert_tensor"] = layout.pop("etp")
    del row["digest"]
    (tmp_path / RESOLVED).write_text(json.dumps(row))
    assert read_resolved(tmp_path) == file


def test_a_file_that_has_changed_is_refused(tmp_path: Path) -> None:
    """As by one bit: 0.003 becomes 0.007."""
    _, row = written(tmp_path)
    row["spec"]["train"]["lr"] = 0.007
    (tmp_path / RESOLVED).write_text(json.dumps(row))
    with pytest.raises(SpecError) as caught:
        read_resolved(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path / RESOLVED} has changed since it was written, and its ranks would train "
        f"otherwise. Write it again: `equipoise train run.toml --out {tmp_path} --prepare`."
    )


@pytest.mark.parametrize("text", ["[]", "{}", '{"spec": 3}', "unknown"])
def test_what_this_version_did_not_write_is_refused(tmp_path: Path, text: str) -> None:
    _, row = written(tmp_path)
    row["spec"]["layout"]["sequence"] = 2  # a degree that would be lost
    (tmp_path / RESOLVED).write_text(json.dumps(row) if text == "unknown" else text)
    with pytest.raises(SpecError) as caught:
        read_resolved(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} holds no readable resolved.json: it is not the folder of a run of this "
        "version. Start it with `equipoise train run.toml`."
    )
