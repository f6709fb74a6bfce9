"""Engines overlap what was measured to gain, and say why where they cannot."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from equipoise.serve.engine.forward import PagedDecoder
from equipoise.serve.engine.request import GenerateRequest
from equipoise.serve.nano.choice import KINDS, LaneCosts, NanoCosts
from equipoise.serve.nano.lanes import Lanes
from equipoise.serve.nano.measure import measure_nano, open_nano
from equipoise.serve.nano.report import NanoGain, NanoReport, keep_report, read_reports
from equipoise.serve.nano.run import NanoBatches
from equipoise.spec.device.serving import serving_name
from support.serving.engine import alone, make_engine, small_decoder
from support.serving.paged import PLAIN, built, paged
from support.serving.sink import KeptEvents

EACH = ((1, 1.0),)
COSTS = NanoCosts(LaneCosts(EACH, EACH, EACH), LaneCosts(EACH, EACH, EACH), ())
GAINING = NanoReport(tuple(NanoGain(kind, 1.5, 1.4) for kind in KINDS), costs=COSTS)


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def opened(tmp_path: Path, engine: PagedDecoder) -> tuple[NanoReport, dict[str, Any]]:
    sink = KeptEvents()
    report = open_nano(engine, tmp_path / "nano.json", sink)
    engine.close()
    ((name, fields),) = sink.events
    assert name == "nano"
    return report, fields["report"]


def test_every_kind_is_measured() -> None:
    engine = paged(small_decoder(), pages=300)
    lanes = Lanes(2)
    report = measure_nano(engine, lanes, most_busy_cores=float("inf"))
    lanes.close()
    assert report.costs is not None
    assert [each.kind for each in report.gains] == [*KINDS]
    assert all(each.predicted > 0 and each.is_equal for each in report.gains)


def test_beside_other_processes_nothing_is_known() -> None:
    lanes = Lanes(2)
    report = measure_nano(paged(small_decoder(), pages=300), lanes, most_busy_cores=-1e9)
    lanes.close()
    assert (report.gains, report.costs) == ((), None)
    assert re.fullmatch(
        r"nano-batches: no gain \(not measured: others used -?\d+\.\d cores\)", report.words
    )


def test_what_is_measured_is_journaled_and_kept(tmp_path: Path) -> None:
    first, fields = opened(tmp_path, paged(small_decoder(), pages=300))
    assert fields["words"] == first.words
    if first.costs is None:  # nothing is known of a busy machine, nor kept
        assert first.words.startswith("nano-batches: no gain (not measured: others used ")
        assert not (tmp_path / "nano.json").exists()
        return
    ((_, kept),) = read_reports(tmp_path / "nano.json").items()
    assert kept == first
    assert opened(tmp_path, paged(small_decoder(), pages=300))[0] == first


def test_what_gains_is_overlapped_and_answers_are_the_same(tmp_path: Path) -> None:
    engine = make_engine()
    file = tmp_path / "nano.json"
    prompts = [tuple(range(at + 3, 3 * at + 20)) for at in range(6)]
    wanted = [alone(prompt, 12) for prompt in prompts]
    key = f"{serving_name(small_decoder().model)}-fp32-2-0"
    keep_report(file, key, GAINING)
    paged_decoder = engine._decoder
    report = open_nano(paged_decoder, file)
    assert report == GAINING
    overlap = paged_decoder.overlap
    assert isinstance(overlap, NanoBatches)
    with engine:
        handles = [
            engine.submit(GenerateRequest(prompt, most_tokens=12, ignores_end=True))
            for prompt in prompts
        ]
        answers = [list(handle.result().ids) for handle in handles]
    assert answers == wanted
    assert overlap.iterations > 0


def test_one_core_has_one_lane(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    report, _ = opened(tmp_path, paged(small_decoder(), pages=300))
    assert report.words == "nano-batches: no gain (one core)"


def test_where_nothing_can_be_told(tmp_path: Path) -> None:
    small, _ = opened(tmp_path, paged(small_decoder(), pages=8))
    assert small.words == "nano-batches: no gain (a cache of 32 tokens is too small to tell)"
    single = built(dataclasses.replace(PLAIN, layers=1))
    flat, _ = opened(tmp_path, paged(single, pages=300))
    assert flat.words == "nano-batches: no gain (one layer)"
    assert not (tmp_path / "nano.json").exists()
