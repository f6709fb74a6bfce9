"""Parts of a step in a device file."""

import dataclasses
from pathlib import Path

from equipoise.spec.device.file import read_device_file
from equipoise.spec.device.parts import way_of
from equipoise.spec.layout import Layout
from support.device_files import A_FILE, written
from support.timed_parts import MODEL, parts


def test_what_is_written_reads_back_equal(tmp_path: Path) -> None:
    found = dataclasses.replace(A_FILE, parts=(parts(),))
    assert read_device_file(written(tmp_path, found)) == found


def test_models_of_other_depth_have_the_same_parts() -> None:
    assert parts(dataclasses.replace(MODEL, layers=9)) == parts()
    assert parts(dataclasses.replace(MODEL, ffn=9)) != parts()


def test_layouts_that_mix_ways_have_none() -> None:
    assert way_of(Layout()) == "zero-1"
    assert way_of(Layout(cp=2, zero=2)) == "zero-2"
    assert way_of(Layout(dp=2, cp=2, zero=0)) == "zero-0"
    assert way_of(Layout(pp=4)) == "pipeline"
    for layout in (Layout(dp=2, tp=2), Layout(cp=2, pp=2), Layout(dp=2, replicas=2)):
        assert way_of(layout) is None
    assert way_of(Layout(dp=2, ep=2)) is None
