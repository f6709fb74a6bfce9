"""plan.lock: what was decided, at which price, and all inputs of the decision.

Why
    A plan is right for one model on one cluster at one price list. Six weeks later one of them
    has changed, and nobody remembers which.

What it decides
    The file's form: one JSON object. ``asked`` holds the words of the command line; ``read`` has
    a digest of each input of the price: model, cluster, lengths, measured curves, this package's
    version; ``digest`` is of all else. Candidates have the keys of ``equipoise simulate --json``
    and their words: flags of ``equipoise simulate`` and, if a run.toml was planned, its keys.

Kept true (tests/unit/spec/test_plan.py)
    What is written reads back; a lock of another form, edited, or with changed inputs, is refused
    by name.
"""

import dataclasses
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from equipoise.base.digest import digest
from equipoise.base.durable import write_whole
from equipoise.base.errors import PlanError
from equipoise.base.read import read_json, reason
from equipoise.spec.run.keys import RENAMED

VERSION = 3

LOCK = "plan.lock"
"""Name of the file, beside a run.toml and in a run's folder."""

_DIGEST = "digest"
"""Key of the digest of all others."""

RUN_TOML = "run.toml"
"""Key of ``asked`` with the path of the planned run.toml."""

MEASURED_S = "measured_s"
"""Key of a price with the median of measured steps, for a choice that was trained."""


@dataclass(frozen=True, slots=True)
class Stages:
    """Which layers each stage of a pipeline has, and which rank has the stage."""

    edges: tuple[int, ...]
    """Stage s has layers ``edges[s]`` to ``edges[s + 1]``; one number more than stages."""
    ranks: tuple[int, ...]
    """Pipeline rank of each stage."""

    def __str__(self) -> str:
        """A stage after the other.

        >>> str(Stages((0, 3, 4), (0, 1)))
        'layers 0-2 on rank 0, 3 on rank 1'
        """
        runs = (
            f"{first}-{stop - 1}" if stop - first > 1 else f"{first}"
            for first, stop in pairwise(self.edges)
        )
        said = (f"{run} on rank {rank}" for run, rank in zip(runs, self.ranks, strict=True))
        return f"layers {', '.join(said)}"


@dataclass(frozen=True)
class _PricedStages:
    nodes: list[str]


@dataclass(frozen=True)
class _Interval:
    low_s: float
    high_s: float


@dataclass(frozen=True)
class _Price:
    """What is read of a price, which holds more."""

    __pydantic_config__ = ConfigDict(strict=True, allow_inf_nan=False)

    step_s: float
    tokens_per_s_per_device: float
    tflops_per_device: float
    mfu: float
    useful_mfu: float
    memory_gib_max: float
    capacity_gib: float
    host_memory_gib_max: float
    host_capacity_gib: float
    memory: dict[str, float]
    terms: dict[str, float]
    stages: _PricedStages
    energy_j_per_token: float
    usd_per_million_tokens: float | None
    extrapolated: list[str]
    measured_s: float = 0.0
    interval: _Interval | None = None
    doubts: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Priced:
    price: _Price


@dataclass(frozen=True)
class _Prices:
    """The prices of a lock."""

    best: _Priced
    runners_up: list[_Priced]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One choice and its price."""

    words: dict[str, str]
    """Flags of ``equipoise simulate`` that describe it."""
    price: dict[str, Any]
    """What ``equipoise simulate --json`` prints for it."""
    loses_by: dict[str, float]
    """Seconds of each term beyond the best choice's; empty for the best."""
    keys: dict[str, int | str] = field(default_factory=dict)
    """Dotted keys of run.toml that describe it; empty unless a run.toml was planned."""
    stages: Stages | None = None
    """Stages of a run.toml's pipeline; None without a pipeline, and where the run is to split its
    layers when it starts."""


@dataclass(frozen=True, slots=True)
class Wall:
    """What breaks first when something grows and the layout stays."""

    grows: str
    before: int
    after: int
    """The smallest tried size that does not fit."""
    memory_gib: float
    capacity_gib: float
    of_host: bool = False
    """Whether host memory is what is full."""


@dataclass(frozen=True, slots=True)
class Flip:
    """How much slower one term must be for the first runner-up to win."""

    term: str
    times: float
    winner: str
    """Words of the first runner-up's layout."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A decision."""

    asked: dict[str, str]
    best: Candidate
    runners_up: tuple[Candidate, ...]
    bound_s: float
    """Lower bound on the step of any choice [s]."""
    gap: float | None
    """The best's ``step_s`` over ``bound_s``, minus 1; None without a bound."""
    listed: int
    priced: int
    wall: tuple[Wall, ...]
    """Nearest first."""
    flip: Flip | None
    nodes: tuple[int, ...]
    """Which node of the cluster is at which place of the best choice; empty if as given."""
    read: dict[str, str]
    """Digests of inputs, by name."""
    sources: dict[str, str]
    """Where each number of the cluster comes from, by its name."""
    without_offload: dict[str, float] | None = None
    """``step_s`` and ``memory_gib_max`` without offloading, if the best offloads; else None."""
    remarks: tuple[str, ...] = ()
    """What else a reader should know: published recipes' prices, programs that run a schedule."""
    version: int = VERSION

    @property
    def command(self) -> str:
        """The command that made the plan, without ``--out``."""
        said = [
            [value] if flag == RUN_TOML else [f"--{flag}", value]
            for flag, value in self.asked.items()
        ]
        said += [["--measure"]] if MEASURED_S in self.best.price else []
        return shlex.join(["equipoise", "plan", *(part for parts in said for part in parts)])

    def as_row(self) -> dict[str, Any]:
        """Plain data: the file's content."""
        row = dataclasses.asdict(self)
        for each in (row["best"], *row["runners_up"]):
            if each["stages"] is None:
                del each["stages"]
        return row

    def write(self, file: Path) -> None:
        """Write the lock, whole or not at all."""
        row = self.as_row()
        write_whole(file, json.dumps(row | {_DIGEST: digest(row)}, indent=1) + "\n")


def read_plan(file: Path) -> Plan:
    """Read a lock.

    Raises:
        PlanError: the file cannot be read, is not a plan.lock, is of another version, or was
            changed.
    """
    try:
        row = read_json(file)
    except (OSError, ValueError) as error:
        raise PlanError(
            f"{file} cannot be read as a plan.lock ({reason(error)}). Write one: "
            f'"equipoise plan --out {file.parent}".'
        ) from None
    version = row.get("version") if isinstance(row, dict) else None
    if version is None:
        raise PlanError(
            f"{file} has no version field: not a plan.lock. Write one: "
            f'"equipoise plan --out {file.parent}".'
        )
    if version != VERSION:
        raise PlanError(
            f"{file} is a plan of version {version}; this equipoise reads version {VERSION}. "
            f'Plan again with the words under its "asked".'
        )
    known = row.pop(_DIGEST, None)  # earlier versions wrote none
    if known is not None and known != digest(row):
        raise PlanError(
            f"{file} has changed since it was written, and its prices are of other choices than it "
            f'names. Plan again: "equipoise plan --out {file.parent}".'
        )
    try:
        plan = Plan(
            **row
            | {
                "best": _candidate(row["best"]),
                "runners_up": tuple(map(_candidate, row["runners_up"])),
                "wall": tuple(Wall(**each) for each in row["wall"]),
                "nodes": tuple(row["nodes"]),
                "remarks": tuple(row.get("remarks", ())),
                "flip": Flip(**row["flip"]) if row["flip"] else None,
            }
        )
        _require_kinds(plan)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PlanError(
            f"{file} is not a whole plan.lock ({reason(error)}). Plan again: "
            f'"equipoise plan --out {file.parent}".'
        ) from None
    return plan


def _require_kinds(plan: Plan) -> None:
    """Refuse values of other kinds than a lock has.

    Raises:
        ValueError: names the first.
    """
    text = json.dumps(plan.as_row())
    TypeAdapter(Plan).validate_json(text, strict=True)
    TypeAdapter(_Prices).validate_json(text)
    if not all("layout" in each.words for each in (plan.best, *plan.runners_up)):
        raise KeyError("layout")
    if RUN_TOML not in plan.asked and not {"model", "cluster"} <= plan.asked.keys():
        raise KeyError(RUN_TOML)


def _candidate(row: dict[str, Any]) -> Candidate:
    keys = {RENAMED.get(name, name): each for name, each in row.get("keys", {}).items()}
    row = row | {"keys": keys}
    stages = row.get("stages")
    if stages is None:
        return Candidate(**row)
    placed = Stages(**{name: tuple(map(int, numbers)) for name, numbers in stages.items()})
    return Candidate(**row | {"stages": placed})


def require_fresh(plan: Plan, now: Mapping[str, str], file: Path) -> None:
    """Refuse a plan whose inputs have changed.

    Raises:
        PlanError: names what changed.
    """
    names = sorted({*plan.read, *now})
    changed = [name for name in names if plan.read.get(name) != now.get(name)]
    if changed:
        raise PlanError(
            f"{file} is stale: {' and '.join(changed)} changed since it was written. Plan again: "
            f'"{plan.command} --out {shlex.quote(str(file.parent))}".'
        )
