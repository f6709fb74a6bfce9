"""A run as arrays, read from its journals.

Kept true (tests/unit/observe/test_reader.py)
    Every column has a row for each finished step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.base.arrays import Floats, Ints
from equipoise.observe.event import journal_name
from equipoise.observe.experts import ExpertChoice
from equipoise.observe.modality import EncoderRecord


@dataclass(frozen=True, slots=True)
class Start:
    """What a run reports when it starts: the wish, the machine, the corpus."""

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
    epoch: int = 0
    """Number of the ranks that took the folder, which rises with each start; 0 of older runs."""
    stages: Mapping[str, Any] = field(default_factory=dict)
    """``edges`` and ``ranks`` of a pipeline's stages; empty where there is none."""
    compared: Mapping[str, Any] = field(default_factory=dict)
    """``policies`` that computed each step one after the other, and their ``session``; empty in
    an ordinary run."""

    @property
    def policy(self) -> str:
        """The requested packing policy."""
        return str(self.spec.get("pack", {}).get("policy", "unknown"))


@dataclass(frozen=True, slots=True)
class Spans:
    """One rank's spans in order of start: element i of every array is one span."""

    names: tuple[str, ...]
    """Legend of ``name``."""
    name: NDArray[np.int64]
    t: Floats
    """Start [unix seconds]."""
    duration_s: Floats
    step: Floats
    """NaN if the span belongs to no step."""
    micro_batch: Floats
    """NaN if the span belongs to a whole step."""
    stage: Floats
    """NaN outside pipelines."""
    predicted_begin_s: Floats
    """Predicted start, from the start of its step's pipeline [s]; NaN outside pipelines."""
    predicted_s: Floats
    """Predicted duration [s]; NaN outside pipelines."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The predicted memory of the fullest rank, by part."""

    forecast_bytes: float
    terms: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Stop:
    """Why and where the run ended."""

    t: float
    reason: str
    step: float


@dataclass(frozen=True, slots=True)
class RunFault:
    """Something that went wrong on a rank."""

    t: float
    rank: int
    name: str
    message: str
    step: float
    type: str = ""
    """The class of the error with which the rank ended; empty of any other fault."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """What followed a fault, as the launcher decided it."""

    t: float
    action: str
    """``restart``, ``shrink`` or ``stop``."""
    fault: str
    """``killed``, ``failed``, ``hung``, ``corrupt`` or ``non-finite``."""
    rank: int | None
    """None where nobody knows which rank it was."""
    number: float
    """How many restarts within ``fault.within_s`` this made; NaN for a stop."""
    step: float
    """The last step finished before it; NaN before the first."""
    message: str


@dataclass(frozen=True, slots=True)
class RunAlarm:
    """Something that a run noticed while it went on: a slow rank, a slow link, a long wait."""

    t: float
    rank: int
    """Whose journal has it."""
    name: str
    message: str


@dataclass(frozen=True, slots=True)
class Evaluations:
    """Held-out losses in order of their steps; E evaluations, B buckets of document lengths."""

    step: NDArray[np.int64]
    """Steps that were done; 0 before the first."""
    loss: Floats
    """Mean over all labels [nats]."""
    bits_per_byte: Floats
    """NaN where the tokenizer does not say which bytes its tokens stand for."""
    labels: Floats
    tokens: Floats
    documents: Floats
    eval_s: Floats
    """Measured, no part of any step [s]."""
    predicted_s: Floats
    """Predicted compute of the slowest rank [s]."""
    least_tokens: NDArray[np.int64]
    """Shortest length of each bucket, ascending powers of two [tokens]; int64 [B]."""
    bucket_loss: Floats
    """[evaluation, bucket]; NaN where a bucket has no label [nats]."""
    bucket_labels: Floats
    bucket_documents: Floats


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run as arrays. S steps with a rank-0 ``step`` line, R ranks; ``[step, rank]``."""

    folder: Path
    start: Start
    resumed_steps: tuple[int, ...]
    """The step after which each session began, one per resume."""
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
    """Measured compute time, [step, rank]; the next four are measured too [s]."""
    wait_s: Floats
    run_delay_s: Floats
    """When a rank was ready to compute and other programs had the core."""
    memory_bytes: Floats
    peak_memory_bytes: Floats
    predicted_s: Floats
    """Compute time that the packer predicted, [step, rank] [s]."""
    in_order_predicted_s: Floats
    """Predicted compute time of the same documents packed in order, [step, rank] [s]."""
    longest_s: Floats
    """Predicted time until the last rank has computed, pipeline bubble included [s]."""
    in_order_longest_s: Floats
    """The same for documents packed in order [s]."""
    rank_tokens: Floats
    rank_documents: Floats
    rank_flop: Floats
    micro_batches: Floats
    plan_s: Floats
    skew: Floats
    turn_skew: Floats
    """Sum of each turn's slowest rank, over the mean rank."""
    in_order_skew: Floats

    spans: tuple[Spans, ...]
    """One per rank."""
    memory: Memory | None
    stop: Stop | None
    """None while the run continues, or if it was killed."""
    faults: tuple[RunFault, ...]
    recoveries: tuple[Recovery, ...]
    alarms: tuple[RunAlarm, ...]
    """In order of their times."""
    evaluations: Evaluations
    torn_lines: int
    expert_choice: ExpertChoice | None = None
    """What was chosen between policies of experts; None where a run named one."""
    parted: Mapping[int, int] | None = None
    """Forward passes of rank 0's sites by the number of parts in which rows travelled, over all
    steps; None in a run that asks for no parts."""
    rows_travel_s: tuple[float, float] | None = None
    """What rows of experts travelled beside other work, and were waited for, in a median step."""
    expert_file: tuple[float, float, float] | None = None
    """Share of a median step that rank 0 waited for experts in a file, bytes read and sent."""
    experts: tuple[float, float] | None = None
    """Rows of the busiest rank over the mean if experts stayed on their own ranks, and as planned:
    means over steps and layers; None without a policy of experts."""
    expert_steps: tuple[Ints, Floats, Floats] | None = None
    """The same by step: its number, and both as means over layers."""
    encoders: EncoderRecord | None = None
    """What ranks encoded; None without images and sound."""
    missing_ranks: tuple[int, ...] = ()
    """Ranks of the newest session whose journal is not in the folder."""

    @property
    def missing_sentence(self) -> str:
        """Which journals are missing; empty if none is."""
        if not self.missing_ranks:
            return ""
        names = [f"journal/{journal_name(rank)}" for rank in self.missing_ranks[:4]]
        more = len(self.missing_ranks) - len(names)
        listed = ", ".join([*names, f"{more:,} more"] if more else names)
        return (
            f"{self.folder} ran on {self.start.world:,} ranks and {listed} "
            f"{'is' if len(self.missing_ranks) == 1 else 'are'} missing, so how evenly its ranks "
            f"worked is not known. Copy the whole journal folder from where the run was written."
        )
