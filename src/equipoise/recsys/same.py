"""Refuse a checkpoint of another run, whose tables may well have the shapes of this one's.

Why
    A row means what its run's data made of it: with the rows of another run, a model of the same
    shapes answers, and answers wrongly.

What it decides
    A checkpoint holds the keys of its run that a run which goes on must not change
    (``folder.fixed_keys``), a digest of its columns' values and scales, and one of its samples.
    Whoever loads it compares those that it knows; a server has no samples. Checkpoints of earlier
    versions hold none of them and are taken as they are.

Kept true (tests/unit/recsys/test_same.py)
    Another seed, other values in a column and other samples are each refused with what differs,
    before a weight is read.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from equipoise.base.digest import digest
from equipoise.base.errors import CheckpointError
from equipoise.checkpoint.manifest import find_checkpoints
from equipoise.recsys.folder import changed_key, fixed_keys
from equipoise.recsys.rank.coding import COLUMNS, Coding
from equipoise.recsys.samples import Samples
from equipoise.recsys.whole import read_facts
from equipoise.spec.names import CHECKPOINTS
from equipoise.spec.recommend import RecommendSpec
from equipoise.spec.run.keys import toml

_RUN, _COLUMNS, _SAMPLES = "run", "columns", "samples"


def describe_run(spec: RecommendSpec, samples: Samples) -> dict[str, Any]:
    """What a checkpoint says of the run that it is of."""
    return {
        _RUN: fixed_keys(spec),
        _COLUMNS: digest(samples.coding.as_facts()),
        _SAMPLES: samples.digest(),
    }


def require_same_run(
    checkpoint: Path,
    facts: Mapping[str, Any],
    spec: RecommendSpec,
    *,
    coding: Coding | None = None,
    samples: Samples | None = None,
) -> None:
    """Compare a checkpoint with a run.

    Args:
        checkpoint: Its folder.
        facts: What it says of itself.
        spec: The run.
        coding: The run's columns, where they are not those of ``samples``.
        samples: The run's samples, where they are known.

    Raises:
        CheckpointError: names what differs.
    """
    held = facts.get(_RUN, {})
    if held and (name := changed_key(spec, held)):
        ours = fixed_keys(spec)[name]
        theirs = toml(held[name]) if name in held else "its default"
        raise CheckpointError(
            f"{checkpoint} was saved by another run: its {name} is {theirs} (this run: "
            f"{toml(ours)}). Restore this run's own checkpoints, or train into another folder."
        )
    coding = coding if samples is None else samples.coding
    if coding is not None and facts.get(_COLUMNS, own := digest(coding.as_facts())) != own:
        raise CheckpointError(
            f"{checkpoint} was trained with other values of the columns (digest "
            f"{facts[_COLUMNS][:8]}; {_whose(samples)} {own[:8]}). Restore the data and the "
            "checkpoints of one run, or train into another folder."
        )
    if samples is not None and facts.get(_SAMPLES, own := samples.digest()) != own:
        raise CheckpointError(
            f"{checkpoint} was trained on other samples (digest {facts[_SAMPLES][:8]}; this run's "
            f"is {own[:8]}). Restore the data of that run, or train into another folder."
        )


def require_same_newest(folder: Path, spec: RecommendSpec, samples: Samples) -> None:
    """Compare the newest checkpoint of a run's folder that can be read, before ranks start.

    Raises:
        CheckpointError: it is of another run.
    """
    for checkpoint in find_checkpoints(folder / CHECKPOINTS):
        try:
            facts = read_facts(checkpoint)
        except (OSError, ValueError):  # ranks say so, and pass over it
            continue
        require_same_run(checkpoint, facts, spec, samples=samples)
        return


def _whose(samples: Samples | None) -> str:
    return f"{COLUMNS} has" if samples is None else "this run's data has"
