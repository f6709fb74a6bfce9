"""Measure what a new server's engine takes, between requests, and say what its start waits for.

Why
    Curves of iterations and of nano-batches take seconds to measure. Nobody should wait for them:
    a server without any answers by an estimate first.

What it decides
    Steps run on the engine's thread while no request is here; one that arrives waits for the end of
    one step. They overwrite pages, so what is kept there of earlier prompts has a while of rest, in
    which others may begin like them. A curve replaces the estimate when nobody is here: charges of
    one request are by one price. If ranks are lost in a step, the measuring begins again; if it
    fails, the estimate stays.

Kept true (tests/unit/serve/test_calibration.py)
    Until the curve is measured, no price says it is; answers before, between and after steps are
    the same.
"""

import time
from collections.abc import Callable
from pathlib import Path

from equipoise.cost.serving import CurvePrice, PacedPrice
from equipoise.observe.journal import EventSink
from equipoise.observe.machine import BUSY_CORES, OtherLoad
from equipoise.serve.engine.calibrate import Steps, curve_steps, keep_curve
from equipoise.serve.engine.forward import PagedDecoder
from equipoise.serve.engine.read import describe_failure
from equipoise.serve.engine.request import RanksLostError
from equipoise.serve.nano.measure import nano_steps
from equipoise.serve.nano.report import NanoReport
from equipoise.spec.device.serving import ServingCurve

_REST_S, _KEPT_REST_S = 0.5, 10.0
"""Rest before a step, and where it overwrites what is kept of earlier prompts [s]."""

LATER = NanoReport(reason="measured between requests, not yet")
"""What is known of nano-batches until then."""


class IdleCalibration:
    """What is left to measure of an engine that answers already."""

    def __init__(
        self,
        paged: PagedDecoder,
        price: PacedPrice,
        *,
        curve_file: Path,
        nano_file: Path | None,
        sink: EventSink | None = None,
        say: Callable[[str], None] = lambda _: None,
        kept_rest_s: float = _KEPT_REST_S,
    ) -> None:
        """Nothing runs before ``step``.

        Args:
            paged: Computes; in a step its pool's contents do not matter.
            price: The engine's; if it is an estimate, a curve is measured.
            curve_file: Where curves are kept.
            nano_file: Where reports of nano-batches are kept; None if nothing of them is to be
                measured.
            sink: Where it says what it found.
            say: Takes a line when all is measured.
            kept_rest_s: As for ``rest_s``.
        """
        self._paged, self._price, self._say = paged, price, say
        self._files, self._sink = (curve_file, nano_file), sink or EventSink()
        self._kept_rest_s = kept_rest_s
        self._steps = self._measure()
        self._curve: ServingCurve | None = None
        """What is measured, and not used yet."""
        self._step_s = 0.0
        self.nano: NanoReport | None = None
        """What was found of nano-batches."""
        self.is_done = False

    def rest_s(self, kept_pages: int) -> float:
        """How long nobody asks before a step, which would overwrite these pages [s]."""
        return self._kept_rest_s if kept_pages else _REST_S

    def step(self) -> None:
        """Measure a little; on the thread that computes, while nothing is under way."""
        begin_s = time.monotonic()
        try:
            next(self._steps)
        except StopIteration:
            self.is_done = True
        except RanksLostError:  # they start again, and so does this
            self._steps = self._measure()
        except Exception as error:  # requests are answered by the estimate
            self.is_done = True
            self._sink.write("fault", "calibration", error=describe_failure(error))
            self._say(f"Not measured what iterations take: {describe_failure(error)}")
        self._step_s += time.monotonic() - begin_s

    def apply(self) -> bool:
        """Price by what is measured, while no request is here; whether the price is another one."""
        if self._curve is None:
            return False
        self._price.follow(CurvePrice(self._curve))
        self._curve = None
        self._sink.write("decision", "price", is_measured=True)
        return True

    def close(self) -> None:
        """Measure nothing any more."""
        self.is_done = True
        self._steps.close()

    def _measure(self) -> Steps[None]:
        curve_file, nano_file = self._files
        if not self._price.is_measured and self._curve is None:
            load = OtherLoad()
            curve = yield from curve_steps(self._paged)
            if self._paged.ranks > 1 or load.cores <= BUSY_CORES:
                keep_curve(self._paged, curve_file, curve)
            self._curve = curve
            yield
        if nano_file is not None:
            self.nano = yield from nano_steps(self._paged, nano_file, self._sink)
        words = f"; {self.nano.words}" if self.nano is not None else ""
        self._say(f"Measured what iterations take, in {self._step_s:.1f} s between requests{words}")


class Phases:
    """Says what a start has waited for: each part with its seconds, when it ends."""

    def __init__(
        self,
        say: Callable[[str], None] = lambda _: None,
        *,
        began_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin the first part.

        Args:
            say: Takes a line.
            began_s: When it began, if that was earlier [s, of the clock].
            clock: Seconds.
        """
        self.say, self._clock = say, clock
        self._began_s = clock() if began_s is None else began_s

    def end(self, what: str) -> None:
        """A part has ended, and the next one begins."""
        now_s = self._clock()
        self.say(f"{what}: {now_s - self._began_s:.1f} s")
        self._began_s = now_s
