"""Packs as a picture: the load of each bin in one step, policy beside policy."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from equipoise.balance.packing.evaluate import PackedRecord, Setting
from equipoise.spec.catalog import POLICIES

_LINEAR, _ATTENTION, _INK, _PALE = "#9db8d6", "#c8553d", "#1d2733", "#e7ebef"


def plot_packs(
    file: Path,
    packs: Sequence[Sequence[PackedRecord]],
    setting: Setting,
    origin: str,
) -> None:
    """Draw one step under each policy: linear layers and attention of every bin, and the mean.

    The step is the one whose skew under the first policy is the median, so that it is
    neither the best case nor the worst.

    Args:
        file: Where to; the ending says whether PNG, SVG or PDF.
        packs: The steps that each policy packed.
        setting: What they were packed for.
        origin: Where the lengths come from, for the title.
    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    step = _typical_step(packs[0], setting)
    loads = [(records[step].policy, _parts(records[step], setting)) for records in packs]
    top = max(float(parts.sum(0).max() / parts.sum(0).mean()) for _, parts in loads)
    columns = min(4, len(loads))
    rows = -(-len(loads) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(3.3 * columns, 2.6 * rows + 0.7), sharey=True, squeeze=False
    )
    for axis in axes.flat[len(loads) :]:
        axis.set_visible(False)
    for axis, (policy, parts) in zip(axes.flat, loads, strict=False):
        total = parts.sum(0)
        mean = total.mean()
        order = np.arange(len(total)) if POLICIES[policy].needs_pipeline else np.argsort(-total)
        linear, attention = parts[:, order] / mean
        places = np.arange(len(total))
        width = 0.82 if len(total) <= 32 else 1.0
        axis.bar(places, linear, width, color=_LINEAR, label="linear layers")
        axis.bar(places, attention, width, bottom=linear, color=_ATTENTION, label="attention")
        axis.axhline(1.0, color=_INK, linewidth=0.9, linestyle=(0, (4, 3)))
        axis.set_title(f"{policy}   {total.max() / mean:.2f}", fontsize=11, loc="left", color=_INK)
        axis.set_ylim(0, 1.06 * top)
        axis.set_xticks([])
        axis.grid(axis="y", color=_PALE)
        axis.set_axisbelow(True)
        for side in ("top", "right", "left", "bottom"):
            axis.spines[side].set_visible(side == "bottom")
        axis.tick_params(length=0, labelsize=8, colors=_INK)
    for row in axes:
        row[0].set_ylabel("load / mean", fontsize=9, color=_INK)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="upper right", ncols=2, frameon=False, fontsize=9, borderaxespad=0.6
    )
    figure.suptitle(
        f"{setting.bins} bins, one step of {setting.pack.step_tokens:,} tokens: {origin}",
        fontsize=11,
        x=0.01,
        ha="left",
        color=_INK,
    )
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def _parts(record: PackedRecord, setting: Setting) -> np.ndarray:
    """Load of the linear layers and of attention, float64 [2, bins]."""
    total = np.array(record.bin_ns(setting.curve), dtype=np.float64)
    tokens = [
        sum(share.tokens for batch in micro_batches for share in batch)
        for micro_batches in record.bins
    ]
    linear = np.array(tokens) * setting.curve.ns_per_token
    return np.stack((linear, np.maximum(0.0, total - linear)))


def _typical_step(records: Sequence[PackedRecord], setting: Setting) -> int:
    scored = [record for record in records if not record.is_flush]
    skews = []
    for record in scored:
        total = _parts(record, setting).sum(0)
        skews.append(total.max() / total.mean())
    return int(np.argsort(skews)[len(skews) // 2])
