"""What was measured is kept, said and obeyed."""

import json
from pathlib import Path

from equipoise.serve.nano.choice import LaneCosts, NanoCosts
from equipoise.serve.nano.report import (
    NanoGain,
    NanoReport,
    as_fields,
    keep_report,
    read_reports,
)

LANE = LaneCosts(((1, 1e-3), (16, 2e-3)), ((64, 1e-4),), ((2080, 1e-4),))
COSTS = NanoCosts(LANE, LANE, (("compute", "memory", 1.25), ("memory", "compute", 1.0)))
GAINING = NanoReport(
    (
        NanoGain("prompts", 1.2, 1.1, is_equal=False),
        NanoGain("tokens", 1.1, 1.08),
        NanoGain("prompts and tokens", 1.3, 1.01),
    ),
    costs=COSTS,
)


def test_only_what_was_measured_to_gain_with_equal_results_is_overlapped() -> None:
    assert GAINING.kinds == ("tokens",)
    assert GAINING.gain == 1.08
    assert GAINING.words == "nano-batches gain: tokens 1.08x"
    none = NanoReport((NanoGain("prompts", 1.2, 1.1, is_equal=False), NanoGain("tokens", 0.9)))
    assert none.words == "nano-batches: no gain (prompts 1.10x, other bits)"
    assert (none.kinds, none.gain) == ((), 1.0)
    assert NanoReport((NanoGain("tokens", 0.9),)).words == "nano-batches: no gain (none predicted)"
    json.dumps(as_fields(GAINING))


def test_what_is_kept_reads_back_equal(tmp_path: Path) -> None:
    file = tmp_path / "cache" / "nano.json"
    assert read_reports(file) == {}
    keep_report(file, "a", GAINING)
    keep_report(file, "b", NanoReport(reason="one core"))
    assert read_reports(file) == {"a": GAINING, "b": NanoReport(reason="one core")}


def test_a_file_of_another_machine_or_form_is_not_used(tmp_path: Path) -> None:
    file = tmp_path / "nano.json"
    keep_report(file, "a", GAINING)
    data = json.loads(file.read_text())
    for wrong in ({**data, "machine": "another"}, {**data, "form": 0}, {"form": 1}, []):
        file.write_text(json.dumps(wrong))
        assert read_reports(file) == {}
    file.write_text("{")
    assert read_reports(file) == {}
    keep_report(file, "a", GAINING)
    assert read_reports(file) == {"a": GAINING}


def test_where_nothing_can_be_kept_it_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    keep_report(tmp_path / "file" / "nano.json", "a", GAINING)
    assert read_reports(tmp_path / "file" / "nano.json") == {}
