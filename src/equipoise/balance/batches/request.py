"""``balance.batch``: lengths of a batch in, micro-batches of every rank out.

Why
    Every trainer has its own balancer: by tokens, by a formula of another model, over ranks but
    not over micro-batches, with a cap that does not hold or a rank that comes out empty. What
    they need is one function without a framework.

What it decides
    The number of micro-batches, the fewest that the cap allows; then which rank runs which
    sample in which of them. Every rank gets the same answer from the same arguments.

Kept true (tests/unit/balance/batches/test_batch.py, by Hypothesis)
    Each sample once; the cap holds; ranks have equal counts and something to do, unless asked
    otherwise; a group lies in one micro-batch; the answer is never below its bound, and near the
    exact one on small cases.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from equipoise.balance.batches.answer import Batches, Meets
from equipoise.balance.batches.arguments import (
    count_samples,
    count_units,
    price_units,
    read_limits,
    require_count,
    require_divisible,
    shifted,
    too_long,
)
from equipoise.balance.batches.cells import (
    CLOSE,
    cells_of_own_turns,
    cells_of_ranks,
    cells_of_turns,
    ranks_ns,
)
from equipoise.balance.batches.divided import divide, seconds_of
from equipoise.balance.batches.pipeline import order_in_pipeline
from equipoise.balance.batches.prices import Price
from equipoise.balance.batches.units import Shared, Units, read_lengths
from equipoise.balance.bound import divisible_bound, largest_bin_bound
from equipoise.balance.packing.divided import macro_units
from equipoise.base.arrays import Floats, Ints
from equipoise.base.errors import LayoutError, SpecError
from equipoise.cost.curve import LoadCurve
from equipoise.schedule.pipeline.strategies import require_strategy

_MOST_STAGES = 1024
_MOST_CELLS = 1 << 22
"""Micro-batches of a step over all ranks; more is a typing mistake."""


def batch(
    lengths: npt.ArrayLike,
    ranks: int = 1,
    *,
    price: Price | Sequence[Price] | None = None,
    seconds: npt.ArrayLike | None = None,
    max_tokens: int | Sequence[int] | None = None,
    groups: Sequence[Shared | Sequence[int]] = (),
    shares_prefix: bool = True,
    divides: bool = False,
    pipeline: int = 1,
    schedule: str = "1f1b",
    min_micro_batches: int = 1,
    multiple_of: int = 1,
    meets_each_turn: bool = True,
    equal_counts: bool = True,
    may_be_empty: bool = False,
) -> Batches:
    """Share a batch out over ranks and micro-batches, evenly in predicted seconds.

    Args:
        lengths: Tokens of each sample, [samples]; or [samples, kinds] if a sample has tokens of
            several kinds, such as image and text, which are computed one after the other with a
            barrier between them.
        ranks: Data-parallel ranks.
        price: What a sample costs: a preset's name, a ``ModelSpec``, the dict of a config.json, a
            configuration of transformers, or a ``LoadCurve`` (``fit_curve`` makes one from a
            table, ``device_curve`` one from measured kernels). One for each kind of token.
        seconds: What each sample costs, in place of ``price``: [samples], or [samples, phases]
            with a barrier after each phase. Any unit.
        max_tokens: Most tokens of a micro-batch; one number for each kind of token. Without it
            each rank gets ``min_micro_batches``.
        groups: Samples that share a prefix: ``Shared(tokens, members)``, members being samples
            or further ``Shared``; or lists of samples that belong together. ``lengths`` are
            whole lengths, prefix included.
        shares_prefix: Whether the attention computes a shared prefix once. If so a group lies in
            one micro-batch; if not, its samples cost what they cost alone and are free.
        divides: Whether samples may be divided: over ranks, or over the micro-batches of a
            pipeline. A piece then reads the keys of its sample's earlier tokens in other
            micro-batches.
        pipeline: Ranks that share the layers.
        schedule: Schedule of the pipeline, by name.
        min_micro_batches: Fewest micro-batches of each rank.
        multiple_of: Number that divides each rank's micro-batches, as interleaved pipelines need.
        meets_each_turn: Whether data-parallel ranks wait for each other in every micro-batch, as
            under FSDP, ZeRO 2 and 3 and expert parallelism, or only at the step's end. In a
            pipeline they meet at its end.
        equal_counts: Whether all ranks get equally many micro-batches.
        may_be_empty: Whether a micro-batch may be empty: with fewer samples than ranks, or than
            micro-batches that the cap needs. Run one token without a label for it, so that
            collectives match.

    Returns:
        Samples, tokens and predicted seconds of each micro-batch, with their skew and a bound.

    Raises:
        DataError: lengths, prices or groups are not what they should be; names the sample.
        LayoutError: the samples do not fit, or do not reach every rank; says what does.
        SpecError: a name is unknown, or options contradict each other.

    Cost: 1 to 4 ms for 2,000 samples over 64 ranks, once compiled, and twice that if ranks meet
    only at the step's end; replaying pipelines adds a millisecond for each data-parallel rank.

    >>> answer = batch([8000, 300, 300, 4000, 120, 2500, 900], ranks=2, price="2m")
    >>> answer.micro_batches, round(answer.skew, 2), round(answer.gap, 2)
    ([[[0]], [[1, 2, 3, 4, 5, 6]]], 1.32, 0.0)
    """
    ranks = require_count("ranks", ranks)
    pipeline = require_count("pipeline", pipeline)
    min_micro_batches = require_count("min_micro_batches", min_micro_batches)
    multiple_of = require_count("multiple_of", multiple_of)
    if pipeline > _MOST_STAGES:
        raise SpecError(
            f"pipeline is {pipeline:,}, more ranks than any model has layers for. Give "
            f"{_MOST_STAGES:,} or less."
        )
    if meets_each_turn and pipeline == 1 and not equal_counts:
        raise SpecError(
            "Ranks that meet in each micro-batch need equally many of them. Give "
            "equal_counts=True, or meets_each_turn=False."
        )
    require_strategy(schedule)
    if pipeline > 1 and not equal_counts:
        raise SpecError(
            "Ranks of a pipeline need equally many micro-batches. Give equal_counts=True."
        )
    table = read_lengths(lengths)
    limits = read_limits(max_tokens, table)
    units, unit_s, curves = price_units(table, price, seconds, groups, shares_prefix=shares_prefix)
    meets: Meets = "each micro-batch" if meets_each_turn else "the step's end"
    meets = meets if pipeline == 1 else "a pipeline"
    fewest = int((-(-units.sizes.sum(0) // (ranks * limits))).max())
    turns = -(-max(fewest, min_micro_batches) // multiple_of) * multiple_of
    if ranks * turns > _MOST_CELLS:
        each = f"{turns:,} micro-batch{'es' * (turns > 1)}"
        raise LayoutError(
            f"{ranks:,} ranks with {each} each are more than {_MOST_CELLS:,} "
            f"micro-batches. Give a larger max_tokens, or fewer ranks."
        )
    fixed_s = np.array([1e-9 * curve.fixed_ns for curve in curves] or np.zeros(unit_s.shape[1]))
    if divides:
        require_divisible(curves, groups, units, limits, equal_counts=equal_counts)
        return _divided(
            table[:, 0],
            curves[0],
            limits,
            ranks,
            turns,
            multiple_of,
            meets,
            pipeline=pipeline,
            schedule=schedule,
            may_be_empty=may_be_empty,
        )
    over = np.argwhere(units.sizes > limits)
    if len(over):
        raise LayoutError(too_long(units, int(over[0, 0]), int(over[0, 1]), limits, groups))
    if len(units) < ranks and not may_be_empty:
        raise LayoutError(
            f"{count_units(units)} cannot give each of {ranks:,} ranks one. Give {ranks:,} "
            f"samples or more, fewer ranks, divides=True, or may_be_empty=True."
        )
    small = Units(units.unit_of, shifted(units.loads, ranks * max(turns, len(units))), units.sizes)
    if equal_counts:
        turns, cell_of = _equal_cells(small, limits, ranks, turns, multiple_of, meets, may_be_empty)
        own_turns = np.full(ranks, turns)
    else:
        own_turns, cell_of = _own_cells(
            small, limits, ranks, min_micro_batches, multiple_of, may_be_empty
        )
    return _answer(
        table,
        units,
        unit_s,
        fixed_s,
        cell_of,
        own_turns,
        meets,
        pipeline=pipeline,
        schedule=schedule,
    )


def _equal_cells(
    units: Units,
    limits: Ints,
    ranks: int,
    turns: int,
    step: int,
    meets: Meets,
    may_be_empty: bool,
) -> tuple[int, Ints]:
    """The fewest micro-batches that fit, equally many on each rank, and each unit's cell."""
    loads, sizes = units.loads, units.sizes
    while may_be_empty or len(units) >= ranks * turns:
        cells = cells_of_turns(
            loads,
            sizes,
            limits,
            ranks,
            turns,
            may_be_empty=may_be_empty,
            turns_may_differ=meets != "a pipeline",
        )
        if cells is not None and meets == "each micro-batch":
            return turns, cells
        mean = int(loads.sum()) / ranks
        if cells is None or ranks_ns(cells, loads, ranks, turns) > CLOSE * mean:
            of_ranks = cells_of_ranks(loads, sizes, limits, ranks, turns, may_be_empty=may_be_empty)
            answers = [each for each in (cells, of_ranks) if each is not None]
            if answers:
                cells = min(answers, key=lambda each: ranks_ns(each, loads, ranks, turns))
        if cells is not None:
            return turns, cells
        turns += step
    raise LayoutError(
        f"{count_units(units)} cannot fill {turns:,} micro-batches on each of {ranks:,} ranks, the "
        f"fewest that could hold their tokens. Give a larger max_tokens, may_be_empty=True, or "
        f"equal_counts=False with meets_each_turn=False."
    )


def _own_cells(
    units: Units, limits: Ints, ranks: int, least: int, step: int, may_be_empty: bool
) -> tuple[Ints, Ints]:
    """Each rank's own number of micro-batches, and each unit's cell."""
    own_cells = cells_of_own_turns(
        units.loads, units.sizes, limits, ranks, least, step, may_be_empty=may_be_empty
    )
    if own_cells is None:
        fewest = -(-least // step) * step
        raise LayoutError(
            f"{count_units(units)} cannot fill at least {fewest:,} micro-batches on each of "
            f"{ranks:,} ranks, in multiples of {step:,}. Give more samples, a smaller "
            f"min_micro_batches or multiple_of, or may_be_empty=True."
        )
    return own_cells


def _answer(
    table: Ints,
    units: Units,
    unit_s: Floats,
    fixed_s: Floats,
    cell_of: Ints,
    own_turns: Ints,
    meets: Meets,
    *,
    pipeline: int,
    schedule: str,
) -> Batches:
    """Cells as micro-batches of samples, in the order in which they run.

    ``own_turns`` int64 [ranks]: micro-batches of each rank.
    """
    ranks, turns = len(own_turns), int(own_turns.max())
    cells = ranks * turns
    counts = np.bincount(cell_of[units.unit_of], minlength=cells)
    order = np.argsort(cell_of[units.unit_of], kind="stable")
    rows = np.stack((order, np.zeros_like(order), table[order].sum(1)), axis=1)
    ends = np.cumsum(counts).tolist()
    batches = [rows[first:stop] for first, stop in itertools.pairwise([0, *ends])]
    seconds = np.zeros((cells, unit_s.shape[1]))
    np.add.at(seconds, cell_of, unit_s)
    seconds += fixed_s * (counts > 0)[:, None]
    tokens = np.zeros((cells, units.sizes.shape[1]), dtype=np.int64)
    np.add.at(tokens, cell_of, units.sizes)
    by_rank = np.arange(cells).reshape(turns, ranks).T.copy()
    makespans = []
    if pipeline > 1:
        for rank in range(ranks):
            mine = seconds[by_rank[rank]].sum(1)
            chosen, makespan_s = order_in_pipeline(mine, schedule, pipeline)
            by_rank[rank] = by_rank[rank][chosen]
            makespans.append(makespan_s)
    pieces = tuple(
        tuple(batches[cell] for cell in row[:own])
        for row, own in zip(by_rank.tolist(), own_turns.tolist(), strict=True)
    )
    table_s = seconds[by_rank]
    bound_s = _bound_s(unit_s, fixed_s, ranks) / pipeline
    if pipeline > 1:  # forward and input gradients of one sample go through all stages
        bound_s = max(bound_s, float(unit_s.max()) * 2 / 3)
    return Batches(
        pieces, tokens[by_rank], table_s, _step_s(table_s, meets, makespans), bound_s, meets
    )


def _step_s(seconds: Floats, meets: Meets, makespans: list[float]) -> float:
    if meets == "a pipeline":
        return max(makespans)
    if meets == "each micro-batch":
        return float(seconds.max(0).sum())
    return float(seconds.sum(1).max(0).sum())


def _bound_s(unit_s: Floats, fixed_s: Floats, ranks: int) -> float:
    """Least time of a step: phase by phase the heaviest rank's bound, and one fixed part."""
    whole = float(unit_s.sum()) or 1.0
    bounds = [
        largest_bin_bound(np.floor(column / whole * 2.0**52).astype(np.int64), ranks)
        / 2.0**52
        * whole
        for column in unit_s.T
    ]
    return float(sum(bounds) + fixed_s.sum())


def _divided(
    tokens: Ints,
    curve: LoadCurve,
    limits: Ints,
    ranks: int,
    turns: int,
    step: int,
    meets: Meets,
    *,
    pipeline: int,
    schedule: str,
    may_be_empty: bool,
) -> Batches:
    """The same with divided samples."""
    packed = divide(
        tokens,
        curve,
        ranks=ranks,
        turns=turns,
        cap=int(limits[0]),
        in_time=pipeline > 1,
        meets_each_turn=meets == "each micro-batch",
    )
    most = -(-max(packed.micro_batches, turns) // step) * step
    filled = min(sum(bool(len(batch.pieces)) for batch in rank) for rank in packed.ranks)
    if not may_be_empty and filled < most:
        raise LayoutError(
            f"{count_samples(len(tokens))} can be divided so that {filled:,} of "
            f"{most:,} micro-batch{'es' * (most > 1)} on the emptiest of {ranks:,} ranks "
            f"{'has' if filled == 1 else 'have'} a part that pays. Give more samples, fewer "
            f"micro-batches or ranks, or may_be_empty=True."
        )
    seconds = np.zeros((ranks, most, 1))
    counts = np.zeros((ranks, most, 1), dtype=np.int64)
    makespans = []
    for rank, row in enumerate(seconds_of(packed, curve)):
        seconds[rank, : len(row), 0] = row
        counts[rank, : len(row), 0] = [each.tokens for each in packed.ranks[rank]]
        if pipeline > 1:
            units = macro_units(packed.ranks[rank])
            _, makespan_s = order_in_pipeline(np.array(row), schedule, pipeline, units=units)
            makespans.append(makespan_s)
    bound_s = divisible_bound(curve.document_ns(tokens), ranks) / 1e9 + 1e-9 * curve.fixed_ns
    nothing = np.empty((0, 3), dtype=np.int64)
    pieces = tuple(
        tuple(each.pieces for each in rank) + (nothing,) * (most - len(rank))
        for rank in packed.ranks
    )
    step_s = _step_s(seconds, meets, makespans)
    return Batches(pieces, counts, seconds, step_s, bound_s / pipeline, meets)
