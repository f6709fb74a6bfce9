"""Time a run's encoders on this machine's ranks: groups of its own items, read, encoded and back.

Why
    Small encoders wait for the interpreter, once for each layer and once for each item's attention,
    and files are decoded by the same core. No curve of kernels knows either.

What it decides
    Groups of one, some and many items of the corpus: the smallest, the largest and all sizes
    between. A pass is fitted by what a call, a size of items and a multiplication cost, none of
    them below nothing, and reading by what an item and a patch cost. Groups take turns, so that a
    passing disturbance hits all alike.

Kept true (tests/unit/train/calibrate/test_items.py)
    Seconds made from known costs give those costs back.
"""

import time

import numpy as np
import torch
from scipy.optimize import nnls

from equipoise.base.arrays import Floats
from equipoise.comm.group import Ranks
from equipoise.nn.modality.attach import make_encoders
from equipoise.spec.device.parts import EncoderPoint, PassCost, encoder_name
from equipoise.spec.modality.items import Items
from equipoise.train.calibrate.parts_plan import PartsPlan
from equipoise.train.calibrate.ranks import Samples
from equipoise.train.process import settle

_KINDS = _READING, _FORWARD, _BACKWARD = "items read", "items forward", "items backward"
"""Kinds of samples, each of a group by its number."""

_READS = 6


def time_items(ranks: Ranks, plan: PartsPlan, limit_s: float) -> Samples:
    """Forward and backward of every group on this rank, while the others do the same.

    Args:
        ranks: All of them.
        plan: Encoders and groups.
        limit_s: Time after which no further round begins; two always are run, the first to warm up.
    """
    settle(ranks.rank, pin=ranks.device.type == "cpu")
    began, width = time.perf_counter(), plan.model.hidden
    encoders = make_encoders(plan.encoders, width, 0).to(ranks.device)
    values = {spec.kind: spec.values for spec in plan.encoders}
    samples: Samples = {}

    def more() -> bool:  # by one rank's clock, so that all take as many
        return bool(ranks.gather_integers([time.perf_counter() - began < limit_s])[0, 0])

    for step in range(plan.steps + 1):
        if step > 1 and not more():
            break
        for number, group in enumerate(plan.groups):
            patches = torch.randn(int(group.patches.sum()), values[group.kind])
            ranks.barrier()
            started = time.perf_counter()
            rows = encoders[group.kind](patches, group.grids)
            encoded = time.perf_counter()
            rows.backward(torch.ones_like(rows))
            ended = time.perf_counter()
            if step:
                samples.setdefault((_FORWARD, number), []).append(encoded - started)
                samples.setdefault((_BACKWARD, number), []).append(ended - encoded)
    return samples


def time_reading(plan: PartsPlan, items: Items) -> Samples:
    """Seconds of reading each group's files.

    Raises:
        DataError: a file cannot be read, or has changed.
    """
    samples: Samples = {}
    for number, group in enumerate(plan.groups):
        for _ in range(_READS):
            began = time.perf_counter()
            for item in group.items:
                items.load(item)
            samples.setdefault((_READING, number), []).append(time.perf_counter() - began)
    return samples


def encoder_points(plan: PartsPlan, samples: Samples) -> tuple[EncoderPoint, ...]:
    """What each encoder takes; without its samples it is left out.

    Args:
        plan: What was timed.
        samples: Of all ranks, as ``time_items`` and ``time_reading`` take them.
    """
    width, points = plan.model.hidden, []
    for spec in plan.encoders:
        groups = {
            number: group
            for number, group in enumerate(plan.groups)
            if group.kind == spec.kind and all((kind, number) in samples for kind in _KINDS)
        }
        if not groups:
            continue
        counts = np.array([len(each.items) for each in groups.values()], dtype=np.float64)
        patches = [each.patches for each in groups.values()]
        sizes = np.array([len(np.unique(each)) for each in patches], dtype=np.float64)
        work = np.array([spec.multiplications(each, width).sum() for each in patches])
        read = np.array([each.sum() for each in patches])
        seconds = {
            kind: np.array([np.median(samples[kind, number]) for number in groups])
            for kind in _KINDS
        }
        points.append(
            EncoderPoint(
                encoder_name(spec, width),
                f"{spec.kind}, {spec.layers} layers of {spec.hidden:,}",
                fit_pass(counts, read.astype(np.float64), seconds[_READING]),
                fit_pass(sizes, work.astype(np.float64), seconds[_FORWARD]),
                fit_pass(sizes, work.astype(np.float64), seconds[_BACKWARD]),
            )
        )
    return tuple(points)


def fit_pass(parts: Floats, work: Floats, seconds: Floats) -> PassCost:
    """What a call, a part and the work cost, each relative error weighing alike.

    Args:
        parts: Sizes of items, or items, of each group, float64 [groups].
        work: Work of each group, float64 [groups].
        seconds: Of each group, above 0, float64 [groups].
    """
    table = np.stack((np.ones_like(parts), parts, work / work.max())) / seconds
    costs, _ = nnls(table.T, np.ones_like(seconds))
    call, part, whole = costs.tolist()
    return PassCost(call, part, whole / float(work.max()))
