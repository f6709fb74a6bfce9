"""The price curve of a run: measured once for a machine and a model, then kept.

All ranks measure at the same time, as they will compute; the curve is their mean, and the
same on every rank to the last bit, because packing reads it.
"""

import dataclasses
import json
import os
import statistics
from pathlib import Path

import torch

from equipoise.base.digest import digest
from equipoise.base.read import read_json
from equipoise.comm.group import Ranks
from equipoise.cost.curve import LoadCurve
from equipoise.nn.measure import measure_curve
from equipoise.observe.machine import cpu_name
from equipoise.spec.model import ModelSpec
from equipoise.spec.run import RunSpec

_TRUSTED_ERROR = 0.2
"""Busy seconds further than this from the prediction mean a curve of other conditions."""


def activation_dtype(spec: RunSpec) -> torch.dtype:
    """Dtype of activations at this precision."""
    return torch.bfloat16 if spec.train.precision == "bf16" else torch.float32


def _curve_name(spec: RunSpec, model: ModelSpec, ranks: Ranks) -> str:
    machine = (
        torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else cpu_name()
    )
    return digest(
        {
            "model": model,
            "context_tokens": spec.pack.context_tokens,
            "precision": spec.train.precision,
            "recompute": spec.train.recompute,
            "machine": machine,
            "torch": torch.__version__,
            "world": ranks.world,
            "form": 1,
        }
    )


def _read(file: Path) -> LoadCurve | None:
    try:
        data = read_json(file)
        data["doc_tokens"], data["doc_ns"] = tuple(data["doc_tokens"]), tuple(data["doc_ns"])
        return LoadCurve(**data)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def curve_file(spec: RunSpec, model: ModelSpec, ranks: Ranks, cache: Path) -> Path:
    """Where the curve of this run on this machine is kept."""
    return cache / "curves" / f"{_curve_name(spec, model, ranks)}.json"


def doubt_curve(file: Path, measured_over_predicted: list[float]) -> str:
    """Drop a kept curve that a whole run has shown to be wrong; the sentence to say, or "".

    A curve that was measured while something else had the cores would mislead every later
    run. Fewer than five steps prove nothing.
    """
    if len(measured_over_predicted) < 5:
        return ""
    off = statistics.median(measured_over_predicted) - 1
    if abs(off) <= _TRUSTED_ERROR or not file.exists():
        return ""
    file.unlink(missing_ok=True)
    way = "more" if off > 0 else "less"
    return (
        f"Computing took {abs(off):.0%} {way} than the price curve foresaw (median of "
        f"{len(measured_over_predicted)} steps); the kept curve is dropped, and the next run "
        f"measures it anew."
    )


def obtain_curve(spec: RunSpec, model: ModelSpec, ranks: Ranks, cache: Path) -> LoadCurve:
    """Read the curve kept in ``cache``, or measure it on all ranks at once and keep it."""
    file = curve_file(spec, model, ranks, cache)
    kept: LoadCurve | None = ranks.gather_objects(_read(file) if ranks.rank == 0 else None)[0]
    if kept is not None:
        return kept
    ranks.barrier()
    mine = measure_curve(
        model,
        context_tokens=spec.pack.context_tokens,
        device=ranks.device,
        dtype=activation_dtype(spec),
        recompute=spec.train.recompute,
    )
    row = [mine.fixed_ns, mine.ns_per_token, mine.peak_flop_per_s, *mine.doc_ns]
    mean = ranks.gather_floats(row).mean(0).tolist()
    curve = dataclasses.replace(
        mine,
        fixed_ns=mean[0],
        ns_per_token=mean[1],
        peak_flop_per_s=mean[2],
        doc_ns=tuple(mean[3:]),
    )
    if ranks.rank == 0:
        _keep(file, curve)
    return curve


def _keep(file: Path, curve: LoadCurve) -> None:
    """Keep a curve for the next run; a cache that cannot be written costs two seconds."""
    partial = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(dataclasses.asdict(curve)))
        partial.rename(file)
    except OSError:
        return
