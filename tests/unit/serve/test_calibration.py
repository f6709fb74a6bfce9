"""A new engine answers by an estimate, and measures between requests."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from equipoise.cost.serving import CurvePrice, PacedPrice
from equipoise.schedule.batching.fair.table import FAIR_POLICIES
from equipoise.schedule.batching.scheduler import Scheduler
from equipoise.schedule.batching.settings import BatchSettings
from equipoise.serve.calibration import IdleCalibration, Phases
from equipoise.serve.engine.calibrate import estimate_curve
from equipoise.serve.engine.forward import PagedDecoder
from equipoise.serve.engine.loop import EngineLoop
from equipoise.serve.engine.request import GenerateRequest, RanksLostError
from equipoise.spec.device.serving import read_serving
from equipoise.spec.serving import IterationWork
from support.serving.engine import alone, reader, small_decoder
from support.serving.paged import paged
from support.serving.sink import KeptEvents

PROMPT = tuple(range(5, 40))
LONGEST_S = 240.0


def made(
    tmp_path: Path,
    decoder: PagedDecoder | None = None,
    *,
    nano: bool = True,
    kept_rest_s: float = 0.5,
) -> tuple[EngineLoop, IdleCalibration, PacedPrice, KeptEvents, list[str]]:
    sink, said = KeptEvents(), list[str]()
    decoder = decoder or paged(small_decoder(), pages=300)
    price = PacedPrice(CurvePrice(estimate_curve(decoder)), is_measured=False)
    calibration = IdleCalibration(
        decoder,
        price,
        curve_file=tmp_path / "serving.json",
        nano_file=tmp_path / "nano.json" if nano else None,
        sink=sink,
        say=said.append,
        kept_rest_s=kept_rest_s,
    )
    loop = EngineLoop(
        decoder,
        reader(decoder.decoder.model),
        Scheduler(BatchSettings(300, page_tokens=4), price, FAIR_POLICIES["fifo"]),
        context_tokens=200,
        sink=sink,
        price=price,
        calibration=calibration,
    )
    return loop, calibration, price, sink, said


def wait_until(is_so: Any) -> None:
    end_s = time.monotonic() + LONGEST_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def answer(engine: EngineLoop) -> list[int]:
    request = GenerateRequest(PROMPT, most_tokens=6, ignores_end=True)
    return list(engine.submit(request).result().ids)


def test_answers_before_between_and_after_steps_are_the_same(tmp_path: Path) -> None:
    engine, calibration, price, sink, said = made(tmp_path)
    wanted = alone(PROMPT, 6)
    with engine:
        assert not price.is_measured
        while not calibration.is_done:
            assert answer(engine) == wanted
            before_s = calibration._step_s
            wait_until(lambda before=before_s: calibration._step_s > before or calibration.is_done)
        wait_until(lambda: price.is_measured)
        assert answer(engine) == wanted
    iterations = [fields["is_price_measured"] for fields in sink.of("iteration")]
    assert (iterations[0], iterations[-1]) == (False, True)
    assert iterations == sorted(iterations), "an estimate never comes after the measured price"
    assert sink.of("price") == [{"is_measured": True}]
    (line,) = said
    assert re.fullmatch(
        r"Measured what iterations take, in \d+\.\d s between requests; nano-batches[: ].*", line
    )
    assert engine.nano is calibration.nano


def test_what_is_measured_on_an_idle_machine_is_kept(tmp_path: Path) -> None:
    engine, calibration, price, _, said = made(tmp_path, nano=False)
    with engine:
        wait_until(lambda: calibration.is_done and price.is_measured)
    known = read_serving(tmp_path / "serving.json")
    assert len(known) <= 1  # none if others used the cores
    assert all(price._price.curve == each.curve for each in known)
    assert re.fullmatch(r"Measured what iterations take, in \d+\.\d s between requests", said[0])


class _Failing(PagedDecoder):
    """Fails in some runs."""

    failures: list[Exception]

    def run(self, chunks, tokens):  # type: ignore[no-untyped-def]
        if not chunks[0].request and self.failures:
            raise self.failures.pop()
        return super().run(chunks, tokens)


def failing() -> _Failing:
    whole = paged(small_decoder(), pages=300)
    decoder = _Failing(whole.decoder, whole.pool)
    decoder.failures = []
    return decoder


def test_lost_ranks_begin_it_again(tmp_path: Path) -> None:
    decoder = failing()
    engine, calibration, price, _, _ = made(tmp_path, decoder, nano=False)
    decoder.failures = [RanksLostError("Rank 1 of 2 was lost. Ask again.", 5.0)]
    with engine:
        wait_until(lambda: calibration.is_done and price.is_measured)
    assert not decoder.failures


def test_if_it_fails_requests_are_answered_by_the_estimate(tmp_path: Path) -> None:
    decoder = failing()
    engine, calibration, price, sink, said = made(tmp_path, decoder)
    decoder.failures = [ZeroDivisionError("division by zero")]
    with engine:
        wait_until(lambda: calibration.is_done)
        assert answer(engine) == alone(PROMPT, 6)
        assert engine.is_alive
    assert not price.is_measured
    assert len(sink.of("calibration")) == 1
    assert said[0].startswith("Not measured what iterations take: ")


def millisecond(call: Callable[[], None]) -> float:
    call()
    return 1e-3


def test_an_estimate_prices_each_size() -> None:
    decoder = paged(small_decoder(), pages=300)
    curve = estimate_curve(decoder, timer=millisecond)
    price = CurvePrice(curve)
    for work in (
        IterationWork(1, 1, 1, 1, 1),
        IterationWork(500, 125_250, 500, 1, 1),
        IterationWork(8, 8000, 8000, 8, 8),
    ):
        assert 0 < price.iteration_s(work) < 10
    tiny = paged(small_decoder(), pages=1, page_tokens=1)
    assert len(estimate_curve(tiny, timer=millisecond).tokens) == 1


def test_each_part_of_a_start_is_said_with_its_seconds() -> None:
    said, ticks = list[str](), iter([3.25, 4.0])
    phases = Phases(said.append, began_s=1.0, clock=lambda: next(ticks))
    phases.end("Read small")
    phases.end("Laid the weights out")
    assert said == ["Read small: 2.2 s", "Laid the weights out: 0.8 s"]


@pytest.mark.parametrize("pages", [1, 3])
def test_a_small_pool_is_enough_for_an_estimate(pages: int) -> None:
    curve = estimate_curve(paged(small_decoder(), pages=pages, page_tokens=4))
    assert curve.tokens[-1][0] == 4 * pages


def test_a_prompt_that_is_kept_is_found_before_anything_is_overwritten(tmp_path: Path) -> None:
    engine, calibration, _, _, _ = made(tmp_path, nano=False, kept_rest_s=LONGEST_S)
    request = GenerateRequest(PROMPT, most_tokens=6, ignores_end=True)
    with engine:
        engine.submit(request).result()
        done_s = calibration._step_s
        time.sleep(1.2)  # steps began after half a second if nothing were kept
        handle = engine.submit(request)
        handle.result()
        assert handle.cached_tokens == len(PROMPT) // 4 * 4
        assert calibration._step_s == done_s
        assert not calibration.is_done
