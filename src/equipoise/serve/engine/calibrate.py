"""Measure what an engine's iterations take on this machine, and keep it.

Why
    To measure takes seconds. A server that has no curve yet answers by an estimate, from three
    short iterations and the model's sizes, and measures between requests: step by step.

What it decides
    Which iterations are timed: a few rows and many, short contexts and long ones. Each term of the
    price is what two of them differ by. Times are the median of some runs, for the price is to
    say what an iteration takes, not what it could take.

Kept true (tests/unit/serve/engine/test_calibrate.py)
    From a clock that follows a known curve, that curve is measured; a kept curve is not measured
    again, and one that was measured while others used the cores is not kept.
"""

import math
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch

from equipoise.base.errors import SpecError
from equipoise.cost.serving import read_points, rising_points
from equipoise.cost.work import forward_flop, pair_flop
from equipoise.observe.machine import BUSY_CORES, OtherLoad
from equipoise.schedule.batching.iteration import PageRun, ServeChunk, Swap
from equipoise.serve.engine.forward import PagedDecoder
from equipoise.serve.engine.pool import token_bytes
from equipoise.spec.device.serving import (
    MeasuredServing,
    ServingCurve,
    read_serving,
    serving_name,
    write_serving,
)
from equipoise.spec.device.spec import Dtype
from equipoise.spec.serving import chunk_pairs

_ROWS = (1, 4, 16, 64, 256, 512)
_LOGITS = (1, 8, 32, 64)
_FEW, _CHUNK, _CONTEXT = 32, 256, 2048
_SEQUENCES, _SHORT = 8, 64
_BUDGET_S = 0.1
"""Time for the runs of one iteration, but at least three of them [s]."""

_LONG_S, _ENDLESS_S = 0.25, 2.5
"""A run that takes longer is repeated once, and not at all [s]."""

_LEAST_S = 1e-9

_TOTAL_S = 3.0
"""Beyond this, of the numbers of rows only those that are needed are timed [s]."""

_NEEDED_ROWS = (1, 16, 64, 256)

DTYPES: dict[torch.dtype, Dtype] = {torch.float32: "fp32", torch.bfloat16: "bf16"}

_ESTIMATED_ROWS = 64
"""Tokens of the longer iteration that an estimate is made from."""

_T = TypeVar("_T")

Steps = Generator[None, None, _T]
"""Work in steps: what ends each of them is a ``yield``, between which others may compute."""

Timer = Callable[[Callable[[], None]], float]
"""Seconds of a call."""

StepTimer = Callable[[Callable[[], None]], Steps[float]]
"""The same, run by run."""


def finish(steps: Steps[_T]) -> _T:
    """Do all steps at once."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: _T = end.value
            return result


def median_s(call: Callable[[], None], *, clock: Callable[[], float] = time.perf_counter) -> float:
    """The median time of some runs after one that warms up; of long ones, the second [s].

    The first run also waits for memory that nobody has used before: seconds of a large pool.
    """
    return finish(median_steps(call, clock=clock))


def median_steps(
    call: Callable[[], None], *, clock: Callable[[], float] = time.perf_counter
) -> Steps[float]:
    """``median_s``, run by run."""

    def once() -> float:
        begin = clock()
        call()
        return clock() - begin

    first_s = once()
    yield
    if first_s > _ENDLESS_S:
        return first_s
    times = list[float]()
    if first_s > _LONG_S:
        times.append(once())
        yield
        if times[0] > _LONG_S:
            return times[0]
    while len(times) < 3 or (sum(times) < _BUDGET_S and len(times) < 9):
        times.append(once())
        yield
    return statistics.median(times)


def _in_one(timer: Timer) -> StepTimer:
    def steps(call: Callable[[], None]) -> Steps[float]:
        yield
        return timer(call)

    return steps


class _Probe:
    """Iterations of an engine that nobody uses now; its pool's contents do not matter."""

    def __init__(self, decoder: PagedDecoder, timer: StepTimer) -> None:
        self._decoder, self._timer = decoder, timer
        self._size = decoder.pool.page_tokens
        self.pool_tokens = decoder.pool.pages * self._size

    def _chunk(self, start: int, tokens: int, first: int = 0) -> ServeChunk:
        runs = (PageRun(first, -(-(start + tokens) // self._size)),)
        return ServeChunk("", start, tokens, runs, samples=False, logits=0)

    def chunk_s(self, start: int, tokens: int) -> Steps[float]:
        """One sequence's tokens [start, start + tokens)."""
        return (yield from self._run_s([self._chunk(start, tokens)]))

    def decodes_s(self, sequences: int, context: int) -> Steps[float]:
        """One token each of sequences with this many tokens."""
        return (yield from self._run_s(self._decodes(sequences, context)))

    def both_s(self, sequences: int, context: int, tokens: int) -> Steps[float]:
        """The same beside the first tokens of another sequence."""
        chunks = [self._chunk(0, tokens), *self._decodes(sequences, context)]
        return (yield from self._run_s(chunks))

    def _decodes(self, sequences: int, context: int) -> list[ServeChunk]:
        pages = -(-context // self._size)
        last = self._decoder.pool.pages - pages
        return [self._chunk(context - 1, 1, min(at * pages, last)) for at in range(sequences)]

    def _run_s(self, chunks: Sequence[ServeChunk]) -> Steps[float]:
        tokens = [1] * sum(chunk.tokens for chunk in chunks)

        def run() -> None:
            self._decoder.run(chunks, tokens)

        return (yield from self._timer(run))

    def logits_s(self, rows: int) -> Steps[float]:
        """Rows through the head, and their likeliest tokens."""
        weight = self._decoder.decoder.embed.weight
        x_tD = torch.zeros(rows, self._decoder.decoder.model.hidden).to(weight)

        def read() -> None:
            for logits_RV in self._decoder.logits(x_tD, range(rows)):
                logits_RV.float().max(dim=-1)

        return (yield from self._timer(read))

    def swap_token_s(self) -> Steps[float]:
        """One token's keys and values, one way; nothing without slots."""
        pool = self._decoder.pool
        pages = tuple(range(min(pool.pages, pool.swap_pages, 16)))
        if not pages:
            return 0.0
        swap = Swap("", pages, pages)
        taken_s = yield from self._timer(lambda: pool.swap_out(swap))
        return taken_s / (len(pages) * self._size)


def measure_curve(decoder: PagedDecoder, *, timer: Timer = median_s) -> ServingCurve:
    """Time an engine's iterations: a few seconds, or one run of each that takes longer.

    Args:
        decoder: With a pool that nobody uses yet.
        timer: How a call is timed.
    """
    return finish(curve_steps(decoder, _in_one(timer), most_s=_TOTAL_S))


def curve_steps(
    decoder: PagedDecoder, timer: StepTimer = median_steps, *, most_s: float = math.inf
) -> Steps[ServingCurve]:
    """``measure_curve``, run by run.

    Args:
        decoder: With a pool whose contents do not matter in any step.
        timer: How a call is timed.
        most_s: Beyond this, of the numbers of rows only those that are needed are timed [s].
    """
    begin = time.monotonic()
    probe = _Probe(decoder, timer)
    context = max(1, min(_CONTEXT, probe.pool_tokens - _CHUNK))
    chunk = min(_CHUNK, probe.pool_tokens - context)
    few = min(_FEW, chunk)
    late_s = dict[int, float]()
    for rows in (chunk, few):
        late_s[rows] = yield from probe.chunk_s(context, rows)
        late_s[rows] -= yield from probe.chunk_s(0, rows)
    short = min(context, _SHORT)
    far_s = yield from probe.decodes_s(_SEQUENCES, context)
    near_s = yield from probe.decodes_s(_SEQUENCES, short)
    # Three differences, three unknowns: pairs, rows of keys, and those rows for a chunk.
    row_s = max(0.0, far_s - near_s) / (_SEQUENCES * max(1, context - short))
    pair_s = max(0.0, late_s[chunk] - late_s[few]) / max(1, (chunk - few) * context)
    pair_s = min(pair_s, row_s) if row_s else pair_s
    kv_token_s = max(0.0, row_s - pair_s)
    chunk_kv_token_s = max(0.0, late_s[few] / context - few * pair_s - kv_token_s)
    tokens = list[tuple[int, float]]()
    for rows in _ROWS:
        if rows > probe.pool_tokens:
            break
        if time.monotonic() - begin > most_s and rows not in _NEEDED_ROWS:
            continue
        attention_s = pair_s * rows * (rows + 1) / 2 + (kv_token_s + chunk_kv_token_s) * rows
        rows_s = yield from probe.chunk_s(0, rows)
        tokens.append((rows, max(_LEAST_S, rows_s - attention_s)))
    points = rising_points(tokens)
    apart_s = (yield from probe.decodes_s(_SEQUENCES, 1)) - read_points(points, _SEQUENCES)
    sequence_s = max(0.0, apart_s) / _SEQUENCES
    beside = min(_SHORT, probe.pool_tokens)
    call_s = yield from probe.both_s(_SEQUENCES, short, beside)
    call_s -= read_points(points, _SEQUENCES + beside) + (_SEQUENCES + 1) * sequence_s
    call_s -= _SEQUENCES * short * row_s + chunk_pairs(0, beside) * pair_s
    call_s -= beside * (kv_token_s + chunk_kv_token_s)
    logits = list[tuple[int, float]]()
    for rows in _LOGITS:
        logits.append((rows, (yield from probe.logits_s(rows))))
    return ServingCurve(
        tokens=points,
        logits=rising_points(logits),
        pair_s=pair_s,
        kv_token_s=kv_token_s,
        sequence_s=sequence_s,
        swap_token_s=(yield from probe.swap_token_s()),
        chunk_kv_token_s=chunk_kv_token_s,
        call_s=max(0.0, call_s),
    )


def _again_s(call: Callable[[], None]) -> float:
    """Time of a call's second run [s]."""
    call()
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def estimate_curve(decoder: PagedDecoder, *, timer: Timer = _again_s) -> ServingCurve:
    """A curve from one token, a short prompt and a row of the head, for until it is measured.

    Attention is priced at the rates of the rest: pairs at its FLOP/s with many rows, keys and
    values at its bytes/s with one.

    Args:
        decoder: As for ``measure_curve``.
        timer: Likewise.
    """
    probe, model = _Probe(decoder, _in_one(timer)), decoder.decoder.model
    rows = min(_ESTIMATED_ROWS, probe.pool_tokens)
    one_s, rows_s = finish(probe.chunk_s(0, 1)), finish(probe.chunk_s(0, rows))
    flop_s = rows_s / forward_flop(model, 0, rows, 0)
    # Bytes of both in one and the same dtype.
    kv_token_s = one_s * token_bytes(model, torch.int8) / model.matmul_params
    head_s = finish(probe.logits_s(1))
    return ServingCurve(
        tokens=rising_points([(1, one_s), (rows, rows_s)][: min(2, rows)]),
        logits=((1, head_s),),
        pair_s=flop_s * pair_flop(model),
        kv_token_s=kv_token_s,
        sequence_s=0.0,
        swap_token_s=2 * kv_token_s,
    )


def kept_curve(
    decoder: PagedDecoder,
    file: Path,
    *,
    timer: Timer = median_s,
    most_busy_cores: float = BUSY_CORES,
) -> ServingCurve:
    """The curve of this model, dtype, threads and ranks: read if it is kept, else measured.

    What was measured while others used the cores is not kept: the next start measures again.

    Args:
        decoder: As for ``measure_curve``.
        file: Where curves are kept; one that cannot be read or written is left as it is.
        timer: As for ``measure_curve``.
        most_busy_cores: What others may use meanwhile; ranks of this engine are not told apart from
            them, so over ranks any curve is kept.
    """
    try:
        if (known := find_curve(decoder, file)) is not None:
            return known
    except SpecError:
        return measure_curve(decoder, timer=timer)
    load = OtherLoad()
    curve = measure_curve(decoder, timer=timer)
    if decoder.ranks > 1 or load.cores <= most_busy_cores:
        keep_curve(decoder, file, curve)
    return curve


def find_curve(decoder: PagedDecoder, file: Path) -> ServingCurve | None:
    """The curve that is kept of this model, dtype, threads and ranks.

    Raises:
        SpecError: as ``read_serving``.
    """
    wanted = _key(decoder)
    known = read_serving(file)
    return next(
        (
            each.curve
            for each in known
            if (each.model, each.dtype, each.threads, each.ranks) == wanted
        ),
        None,
    )


def keep_curve(decoder: PagedDecoder, file: Path, curve: ServingCurve) -> None:
    """Keep a curve beside those of other engines; where that is refused, it is measured again."""
    model = decoder.decoder.model
    title = f"{model.layers} layers, width {model.hidden}"
    name, dtype, threads, ranks = _key(decoder)
    date = time.strftime("%Y-%m-%d")
    with suppress(OSError, SpecError):
        write_serving(file, MeasuredServing(name, title, dtype, threads, ranks, date, curve))


def _key(decoder: PagedDecoder) -> tuple[str, Dtype, int, int]:
    # Tiles of fixed rows are another engine: other seconds for the same sizes.
    name = serving_name(decoder.decoder.model)
    name += f"-tiles-{decoder.tile_rows}" if decoder.tile_rows else ""
    return name, DTYPES[decoder.pool.dtype], torch.get_num_threads(), decoder.ranks
