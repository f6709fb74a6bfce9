"""Strategies of ``equipoise explain --schedule``: each written, proven, replayed and counted."""

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from equipoise.balance.stage import StageSplit, price_stages, split_model
from equipoise.base.arrays import Ints
from equipoise.base.errors import EquipoiseError, FitError, LayoutError, SpecError
from equipoise.base.nearest import nearest
from equipoise.base.units import format_bytes
from equipoise.schedule.pipeline.bound import bound_pipeline
from equipoise.schedule.pipeline.check import check_pipeline, find_excess
from equipoise.schedule.pipeline.instruction import OP, Op
from equipoise.schedule.pipeline.prices import PipelinePrices
from equipoise.schedule.pipeline.replay import PipelineTimeline, count_in_flight, replay_pipeline
from equipoise.schedule.pipeline.schedule import PipelineSchedule
from equipoise.schedule.pipeline.strategies import (
    LOSSY,
    ONE_STAGE,
    STRATEGIES,
    write_pipeline,
)

if TYPE_CHECKING:
    from equipoise.cli.explain.pipeline_setting import PipelineSetting

_ADAPTS = ("auto", *LOSSY)
"""Strategies that fit any bound which holds the largest micro-batch."""

LeftOut = list[tuple[str, str]]
"""Strategies that cannot run, and why not, a sentence each."""


@dataclass(frozen=True, slots=True, eq=False)
class PipelineScore:
    """One strategy with its figures."""

    name: str
    chunks: int
    """Stages of a rank."""
    split: StageSplit
    schedule: PipelineSchedule
    timeline: PipelineTimeline
    held_bytes: Ints
    """The most that each rank holds at a time, int64 [ranks] [bytes]."""
    bound_ns: int | None
    """No schedule of these stages takes less; None where stages are left out [ns]."""

    @property
    def title(self) -> str:
        """Strategy and stages of a rank, as pictures name it."""
        return self.name if self.chunks == 1 else f"{self.name}, {self.chunks} stages a rank"

    @property
    def most_bytes(self) -> int:
        """Activations of the rank that holds most [bytes]."""
        return int(self.held_bytes.max(initial=0))

    @property
    def over_bound(self) -> float | None:
        """Makespan over its lower bound [ratio]."""
        if self.bound_ns is None:
            return None
        return self.timeline.makespan_ns / self.bound_ns if self.bound_ns else 1.0


def score_pipelines(setting: "PipelineSetting") -> tuple[list[PipelineScore], LeftOut]:
    """Score what is asked for: one strategy, or all of them.

    Returns:
        The scores; of all strategies, those that cannot run.

    Raises:
        SpecError: no strategy has that name.
        LayoutError: the one strategy, or every one, cannot run on these stages.
        FitError: likewise, within the bound; says what fits.
    """
    if setting.strategy != "all":
        _require_name(setting.strategy)
        chunks = setting.chunks or _usual_chunks(setting.strategy)[0]
        try:
            return [_score(setting.strategy, chunks, setting)], []
        except FitError as fault:
            others, _ = _score_all(setting)
            fitting = [f"{each.title} ({format_bytes(each.most_bytes)})" for each in others]
            fix = (
                f"These fit: {', '.join(fitting)}."
                if fitting
                else "Nothing fits: allow more, or make micro-batches smaller."
            )
            raise FitError(f"{fault} {fix}") from None
    scores, left_out = _score_all(setting)
    if not scores:
        raise LayoutError(f"No strategy can run: {left_out[0][1]}")
    return scores, left_out


def _score_all(setting: "PipelineSetting") -> tuple[list[PipelineScore], LeftOut]:
    scores: list[PipelineScore] = []
    left_out = []
    for name in STRATEGIES:
        for chunks in (setting.chunks,) if setting.chunks else _usual_chunks(name):
            try:
                scores.append(_score(name, chunks, setting))
            except EquipoiseError as fault:
                left_out.append((name, str(fault)))
    return scores, left_out


def _require_name(name: str) -> None:
    if name not in STRATEGIES:
        raise SpecError(
            f'--strategy: "{name}" is not one of all, {", ".join(STRATEGIES)}. Nearest: '
            f'"{nearest(name, list(STRATEGIES))}".'
        )


def _usual_chunks(name: str) -> tuple[int, ...]:
    """Stages of a rank where none are said; all of them are compared."""
    if name in ("gpipe", "auto"):
        return 1, 2
    return (1,) if name in ONE_STAGE else (2,)


def _score(name: str, chunks: int, setting: "PipelineSetting") -> PipelineScore:
    """One strategy, proven by the checker and replayed."""
    split = split_model(setting.layers, setting.model, setting.ranks * chunks)
    made = price_stages(
        split,
        setting.layers,
        hop_ns=setting.hop_ns,
        recompute=setting.recompute,
    )
    prices = replace(made, activation=made.activation * setting.token_bytes)
    schedule = _write(name, prices, setting)
    check_pipeline(schedule, allow_lossy=name in LOSSY)
    return PipelineScore(
        name=name,
        chunks=chunks,
        split=split,
        schedule=schedule,
        timeline=replay_pipeline(schedule, prices),
        held_bytes=count_in_flight(schedule, prices.activation).peak,
        bound_ns=None if schedule.is_lossy else bound_pipeline(prices, schedule.rank_of),
    )


def _write(name: str, prices: PipelinePrices, setting: "PipelineSetting") -> PipelineSchedule:
    write = partial(
        write_pipeline,
        name,
        prices,
        ranks=setting.ranks,
        units=setting.units,
        skip=setting.skip if name in LOSSY else 0.0,
        arranged=setting.is_arranged,
    )
    allowed = setting.most_bytes
    if allowed is None:
        return write()
    if name in _ADAPTS:
        try:
            return write(most_held=allowed)
        except FitError:
            rank, least = _largest_unit(write(), prices.activation)
            raise FitError(
                f"{name} needs {format_bytes(least)} for the largest micro-batch, or those that "
                f"share a document, on rank {rank}, {format_bytes(allowed)} are allowed: "
                f"{format_bytes(least - allowed)} too many."
            ) from None
    schedule = write()
    over = find_excess(schedule, prices.activation, np.full(setting.ranks, allowed, dtype=np.int64))
    if over is not None:
        rank, held, _ = over
        raise FitError(
            f"{name} holds {format_bytes(held)} of activations on rank {rank}, "
            f"{format_bytes(allowed)} are allowed: {format_bytes(held - allowed)} too many."
        )
    return schedule


def _largest_unit(schedule: PipelineSchedule, activation: Ints) -> tuple[int, int]:
    """The rank on which one unit leaves most behind, and how much that is."""
    held = np.zeros((schedule.ranks, len(schedule.units)), dtype=np.int64)
    for rank, table in enumerate(schedule.orders):
        _, stage, micro_batch = table[table[:, OP] == Op.FORWARD].T
        np.add.at(held[rank], schedule.unit_of[micro_batch], activation[stage, micro_batch])
    rank = int(held.max(axis=1).argmax())
    return rank, int(held[rank].max())
