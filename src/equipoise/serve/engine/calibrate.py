"""Measure what an engine's iterations take on this machine, and keep it.

What it decides
    Which iterations are timed: a few rows and many, short contexts and long ones. Each term of the
    price is what two of them differ by. Times are the median of some runs, for the price is to
    say what an iteration takes, not what it could take.

Kept true (tests/unit/serve/engine/test_calibrate.py)
    From a clock that follows a known curve, that curve is measured; a kept curve is not measured
    again, and one that was measured while others used the cores is not kept.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from equipoise.base.errors import SpecError
from equipoise.cost.serving import rising_points
from equipoise.observe.machine import BUSY_CORES, OtherLoad
from equipoise.schedule.batching.iteration import PageRun, ServeChunk, Swap
from equipoise.serve.engine.forward import PagedDecoder
from equipoise.spec.device.serving import (
    MeasuredServing,
    ServingCurve,
    read_serving,
    serving_name,
    write_serving,
)
from equipoise.spec.device.spec import Dtype

_ROWS = (1, 4, 16, 64, 256, 512)
_LOGITS = (1, 8, 32, 64)
_CHUNK, _CONTEXT = 256, 2048
_SEQUENCES = 8
_BUDGET_S = 0.1
"""Time for the runs of one iteration, but at least three of them [s]."""

_LONG_S = 0.25
"""A run that takes longer is not repeated [s]."""

_TOTAL_S = 3.0
"""Beyond this, of the numbers of rows only those that are needed are timed [s]."""

_NEEDED_ROWS = (1, 64, 256)

DTYPES: dict[torch.dtype, Dtype] = {torch.float32: "fp32", torch.bfloat16: "bf16"}

Timer = Callable[[Callable[[], None]], float]
"""Seconds of a call."""


def median_s(call: Callable[[], None], *, clock: Callable[[], float] = time.perf_counter) -> float:
    """The median time of some runs after one that warms up; of a long one, that one [s]."""
    begin = clock()
    call()
    if (first_s := clock() - begin) > _LONG_S:
        return first_s
    times = list[float]()
    while len(times) < 3 or (sum(times) < _BUDGET_S and len(times) < 9):
        begin = clock()
        call()
        times.append(clock() - begin)
    return statistics.median(times)


class _Probe:
    """Iterations of an engine that nobody uses yet; its pool's contents do not matter."""

    def __init__(self, decoder: PagedDecoder, timer: Timer) -> None:
        self._decoder, self._timer = decoder, timer
        self._size = decoder.pool.page_tokens
        self.pool_tokens = decoder.pool.pages * self._size

    def _chunk(self, start: int, tokens: int, first: int = 0) -> ServeChunk:
        runs = (PageRun(first, -(-(start + tokens) // self._size)),)
        return ServeChunk("", start, tokens, runs, samples=False, logits=0)

    def chunk_s(self, start: int, tokens: int) -> float:
        """One sequence's tokens [start, start + tokens)."""
        return self._run_s([self._chunk(start, tokens)])

    def decodes_s(self, sequences: int, context: int) -> float:
        """One token each of sequences with this many tokens."""
        pages = -(-context // self._size)
        last = self._decoder.pool.pages - pages
        chunks = [self._chunk(context - 1, 1, min(at * pages, last)) for at in range(sequences)]
        return self._run_s(chunks)

    def _run_s(self, chunks: Sequence[ServeChunk]) -> float:
        tokens = [1] * sum(chunk.tokens for chunk in chunks)

        def run() -> None:
            self._decoder.run(chunks, tokens)

        return self._timer(run)

    def logits_s(self, rows: int) -> float:
        """Rows through the head, and their likeliest tokens."""
        weight = self._decoder.decoder.embed.weight
        x_tD = torch.zeros(rows, self._decoder.decoder.model.hidden).to(weight)

        def read() -> None:
            for logits_RV in self._decoder.logits(x_tD, range(rows)):
                logits_RV.float().max(dim=-1)

        return self._timer(read)

    def swap_token_s(self) -> float:
        """One token's keys and values, one way; nothing without slots."""
        pool = self._decoder.pool
        pages = tuple(range(min(pool.pages, pool.swap_pages, 16)))
        if not pages:
            return 0.0
        swap = Swap("", pages, pages)
        return self._timer(lambda: pool.swap_out(swap)) / (len(pages) * self._size)


def measure_curve(decoder: PagedDecoder, *, timer: Timer = median_s) -> ServingCurve:
    """Time an engine's iterations: a few seconds, or one run of each that takes longer.

    Args:
        decoder: With a pool that nobody uses yet.
        timer: How a call is timed.
    """
    begin = time.monotonic()
    probe = _Probe(decoder, timer)
    context = max(1, min(_CONTEXT, probe.pool_tokens - _CHUNK))
    chunk = min(_CHUNK, probe.pool_tokens - context)
    # Two differences, two unknowns: pairs and rows of keys.
    long_s = probe.chunk_s(context, chunk) - probe.chunk_s(0, chunk)
    short = min(context, 64)
    many = probe.decodes_s(_SEQUENCES, context) - probe.decodes_s(_SEQUENCES, short)
    row_s = max(0.0, many) / (_SEQUENCES * max(1, context - short))
    pair_s = max(0.0, long_s - row_s * context) / max(1, (chunk - 1) * context)
    pair_s = min(pair_s, row_s) if row_s else pair_s
    kv_token_s = max(0.0, row_s - pair_s)
    tokens = list[tuple[int, float]]()
    for rows in _ROWS:
        if rows > probe.pool_tokens:
            break
        if time.monotonic() - begin > _TOTAL_S and rows not in _NEEDED_ROWS:
            continue
        attention_s = pair_s * rows * (rows + 1) / 2 + kv_token_s * rows
        tokens.append((rows, max(1e-9, probe.chunk_s(0, rows) - attention_s)))
    apart_s = probe.decodes_s(_SEQUENCES, 1) - _read(tokens, _SEQUENCES)
    return ServingCurve(
        tokens=rising_points(tokens),
        logits=rising_points([(rows, probe.logits_s(rows)) for rows in _LOGITS]),
        pair_s=pair_s,
        kv_token_s=kv_token_s,
        sequence_s=max(0.0, apart_s) / _SEQUENCES,
        swap_token_s=probe.swap_token_s(),
    )


def _read(points: Sequence[tuple[int, float]], rows: int) -> float:
    return next((seconds for at, seconds in points if at >= rows), points[-1][1])


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
    model, dtype = decoder.decoder.model, DTYPES[decoder.pool.dtype]
    # Tiles of fixed rows are another engine: other seconds for the same sizes.
    name = serving_name(model) + (f"-tiles-{decoder.tile_rows}" if decoder.tile_rows else "")
    threads, ranks = torch.get_num_threads(), decoder.ranks
    try:
        for each in read_serving(file):
            if (each.model, each.dtype, each.threads, each.ranks) == (name, dtype, threads, ranks):
                return each.curve
    except SpecError:
        return measure_curve(decoder, timer=timer)
    load = OtherLoad()
    curve = measure_curve(decoder, timer=timer)
    if ranks == 1 and load.cores > most_busy_cores:
        return curve
    title = f"{model.layers} layers, width {model.hidden}"
    date = time.strftime("%Y-%m-%d")
    try:
        write_serving(file, MeasuredServing(name, title, dtype, threads, ranks, date, curve))
    except (OSError, SpecError):
        return curve
    return curve
