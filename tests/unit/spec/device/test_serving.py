"""The file of serving curves: what is written reads back equal, and other files are refused."""

import dataclasses
import json
from pathlib import Path

import pytest

from equipoise.base.errors import SpecError
from equipoise.spec.device.here import cpu_model
from equipoise.spec.device.serving import (
    MeasuredServing,
    ServingCurve,
    read_serving,
    serving_name,
    write_serving,
)
from equipoise.spec.model.presets import preset

CURVE = ServingCurve(((1, 0.5), (8, 1.0)), ((1, 0.1),), 1e-9, 1e-8, 1e-5, 1e-7)
ONE = MeasuredServing(serving_name(preset("2m")), "2m", "fp32", 2, 1, "2026-11-23", CURVE)


def test_what_is_written_reads_back_equal(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "serving.json"
    assert read_serving(file) == ()
    other = dataclasses.replace(ONE, dtype="bf16")
    write_serving(file, ONE)
    write_serving(file, other)
    assert read_serving(file) == (ONE, other)
    again = dataclasses.replace(ONE, curve=dataclasses.replace(CURVE, pair_s=2e-9))
    write_serving(file, again)
    assert read_serving(file) == (other, again)


def test_the_file_of_another_machine_or_form_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "serving.json"
    write_serving(file, ONE)
    data = json.loads(file.read_text())
    file.write_text(json.dumps(data | {"machine": "abacus"}))
    with pytest.raises(SpecError) as refusal:
        read_serving(file)
    assert str(refusal.value) == (
        f'{file} was measured on "abacus" but this is "{cpu_model()}". Remove it; the engine '
        "measures again."
    )
    file.write_text(json.dumps(data | {"form": 9}))
    with pytest.raises(SpecError) as refusal:
        read_serving(file)
    assert str(refusal.value) == (
        f"{file} has form 9, and this version reads 1. Remove it; the engine measures again."
    )
    file.write_text("[")
    with pytest.raises(SpecError, match="holds no curves of a serving engine"):
        read_serving(file)
