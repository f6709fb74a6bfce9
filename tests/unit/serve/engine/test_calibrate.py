"""The curve of an engine's iterations: measured by differences, kept, and not measured again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from equipoise.cost.serving import CurvePrice
from equipoise.serve.engine.calibrate import kept_curve, measure_curve, median_s
from equipoise.serve.engine.forward import PagedDecoder
from equipoise.spec.device.serving import read_serving
from equipoise.spec.serving import IterationWork, chunk_pairs
from support.serving.engine import small_decoder
from support.serving.paged import paged


class _Clocked(PagedDecoder):
    """Takes no time, but says what each iteration would take."""

    seconds = 0.0

    def run(self, chunks, tokens):  # type: ignore[no-untyped-def]
        self.seconds += (
            1e-3
            + 1e-5 * len(tokens)
            + 1e-8 * sum(chunk_pairs(each.start, each.tokens) for each in chunks)
            + 3e-7 * sum(each.start + each.tokens for each in chunks)
            + 2e-4 * (len(chunks) - 1)
        )
        several = [each for each in chunks if each.tokens > 1]
        self.seconds += 4e-7 * sum(each.start + each.tokens for each in several)
        self.seconds += 5e-4 * (len(several) + (len(several) < len(chunks)) - 1)
        return torch.zeros(len(tokens), self.decoder.model.hidden)

    def logits(self, x_tD, rows):  # type: ignore[no-untyped-def]
        self.seconds += 1e-4 * len(rows)
        yield x_tD

    def time(self, call: Callable[[], None]) -> float:
        before = self.seconds
        call()
        return self.seconds - before


def clocked() -> _Clocked:
    whole = paged(small_decoder(), pages=200, page_tokens=16)
    return _Clocked(whole.decoder, whole.pool)


def test_a_known_curve_is_measured() -> None:
    decoder = clocked()
    curve = measure_curve(decoder, timer=decoder.time)
    assert curve.pair_s == pytest.approx(1e-8, rel=0.01)
    assert curve.kv_token_s == pytest.approx(3e-7, rel=0.01)
    assert curve.sequence_s == pytest.approx(2e-4, rel=0.2)
    assert curve.chunk_kv_token_s == pytest.approx(4e-7, rel=0.05)
    assert curve.call_s == pytest.approx(5e-4, rel=0.1)
    assert dict(curve.logits) == pytest.approx({rows: 1e-4 * rows for rows in (1, 8, 32, 64)})
    price = CurvePrice(curve)
    decodes = IterationWork(tokens=8, pairs=4000, kv_tokens=4000, sequences=8, logits=8)
    wanted = 1e-3 + 8e-5 + 4e-5 + 4000 * 3e-7 + 7 * 2e-4 + 8e-4
    assert price.iteration_s(decodes) == pytest.approx(wanted, rel=0.1)
    beside = decodes.with_chunk(1000, 200, 1)
    wanted += 2e-3 + chunk_pairs(1000, 200) * 1e-8 + 1200 * (3e-7 + 4e-7) + 2e-4 + 5e-4 + 1e-4
    assert price.iteration_s(beside) == pytest.approx(wanted, rel=0.03)


def test_a_curve_is_kept_for_its_model_and_mode(tmp_path: Path) -> None:
    file, decoder = tmp_path / "serving.json", clocked()
    how: dict[str, Any] = {"timer": decoder.time, "most_busy_cores": float("inf")}
    first = kept_curve(decoder, file, **how)
    spent = decoder.seconds
    assert kept_curve(decoder, file, **how) == first and decoder.seconds == spent
    decoder.tile_rows = 32
    kept_curve(decoder, file, **how)
    assert decoder.seconds > spent
    assert len(read_serving(file)) == 2


def test_a_curve_that_was_measured_beside_others_is_not_kept(tmp_path: Path) -> None:
    file, decoder = tmp_path / "serving.json", clocked()
    assert kept_curve(decoder, file, timer=decoder.time, most_busy_cores=-1e9).tokens
    assert not file.exists()
    decoder.ranks = 2
    assert kept_curve(decoder, file, timer=decoder.time, most_busy_cores=-1e9).tokens
    assert len(read_serving(file)) == 1


def test_a_file_that_cannot_be_read_is_left_as_it_is(tmp_path: Path) -> None:
    file, decoder = tmp_path / "serving.json", clocked()
    file.write_text("{")
    assert kept_curve(decoder, file, timer=decoder.time).tokens
    assert file.read_text() == "{"


def test_the_median_of_some_runs_is_taken() -> None:
    ticks = iter([0.0, 0.2, 1.0, 1.1, 2.0, 2.5, 3.0, 3.2])
    assert median_s(lambda: None, clock=lambda: next(ticks)) == pytest.approx(0.2)
    # A first run that is long for want of memory only does not count.
    ticks = iter([0.0, 0.9, 1.0, 1.1, 2.0, 2.2, 3.0, 3.1])
    assert median_s(lambda: None, clock=lambda: next(ticks)) == pytest.approx(0.1)
    ticks = iter([0.0, 0.9, 1.0, 1.4])
    assert median_s(lambda: None, clock=lambda: next(ticks)) == pytest.approx(0.4)
    ticks = iter([0.0, 2.6])
    assert median_s(lambda: None, clock=lambda: next(ticks)) == pytest.approx(2.6)


def test_a_small_pool_is_enough_to_measure_in() -> None:
    for pages in (1, 3, 9):
        decoder = paged(small_decoder(), pages=pages, page_tokens=4)
        curve = measure_curve(decoder, timer=lambda call: (call(), 1e-3)[1])
        assert curve.tokens[-1][0] <= 4 * pages
