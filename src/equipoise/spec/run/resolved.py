"""The decision that a launcher passes to its ranks: ``resolved.json`` in the run's folder.

The process that read run.toml writes it once and the ranks only read it, so that no rank
resolves anything by itself. It ends with a digest of itself: ranks that start again days later read
it again. ``report`` reads the origin of each value from it.
"""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from equipoise.base.digest import digest
from equipoise.base.disk import writing_run
from equipoise.base.errors import SpecError
from equipoise.base.read import read_json
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.names import RESOLVED
from equipoise.spec.run.keys import rename_keys
from equipoise.spec.run.spec import RunSpec

_DIGEST = "digest"
"""Key of the digest of all others."""


@dataclass(frozen=True, slots=True)
class ContextMachine:
    """The machine by which ``layout.sharding = "auto"`` prices, on every rank and resume."""

    flop_per_s: float
    """Speed of a rank's attention."""
    tile_s: float
    """Fixed time of each tile's kernel in the forward pass."""
    latency_s: float
    """Latency of a message between two ranks."""
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class PartMachine:
    """The machine by which ``layout.parts = "auto"`` prices, on every rank and resume."""

    flop_per_s: float
    """Speed of a rank's products."""
    start_s: float
    """What an exchange takes however few its bytes are."""
    bytes_per_s: float
    """What a rank sends in an exchange."""
    shared: float
    """The share of moving that takes the cores from computing, 0 to 1."""


@dataclass(frozen=True, slots=True)
class ResolvedFile:
    """A run, its model, its ranks and its token cache, all resolved."""

    # Pydantic would read a key that it does not know as that key's absence, here and below.
    __pydantic_config__ = ConfigDict(extra="forbid")

    spec: RunSpec
    model: ModelSpec
    origins: dict[str, str]
    ranks: int
    corpus: str
    init_folder: str
    context_machine: ContextMachine | None = None
    """Settled when the run began; None unless ``layout.sharding`` is ``auto``."""
    part_machine: PartMachine | None = None
    """Settled when the run began; None unless ``layout.parts`` is ``auto``."""
    stage_edges: tuple[int, ...] = ()
    """Stage s of a pipeline has layers ``stage_edges[s]`` to ``stage_edges[s + 1]``, as in the plan
    that the run obeys; empty where ranks split the layers when they start."""
    compare: tuple[str, ...] = ()
    """Packing policies that compute every step one after the other; empty in an ordinary run."""
    eval_corpus: str = ""
    """Token cache of the held-out documents; empty where nothing is evaluated."""
    routes: str = ""
    """The table of routes by which tokens lie; empty where experts are not speculated on."""
    second_checkpoints: str = ""
    """The folder into which checkpoints are copied; empty where they are not."""


def write_resolved(folder: Path, resolved: ResolvedFile) -> None:
    """Write ``resolved.json`` whole or not at all.

    Raises:
        SpecError: the folder cannot be written.
    """
    partial = folder / f".{RESOLVED}-{os.getpid()}"
    row = dataclasses.asdict(resolved)
    with writing_run(folder):
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(row | {_DIGEST: digest(row)}, indent=1) + "\n")
        partial.rename(folder / RESOLVED)


def read_resolved(folder: Path) -> ResolvedFile:
    """Read ``resolved.json`` back into dataclasses.

    Raises:
        SpecError: it is missing, was not written by this version, or was changed.
    """
    try:
        data: Any = read_json(folder / RESOLVED)
        known = data.pop(_DIGEST, None)  # earlier versions wrote none
        is_whole = known is None or known == digest(data)
        data["spec"] = rename_keys(data["spec"])
        resolved = TypeAdapter(ResolvedFile).validate_python(data)
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise SpecError(
            f"{folder} holds no readable {RESOLVED}: it is not the folder of a run of this "
            f"version. Start it with `equipoise train run.toml`."
        ) from error
    if not is_whole:
        raise SpecError(
            f"{folder / RESOLVED} has changed since it was written, and its ranks would train "
            f"otherwise. Write it again: `equipoise train run.toml --out {folder} --prepare`."
        )
    return resolved
