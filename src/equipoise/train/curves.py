"""The price curve of a run: measured once for a machine and a model, then kept.

Why
    Packing reads the curve, so it must be the same on every rank to the last bit, and the same
    when a run goes on. And what was measured beside other programs would mislead later runs.

What it decides
    All ranks measure at the same time, as they will compute; the curve is their mean. A run keeps
    its own (``curves/`` in its folder) and reads it when it is resumed, so that it packs what it
    would have packed, whatever becomes of the cache. A run that goes on with another number of
    ranks packs by the curve it has, unless the cache has theirs: that is not worth seconds in which
    nothing is trained. New runs read the cache; what was measured
    while ranks had less than 70% of the processor time that their cores have for them is not put
    there, and what a run's first steps contradict is taken out, so the next run measures again.

Kept true (tests/unit/train/test_doubt_curve.py, tests/multi/train/test_curves.py)
    A resumed run has the curve it had, also on fewer ranks; a curve that was disturbed, or that
    steps contradict, is not in the cache.
"""

import dataclasses
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from equipoise.base.digest import digest
from equipoise.base.errors import SpecError
from equipoise.base.read import read_json
from equipoise.comm.group import Ranks, name_device
from equipoise.cost.curve import LoadCurve, require_curve
from equipoise.nn.measure import MeasuredModel, measure_curve
from equipoise.nn.project import FP8, PLAIN
from equipoise.observe.machine import cpu_name, usable_cores
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.spec import RunSpec

_TRUSTED_ERROR = 0.2
"""Busy seconds further than this from the prediction mean a curve of other conditions."""

DOUBT_STEPS = 5
"""Steps that say whether it is: fewer prove nothing, for the first ones warm up."""

_DIGEST = "digest"
"""Key of the digest of all others: a price with a flipped bit would pack otherwise."""

_UNDISTURBED = 0.7
"""The share of its processor time that a rank has where nothing else computes."""


class NamedModel(MeasuredModel, Protocol):
    """A model that is measured for more than one run."""

    @property
    def name(self) -> str:
        """Equal for models that take equally long."""


Measured = NamedModel | None
"""None for a decoder of our own, which its sizes name."""


@dataclass(frozen=True, slots=True)
class Measuring:
    """A rank's share of its machine while it measured."""

    host: str
    cores: frozenset[int]
    """Cores that it may run on."""
    busy_share: float
    """Processor time over time on the wall."""


def fair_share(ranks: Sequence[Measuring]) -> float:
    """The smallest share that a rank had of the processor time it may have, at most 1.

    Ranks of one host share its cores: with more ranks than cores, no rank can have a whole core.

    >>> one = Measuring("a", frozenset({0, 1}), busy_share=0.5)
    >>> fair_share([one]), fair_share([one] * 2), fair_share([one] * 4)
    (0.5, 0.5, 1.0)
    """
    shares = [1.0]
    for host in {each.host for each in ranks}:
        here = [each for each in ranks if each.host == host]
        cores = frozenset[int]().union(*(each.cores for each in here))
        most = min(1.0, len(cores) / len(here))
        shares += [each.busy_share / most for each in here]
    return min(shares)


def disturbed_sentence(curve: LoadCurve) -> str:
    """A sentence on a curve that was measured beside other programs; "" for any other curve."""
    if curve.busy_share >= _UNDISTURBED:
        return ""
    return (
        f"The price curve was measured while other programs used the cores: a rank had "
        f"{curve.busy_share:.0%} of its processor time. This run packs by it; the next run "
        f"measures again."
    )


def activation_dtype(spec: RunSpec) -> torch.dtype:
    """Dtype of activations at this precision."""
    return torch.float32 if spec.train.precision == "fp32" else torch.bfloat16


def _curve_name(spec: RunSpec, model: ModelSpec, ranks: Ranks, measured: Measured) -> str:
    machine = cpu_name() if ranks.device.type == "cpu" else name_device(ranks.device)
    return digest(
        {
            "model": model,
            "context_tokens": spec.pack.context_tokens,
            "precision": spec.train.precision,
            "recompute": spec.train.recompute,
            "machine": machine,
            "torch": torch.__version__,
            "form": 3,
        }
        | ({"masks": True} if spec.data.masks else {})
        | ({} if measured is None else {"measured": measured.name})
    )


def _read(file: Path) -> LoadCurve | None:
    try:
        data = read_json(file)
        known = data.pop(_DIGEST, None)  # earlier versions wrote none
        if known is not None and known != digest(data):
            return None
        data["doc_tokens"], data["doc_ns"] = tuple(data["doc_tokens"]), tuple(data["doc_ns"])
        curve = LoadCurve(**data)
        require_curve(curve)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SpecError):
        return None
    return curve


def curve_file(
    spec: RunSpec, model: ModelSpec, ranks: Ranks, cache: Path, measured: Measured = None
) -> Path:
    """Where the curve of this run on this machine is kept."""
    return cache / "curves" / f"{_curve_name(spec, model, ranks, measured)}-{ranks.world}.json"


def _read_other(file: Path) -> LoadCurve | None:
    """The curve that a run has for another number of ranks: the next larger, else the largest."""
    name, _, world = file.stem.rpartition("-")
    others = {
        int(words): each
        for each in file.parent.glob(f"{name}-*.json")
        if (words := each.stem.rpartition("-")[2]).isdecimal()
    }
    order = sorted(others, key=lambda ranks: (ranks < int(world), abs(ranks - int(world))))
    return next(filter(None, (_read(others[ranks]) for ranks in order)), None)


def doubt_curve(file: Path, measured_over_predicted: Sequence[float]) -> str:
    """Drop a kept curve that a run has shown to be wrong; return a sentence about it, or "".

    The run itself keeps the curve that it packs by.

    Args:
        file: Where the curve is kept for other runs.
        measured_over_predicted: The fullest rank's computing over the prediction, of each step;
            the same on all ranks.
    """
    if len(measured_over_predicted) < DOUBT_STEPS:
        return ""
    off = statistics.median(measured_over_predicted) - 1
    if abs(off) <= _TRUSTED_ERROR:
        return ""
    file.unlink(missing_ok=True)
    way = "more" if off > 0 else "less"
    return (
        f"Computing took {abs(off):.0%} {way} than the price curve predicted (median of "
        f"{len(measured_over_predicted)} steps). This run keeps its curve; the next run measures "
        f"it again."
    )


def obtain_curve(
    spec: RunSpec,
    model: ModelSpec,
    ranks: Ranks,
    cache: Path,
    own: Path | None = None,
    measured: Measured = None,
) -> LoadCurve:
    """Read a run's curve, or the one in ``cache``; or measure it on all ranks at once.

    Args:
        spec: The run.
        model: Its sizes.
        ranks: All of them call.
        cache: Folder that runs share.
        own: The run's folder, which has its curve from the first start on.
        measured: What is run to measure; a decoder of these sizes unless given.
    """
    file = curve_file(spec, model, ranks, cache, measured)
    mine = None if own is None else curve_file(spec, model, ranks, own, measured)
    kept: LoadCurve | None = None
    if ranks.rank == 0:
        kept = (None if mine is None else _read(mine)) or _read(file)
        kept = kept or (None if mine is None else _read_other(mine))
    kept = ranks.gather_objects(kept)[0]
    if kept is None:
        kept = _measure(spec, model, ranks, file, measured)
    if ranks.rank == 0 and mine is not None and not mine.exists():
        _keep(mine, kept)
    return kept


def _measure(
    spec: RunSpec, model: ModelSpec, ranks: Ranks, file: Path, measured: Measured
) -> LoadCurve:
    """Measure on all ranks at once, and keep the curve for other runs if nothing disturbed it."""
    ranks.barrier()
    began, clock = time.perf_counter(), time.thread_time()
    mine = measure_curve(
        model,
        context_tokens=spec.pack.context_tokens,
        device=ranks.device,
        dtype=activation_dtype(spec),
        recompute=spec.train.recompute,
        masks=spec.data.masks,
        measured=measured,
        products=FP8 if spec.train.precision == "fp8" else PLAIN,
    )
    share = (time.thread_time() - clock) / (time.perf_counter() - began)
    if ranks.device.type == "cuda":  # where the host waits
        share = 1.0
    here = Measuring(platform.node(), frozenset(usable_cores()), share)
    every: list[Measuring] = ranks.gather_objects(here)
    row = [mine.fixed_ns, mine.ns_per_token, mine.peak_flop_per_s, mine.head_ns, *mine.doc_ns]
    mean = ranks.gather_floats(row).mean(0).tolist()
    curve = dataclasses.replace(
        mine,
        fixed_ns=mean[0],
        ns_per_token=mean[1],
        peak_flop_per_s=mean[2],
        head_ns=mean[3],
        doc_ns=tuple(mean[4:]),
        busy_share=fair_share(every),
    )
    if ranks.rank == 0 and curve.busy_share >= _UNDISTURBED:
        _keep(file, curve)
    return curve


def _keep(file: Path, curve: LoadCurve) -> None:
    """Keep a curve for the next run; a cache that cannot be written costs two seconds."""
    partial, row = file.with_suffix(f".{os.getpid()}"), dataclasses.asdict(curve)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(row | {_DIGEST: digest(row)}))
        partial.rename(file)
    except OSError:
        return
