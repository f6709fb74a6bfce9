"""Layouts of experts that a model does not carry are refused before a corpus is read."""

import dataclasses
from pathlib import Path

import pytest

from equipoise.base.errors import LayoutError
from equipoise.spec.run.load import read_run
from equipoise.train.request import prepare


def test_ranks_that_would_share_no_experts(tmp_path: Path) -> None:
    dense = read_run(None, [("layout.dp", "2"), ("layout.ep", "2")])
    missing = dataclasses.replace(dense.spec.data, source="text", path="missing")
    run = dataclasses.replace(dense, spec=dataclasses.replace(dense.spec, data=missing))
    with pytest.raises(LayoutError) as caught:
        prepare(run, out=tmp_path)
    assert str(caught.value) == (
        "The model has no experts that 2 ranks could share. Set ep (layout.ep) = 1 and "
        "etp (layout.etp) = 1, or give the model experts."
    )
