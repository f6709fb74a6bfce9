"""A calibration's session: kept whole, gone on with by the same measurement only."""

import json
from pathlib import Path

import pytest

from equipoise.train.calibrate.parts_plan import StepRecord, WaySamples
from equipoise.train.calibrate.session import CalibrationSession, open_session, session_file


def _session(file: Path) -> CalibrationSession:
    record = StepRecord([0.5], {("forward", -1, 2): [0.1, 0.2]}, [1.0], [2.0])
    samples = WaySamples(
        {(1, "1f1b"): record}, {64: ([0.01], [0.02])}, {("ring", 0): ([0.3], [0.4])}
    )
    return CalibrationSession(
        file,
        "key",
        ["memory", "steps by zero-1"],
        {("gemm", "fp32", 16, 64, 64): [1e-6, 2e-6], ("stream", "copy"): [1e9]},
        {"zero-1": [samples, samples]},
        seconds=20.0,
        others_s=30.0,
    )


def test_what_is_written_reads_back_equal(tmp_path: Path) -> None:
    session = _session(session_file(tmp_path / "this-cpu.json"))
    session.write()
    again = open_session(session.file, "key")
    assert again == session
    assert again.other_cores == pytest.approx(1.5)
    assert [path.name for path in tmp_path.iterdir()] == ["this-cpu.session.json"]
    session.end()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("change", ["key", "form", "began", "cut", "rows"])
def test_another_measurement_or_a_damaged_file_begins_anew(tmp_path: Path, change: str) -> None:
    session = _session(tmp_path / "this-cpu.session.json")
    session.write()
    row = json.loads(session.file.read_text())
    if change == "began":
        row["began"] -= 100_000
    elif change == "rows":
        row["taken"] = [["gemm"]]
    else:
        row[change] = "other"
    text = json.dumps(row)
    session.file.write_text(text[:-40] if change == "cut" else text)
    assert open_session(session.file, "key").done == []
