"""Measure what overlapping nano-batches is worth on this machine, and overlap where it pays.

What it decides
    A layer's operations are timed on all cores, on one lane's, and on one lane beside each other
    kind on the other lane: two lanes share memory, caches and Python's lock, and what that costs is
    not assumed. From these times an order is searched for each kind of iteration. Where one is
    predicted to gain, it runs round by round beside the iteration as a whole, on some layers of
    the model; the median of the rounds' ratios is the measured gain. A server does that between
    requests, run by run: after each of them the thread that computes has its cores back.

Kept true (tests/unit/serve/nano/test_measure.py)
    Engines that cannot overlap say why; what was kept is not measured again.
"""

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from equipoise.cost.serving import rising_points
from equipoise.observe.journal import EventSink
from equipoise.observe.machine import BUSY_CORES, OtherLoad
from equipoise.schedule.batching.iteration import PageRun, ServeChunk
from equipoise.schedule.nano.graph import Resource
from equipoise.serve.engine.calibrate import DTYPES, Steps, finish
from equipoise.serve.engine.forward import ChunkPass, PagedDecoder
from equipoise.serve.engine.jit import can_run_together
from equipoise.serve.nano.choice import (
    KINDS,
    LEAST_GAIN,
    WINDOW,
    LaneCosts,
    NanoChoice,
    NanoCosts,
    NanoOrder,
    NanoSizes,
)
from equipoise.serve.nano.lanes import LANES, Lanes
from equipoise.serve.nano.report import (
    NanoGain,
    NanoReport,
    as_fields,
    keep_report,
    read_reports,
)
from equipoise.serve.nano.run import NanoBatches, run_order
from equipoise.spec.device.serving import serving_name

_ROWS = (1, 16, 64, 256)
_DECODES, _CONTEXTS = 8, (64, 1024)
_PROMPTS = (64, 256)
_LAYERS = 6
_ROUNDS = 5
_RUN_S, _LEAST_RUNS, _MOST_RUNS = 0.02, 3, 15
"""Time for the runs of one operation [s], and how many."""
_CLOSE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Largest difference of hidden states over their largest value: products of other shapes round
otherwise."""


def open_nano(paged: PagedDecoder, file: Path, sink: EventSink | None = None) -> NanoReport:
    """Let a decoder overlap nano-batches where that pays here; what was found is journaled.

    Args:
        paged: With a pool that nobody uses yet.
        file: Where reports are kept.
        sink: Gets the decision.
    """
    return find_nano(paged, file, sink) or finish(nano_steps(paged, file, sink))


def find_nano(paged: PagedDecoder, file: Path, sink: EventSink | None = None) -> NanoReport | None:
    """``open_nano`` by what is kept; None if it has to be measured."""
    report = NanoReport(reason=reason) if (reason := _refuse(paged)) else None
    report = report or read_reports(file).get(_key(paged))
    if report is not None:
        lanes = Lanes(torch.get_num_threads()) if report.costs and report.kinds else None
        _use(paged, report, lanes, sink)
    return report


def nano_steps(paged: PagedDecoder, file: Path, sink: EventSink | None = None) -> Steps[NanoReport]:
    """``open_nano`` where nothing is kept, run by run, by the thread that computes.

    Args:
        paged: With a pool whose contents do not matter in any step.
        file: As for ``open_nano``.
        sink: Likewise.
    """
    lanes = Lanes(torch.get_num_threads())
    try:
        report = yield from _measured(paged, lanes)
    except BaseException:
        lanes.close()
        raise
    if report.costs is not None:
        keep_report(file, _key(paged), report)
    _use(paged, report, lanes, sink)
    return report


def _use(
    paged: PagedDecoder, report: NanoReport, lanes: Lanes | None, sink: EventSink | None
) -> None:
    """Overlap what pays, else give the lanes back."""
    if lanes is not None and report.costs is not None and report.kinds:
        choice = NanoChoice(paged.layers, report.costs)
        paged.overlap = NanoBatches(paged, choice, lanes, report.kinds)
    elif lanes is not None:
        lanes.close()
    (sink or EventSink()).write("decision", "nano", report=as_fields(report))


def measure_nano(
    paged: PagedDecoder, lanes: Lanes, *, most_busy_cores: float = BUSY_CORES
) -> NanoReport:
    """Time operations and orders: about a second.

    Args:
        paged: With a pool that nobody uses yet.
        lanes: Of the calling thread.
        most_busy_cores: If other processes use more cores meanwhile, nothing is known afterwards.
    """
    return finish(_measured(paged, lanes, most_busy_cores))


def _measured(
    paged: PagedDecoder, lanes: Lanes, most_busy_cores: float = BUSY_CORES
) -> Steps[NanoReport]:
    probe, load = NanoProbe(paged, lanes), OtherLoad()
    costs = yield from probe.costs()
    if not can_run_together():
        return NanoReport(reason="numba runs one kernel at a time here")
    layers = min(_LAYERS, paged.layers) // WINDOW * WINDOW
    choice = NanoChoice(layers, costs)
    gains = list[NanoGain]()
    for kind in KINDS:
        if load.cores > most_busy_cores:
            break
        chunks = probe.iteration(kind)
        order = choice.choose(chunks)
        yield
        if order is None or order.gain < LEAST_GAIN:
            gains.append(NanoGain(kind, 1.0 if order is None else order.gain))
        else:
            gains.append((yield from probe.compare(kind, order, chunks, layers)))
    if load.cores > most_busy_cores:
        return NanoReport(reason=f"not measured: others used {load.cores:.1f} cores")
    return NanoReport(tuple(gains), costs=costs)


def _refuse(paged: PagedDecoder) -> str:
    if paged.pool.device.type != "cpu":
        return "lanes are of CPU cores"
    if paged.ranks > 1:
        return "not over several ranks"
    if torch.get_num_threads() < LANES:
        return "one core"
    if paged.layers < WINDOW:
        return "one layer"
    tokens = paged.pool.pages * paged.pool.page_tokens
    if paged.pool.pages < 4 * _DECODES or tokens < 2 * _PROMPTS[0]:
        return f"a cache of {tokens:,} tokens is too small to tell"
    return ""


def _key(paged: PagedDecoder) -> str:
    dtype, threads = DTYPES[paged.pool.dtype], torch.get_num_threads()
    return f"{serving_name(paged.decoder.model)}-{dtype}-{threads}-{paged.tile_rows}"


@dataclass
class NanoProbe:
    """Chunks of nobody, on the pool of an engine that nobody uses now."""

    paged: PagedDecoder
    lanes: Lanes

    def costs(self) -> Steps[NanoCosts]:
        """Seconds of one layer's operations."""
        both = yield from self._lane_costs(LANES)
        one = yield from self._lane_costs(1)
        calls: dict[Resource, Callable[[], Callable[[], None]]] = {
            "compute": lambda: self._dense(self._prompt(self._most_rows(_ROWS))),
            "memory": lambda: self._attend(self._tokens(_DECODES, self._contexts()[-1])),
        }
        beside = list[tuple[Resource, Resource, float]]()
        for name, call in calls.items():
            for other, also in calls.items():
                beside.append((name, other, self._slowdown(call(), also())))
                yield
        return NanoCosts(both, one, tuple(beside))

    def _lane_costs(self, lanes: int) -> Steps[LaneCosts]:
        def typical(
            each: Sequence[ServeChunk],
            make: Callable[[Sequence[ServeChunk]], Callable[[], None]],
        ) -> float:
            self.lanes.use(lanes)
            try:
                return _typical_s(make(each))
            finally:
                self.lanes.use(LANES)

        dense, decode, prefill = (list[tuple[int, float]]() for _ in range(3))
        for tokens in self._fitting(_ROWS):
            chunks = self._prompt(tokens)
            dense.append((NanoSizes.of(chunks).rows, typical(chunks, self._dense)))
            yield
        for context in self._contexts():
            chunks = self._tokens(_DECODES, context)
            decode.append((NanoSizes.of(chunks).kv_tokens, typical(chunks, self._attend)))
            yield
        for tokens in self._fitting(_PROMPTS):
            chunks = self._prompt(tokens)
            prefill.append((NanoSizes.of(chunks).pairs, typical(chunks, self._attend)))
            yield
        return LaneCosts(rising_points(dense), rising_points(decode), rising_points(prefill))

    def _slowdown(self, call: Callable[[], None], also: Callable[[], None]) -> float:
        """How many times longer a call takes on one lane while the other lane repeats another."""
        self.lanes.use(1)
        try:
            alone_s, taken = _typical_s(call), list[float]()
        finally:
            self.lanes.use(LANES)
        stop = threading.Event()

        def first() -> None:
            try:
                taken.append(_typical_s(call))
            finally:
                stop.set()

        def second() -> None:
            while not stop.is_set():
                also()

        self.lanes.together(first, second)
        return max(1.0, taken[0] / alone_s)

    def _dense(self, chunks: Sequence[ServeChunk]) -> Callable[[], None]:
        """Everything of a layer but attention."""
        one = self._begun(chunks)
        one.attend(0)
        x_tD = one.x_tD

        def call() -> None:
            one.x_tD = x_tD
            one.end(0)
            one.begin(1)

        return torch.no_grad()(call)

    def _attend(self, chunks: Sequence[ServeChunk]) -> Callable[[], None]:
        one = self._begun(chunks)
        return torch.no_grad()(lambda: one.attend(0))

    @torch.no_grad()
    def _begun(self, chunks: Sequence[ServeChunk]) -> ChunkPass:
        one = ChunkPass(self.paged, chunks, _some_tokens(chunks))
        one.begin(0)
        return one

    def iteration(self, kind: str) -> list[ServeChunk]:
        """Chunks of a kind, each on pages of its own."""
        context, prompt = self._contexts()[-1], self._most_rows(_PROMPTS)
        if kind == "tokens":
            return self._tokens(2 * _DECODES, context)
        half = self._prompt(prompt // 2)
        if kind == "prompts":
            return [*half, *self._prompt(prompt // 2, self._pages(prompt // 2))]
        return [*self._tokens(_DECODES, context), *self._prompt(prompt, self.paged.pool.pages // 2)]

    def compare(
        self, kind: str, order: NanoOrder, chunks: Sequence[ServeChunk], layers: int
    ) -> Steps[NanoGain]:
        """Both sides, round by round."""
        tokens = _some_tokens(chunks)

        @torch.no_grad()
        def whole() -> Tensor:
            return ChunkPass(self.paged, chunks, tokens).run(layers)

        def parts() -> Tensor:
            return run_order(self.paged, self.lanes, order, chunks, tokens, layers=layers)

        wanted, given, ratios = whole(), parts(), list[float]()
        yield
        for _ in range(_ROUNDS):
            ratios.append(time_call(whole) / time_call(parts))
            yield
        if self.paged.tile_rows:
            is_equal = torch.equal(wanted, given)
        else:
            apart = (wanted - given).abs().max() / wanted.abs().max()
            is_equal = bool(apart <= _CLOSE.get(wanted.dtype, 1e-3))
        return NanoGain(kind, order.gain, statistics.median(ratios), is_equal)

    def _prompt(self, tokens: int, first: int = 0) -> list[ServeChunk]:
        return [_chunk(0, tokens, first, self._pages(tokens))]

    def _tokens(self, sequences: int, context: int) -> list[ServeChunk]:
        pages = self._pages(context)
        return [_chunk(context - 1, 1, at * pages, pages) for at in range(sequences)]

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.paged.pool.page_tokens)

    def _contexts(self) -> tuple[int, int]:
        """A short context and a long one, for which the pool has room."""
        pool = self.paged.pool
        most = pool.pages // (2 * _DECODES) * pool.page_tokens
        return min(_CONTEXTS[0], most // 2), min(_CONTEXTS[1], most)

    def _fitting(self, sizes: Sequence[int]) -> list[int]:
        """Those of these numbers of tokens for which half of the pool has room."""
        return [each for each in sizes if 2 * each <= self.paged.pool.pages * self._size]

    def _most_rows(self, sizes: Sequence[int]) -> int:
        return self._fitting(sizes)[-1]

    @property
    def _size(self) -> int:
        return self.paged.pool.page_tokens


def _chunk(start: int, tokens: int, first: int, pages: int) -> ServeChunk:
    return ServeChunk("", start, tokens, (PageRun(first, pages),), samples=False, logits=0)


def _some_tokens(chunks: Sequence[ServeChunk]) -> list[int]:
    return [at % 7 for at in range(sum(each.tokens for each in chunks))]


def time_call(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    begin_s = time.perf_counter()
    call()
    return time.perf_counter() - begin_s


def _typical_s(call: Callable[[], object]) -> float:
    """The median time of some calls after one that warms up [s]."""
    call()
    taken = list[float]()
    while len(taken) < _LEAST_RUNS or (sum(taken) < _RUN_S and len(taken) < _MOST_RUNS):
        taken.append(time_call(call))
    return statistics.median(taken)
