"""Steps that nothing was fitted to: rows of 2025 and 2026.

NVIDIA's tables of Megatron-Bridge and of NeMo AutoModel, priced as ``equipoise simulate`` prices
them: a known model, cluster and program, with the residuals that the product ships. Program and
recomputation are those of the release's recipe; where it says nothing of the latter, of what the
program can, the fastest that fits is taken. One row is not scored: a fact of its program was read
off it.
"""

import dataclasses
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, cast

import numpy as np

from bench.lib.stamp import environment
from bench.published.price import Priced, error_row, price_rows, summary
from bench.published.rows import Row, make_row, read
from equipoise.cost.step.request import StepOptions, residuals_of
from equipoise.spec.cluster.spec import find_cluster
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import PLANNED
from equipoise.spec.offload import Offload
from equipoise.spec.run.spec import Recompute

GOAL = {"mean": 0.08, "worst": 0.12}

RECOMPUTES = ("none", "attention", "every-4", "every-3", "every-2", "full")
"""What Megatron-Core can compute again by whole layers."""

BY_RECIPE = {
    ("25.11", "h100-sxm", "gpt-oss-120b"): {"mbs": "1"},
    ("25.11", "b200", "gpt-oss-120b"): {"ep": "64"},
    ("26.02", "gb300", "llama3-70b"): {"mbs": "1", "vp": "5"},
}
"""What the release's recipe has instead of what a row prints, where the row contradicts itself (4
windows a micro-batch do not fit), or the recipe and the next release's row of equal speed:
``scripts/performance/configs/gpt_oss/workload_base_configs.py`` of v0.2.0 to v0.2.2, and
``configs/llama/llama3_workload_base_configs.py``, whose windows of 70B in MXFP8 on GB300 are always
one a micro-batch in five virtual stages."""


READ_OFF = "26.02 qwen3-30b-a3b mxfp8 x8"
"""The row off which ``host_experts_s`` of megatron-bridge was read: one window a micro-batch."""


def disagreements() -> list[str]:
    """Rows of Megatron-Bridge whose batches do not multiply out."""
    faults = []
    for row in read("megatron_bridge.csv"):
        if not row["accumulations"]:
            continue
        gpus, gbs, tp, pp, cp, mbs, printed = (
            int(row[key]) for key in ("gpus", "gbs", "tp", "pp", "cp", "mbs", "accumulations")
        )
        dp = gpus // (tp * pp * cp)
        if dp * mbs * printed != gbs:
            faults.append(
                f"{row['release']} {row['device']} {row['model']} {row['precision']}: {printed} "
                f"micro-batches of {mbs} on {dp} ranks are {dp * mbs * printed} sequences of {gbs}"
            )
    return faults


def bridge() -> Iterator[Row]:
    """Megatron-Bridge's rows."""
    for row in read("megatron_bridge.csv"):
        row |= BY_RECIPE.get((row["release"], row["device"], row["model"]), {})
        tp, pp, cp, ep, virtual = (int(row[key]) for key in ("tp", "pp", "cp", "ep", "vp"))
        gpus, gbs, seq = int(row["gpus"]), int(row["gbs"]), int(row["seq"])
        virtual = virtual if pp > 1 else 1
        known = row["recompute"]
        yield make_row(
            f"Megatron-Bridge {row['device']} {'experts' if ep > 1 else 'dense'}",
            f"{row['release']} {row['model']} {row['precision']} x{gpus}",
            row["program"],
            PLANNED[row["model"]],
            f"{row['device']}:{gpus}",
            Layout(
                dp=gpus // (tp * pp * cp),
                tp=tp,
                pp=pp,
                cp=cp,
                ep=ep,
                zero=3 if row["fsdp"] == "1" else 1,
            ),
            [
                StepOptions(
                    seq,
                    gbs,
                    micro_batch=int(row["mbs"]),
                    virtual=virtual,
                    schedule="interleaved" if virtual > 1 else "1f1b",
                    recompute=cast(Recompute, recompute),
                    offload=cast(Offload, row["offload"]),
                    precision="bf16" if row["precision"] == "bf16" else "fp8",
                )
                for recompute in (RECOMPUTES if known == "?" else (known,))
            ],
            gbs * seq / (float(row["tokens_per_s_gpu"]) * gpus),
            "tokens a second",
        )


def automodel() -> Iterator[Row]:
    """NeMo AutoModel's rows of full training, with what its configurations recompute."""
    for row in read("automodel.csv"):
        pp, cp, ep, virtual = (int(row[key]) for key in ("pp", "cp", "ep", "vp"))
        gpus = int(row["gpus"])
        options = StepOptions(
            int(row["seq"]),
            int(row["gbs"]),
            micro_batch=int(row["mbs"]),
            virtual=virtual,
            schedule="interleaved" if virtual > 1 else "1f1b",
        )
        known = row["recompute"]
        asked: list[Recompute] = ["none", "full"] if known == "?" else [cast(Recompute, known)]
        yield make_row(
            "NeMo AutoModel",
            f"{row['model']} x{gpus}",
            "nemo-automodel",
            PLANNED[row["model"]],
            f"h100-sxm:{gpus}",
            Layout(dp=gpus // (pp * cp), pp=pp, cp=cp, ep=ep, zero=3 if pp == 1 else 1),
            [dataclasses.replace(options, recompute=each) for each in asked],
            float(row["step_s"]),
        )


def measure() -> dict[str, Any]:
    """Every row under the residuals that the product ships."""
    rows = [*bridge(), *automodel()]
    residuals = [
        residuals_of(find_cluster(row.cluster).device, row.options[0].stack) for row in rows
    ]
    by_source: dict[str, list[Priced]] = defaultdict(list)
    priced = price_rows(rows, residuals)
    (read_off,) = (each for each in priced if each.row.name == READ_OFF)
    for each in priced:
        if each is not read_off:
            by_source[each.row.source].append(each)
    errors = np.abs([each.ratio - 1 for some in by_source.values() for each in some])
    return {
        "what": "predicted over measured - 1, nothing fitted",
        "goal": GOAL,
        "all": {
            "mean": round(float(errors.mean()), 4),
            "median": round(float(np.median(errors)), 4),
            "largest": round(float(errors.max()), 4),
            "rows": len(errors),
        },
        "not scored": error_row(read_off),
        "sources": {
            name: {
                **summary([each.ratio - 1 for each in priced]),
                "said not to fit": sum(not each.price.fits for each in priced),
            }
            for name, priced in sorted(by_source.items())
        },
        "rows": {
            name: [
                error_row(each) | {"recompute": each.options.recompute, "fits": each.price.fits}
                for each in priced
            ]
            for name, priced in sorted(by_source.items())
        },
        "published rows that contradict themselves": disagreements(),
        "environment": environment(),
    }


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
