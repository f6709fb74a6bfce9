"""Parts of a step, read between the sizes at which they were timed."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.cost.curves.parts import PartCurves, document_curves, part_curves
from equipoise.spec.device.here import calibrated_device
from equipoise.spec.device.spec import DeviceSpec
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import preset
from support.device_files import A_FILE, written
from support.timed_parts import MODEL, parts

WAY = next(each for each in parts().ways if each.way == "pipeline")
CURVES = PartCurves(parts(), WAY, *document_curves(WAY.documents))


def device(folder: Path) -> DeviceSpec:
    found = dataclasses.replace(A_FILE, parts=(parts(),))
    return calibrated_device(found, written(folder, found))


@pytest.mark.parametrize("point", WAY.sizes)
def test_timed_sizes_are_met(point) -> None:
    whole = CURVES.passes_s("layer", point.tokens, halves=False)
    halves = CURVES.passes_s("layer", point.tokens, halves=True)
    layer = point.layer
    assert whole[0] == halves[0] == pytest.approx(layer.forward_s.mid)
    assert whole[1:].sum() == pytest.approx(layer.backward_s.mid)
    assert halves[1:].tolist() == pytest.approx([layer.input_s.mid, layer.weight_s.mid])


@given(st.floats(0, 1e5), st.floats(1, 1e4), st.booleans())
def test_no_pass_is_negative_and_none_shrinks_with_tokens(tokens, more, halves) -> None:
    some = CURVES.passes_s("layer", tokens, halves=halves)
    larger = CURVES.passes_s("layer", tokens + more, halves=halves)
    assert (some > 0).all() and (larger >= some * (1 - 1e-12)).all()
    assert CURVES.is_beyond(tokens) == (tokens > 2048)


def test_documents_are_met_and_once_is_counted() -> None:
    for point in WAY.documents:
        pairs = np.array([point.tokens * (point.tokens + 1) / 2])
        assert CURVES.forward.attention_ns(pairs)[0] == pytest.approx(1e9 * point.forward_s.mid)
        assert CURVES.backward.attention_ns(pairs)[0] == pytest.approx(1e9 * point.backward_s.mid)
    assert CURVES.once_s("reduce_s", 3, first=True, last=False) == pytest.approx(8e-3)
    assert CURVES.once_s("optimizer_s", 0, first=False, last=False) == 0


def test_what_was_not_timed_has_no_curves(tmp_path: Path) -> None:
    here, deep = device(tmp_path), dataclasses.replace(MODEL, layers=7)
    found = part_curves(here, deep, "fp32", Layout(dp=2, zero=3))
    assert found is not None and found.way.way == "zero-3"
    assert part_curves(here, MODEL, "bf16", Layout(dp=2)) is None
    assert part_curves(here, MODEL, "fp32", Layout(dp=4)) is None
    assert part_curves(here, MODEL, "fp32", Layout(dp=2, tp=2)) is None
    assert part_curves(here, preset("7m"), "fp32", Layout(dp=2)) is None
    assert part_curves(here, preset("moe-3m"), "fp32", Layout(dp=2)) is None
    assert found.context("needed-kv") is not None and found.context("ring") is None
