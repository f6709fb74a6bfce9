"""A run as arrays, as its journals tell it.

Kept true (tests/unit/observe/test_reader.py)
    Every column has a row for each finished step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.base.arrays import Floats


@dataclass(frozen=True, slots=True)
class Start:
    """What a run says of itself when it starts: the wish, the machine, the corpus."""

    t: float
    version: str
    world: int
    resumed_step: int
    spec: Mapping[str, Any]
    origins: Mapping[str, str]
    model: Mapping[str, Any]
    environment: Mapping[str, Any]
    corpus: Mapping[str, Any]
    curve: Mapping[str, Any]

    @property
    def policy(self) -> str:
        """The packing policy that was asked for."""
        return str(self.spec.get("pack", {}).get("policy", "unknown"))


@dataclass(frozen=True, slots=True)
class Spans:
    """What one rank did, in order of start: element i of every array is one span."""

    names: tuple[str, ...]
    """Legend of ``name``."""
    name: NDArray[np.int64]
    t: Floats
    """Start [unix seconds]."""
    duration_s: Floats
    step: Floats
    """NaN where the span belongs to no step."""
    micro_batch: Floats
    """NaN where the span belongs to a whole step."""
    stage: Floats
    """NaN outside pipelines."""
    predicted_begin_s: Floats
    """When it was to start, from the start of its step's pipeline [s]; NaN outside pipelines."""
    predicted_s: Floats
    """How long it was to take [s]; NaN outside pipelines."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The forecast of the fullest rank's memory, and what it is made of."""

    forecast_bytes: float
    terms: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Stop:
    """Why and where the run ended."""

    t: float
    reason: str
    step: float


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that went wrong on a rank."""

    t: float
    rank: int
    name: str
    message: str
    step: float


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run as arrays. S steps with a rank-0 ``step`` line, R ranks; ``[step, rank]``."""

    folder: Path
    start: Start
    resumed_steps: tuple[int, ...]
    """The step after which each session began: one more for each time the run resumed."""
    ranks: int

    step: NDArray[np.int64]
    t: Floats
    loss: Floats
    grad_norm: Floats
    lr: Floats
    tokens: Floats
    tokens_seen: Floats
    step_s: Floats
    predicted_step_s: Floats
    tokens_per_s: Floats
    mfu: Floats

    busy_s: Floats
    """[step, rank], measured, as are the next three."""
    wait_s: Floats
    memory_bytes: Floats
    peak_memory_bytes: Floats
    predicted_s: Floats
    """[step, rank], compute seconds that the packer foresaw."""
    in_order_predicted_s: Floats
    """[step, rank], had the same documents been packed in order."""
    longest_s: Floats
    """Until the last rank was to have computed: the fullest, or a pipeline with its bubble."""
    in_order_longest_s: Floats
    """Likewise, had the same documents been packed in order."""
    rank_tokens: Floats
    rank_documents: Floats
    rank_flop: Floats
    micro_batches: Floats
    plan_s: Floats
    skew: Floats
    turn_skew: Floats
    """The slowest rank of each turn, added up, over the mean rank."""
    in_order_skew: Floats

    spans: tuple[Spans, ...]
    """One for each rank."""
    memory: Memory | None
    stop: Stop | None
    """None while the run goes on, or when it was killed."""
    faults: tuple[Fault, ...]
    torn_lines: int
