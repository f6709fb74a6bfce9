"""Published steps with the optimizer in host memory beside the model of ``cost.offload``.

Nothing is fitted on these rows. The first source prints the seconds that offloading adds, the
second how many times longer the step gets. The second's base is our own step at the smallest batch
of its recipe, so that figure is rougher. If a part of the optimizer is offloaded, that part of the
whole is priced. Bytes saved are those of the fullest device; only the second source shows that
Megatron's master weights stay there.
"""

import dataclasses
import json
import sys
from typing import Any

from bench.published.rows import read
from equipoise.cost.memory.device import hosted_bytes
from equipoise.cost.offload import ADAM_BYTES, host_update_s
from equipoise.cost.step.request import StepOptions
from equipoise.sim.machine import Machine
from equipoise.sim.step import price_step
from equipoise.spec.cluster.spec import find_cluster
from equipoise.spec.layout import Layout
from equipoise.spec.program.file import read_program
from equipoise.spec.words import read_model

SMALL = read_model(
    "layers=28,hidden=1024,heads=16,kv_heads=8,head_width=128,ffn=3072,vocab=151936,tied=1"
)
SPARSE = read_model(
    "layers=48,hidden=2048,heads=32,kv_heads=4,head_width=128,vocab=151936,experts=128,top_k=8,"
    "expert_ffn=768,ffn=6144"
)
OPTIONS = StepOptions(4096, 8, offload="optimizer", stack=read_program("megatron-core").stack)


def added_s() -> float:
    """Seconds that a whole offloaded optimizer adds on one device."""
    machine = Machine(find_cluster("h100-sxm:1"))
    here = SMALL.params * ADAM_BYTES / machine.bytes_per_s
    return sum(host_update_s(machine.device, SMALL.params, OPTIONS)) - here


def slower() -> tuple[float, float, float]:
    """Our step without, with the optimizer offloaded, and what that saves [bytes]."""
    machine = Machine(find_cluster("h100-sxm:16"))
    layout = Layout(tp=2, pp=2, dp=4, ep=4)
    steps = [
        price_step(SPARSE, machine, layout, dataclasses.replace(OPTIONS, offload=offload))
        for offload in ("none", "optimizer")
    ]
    saved = float(steps[0].memory_bytes.max() - steps[1].memory_bytes.max())
    return steps[0].step_s, steps[1].step_s, saved


def measure() -> dict[str, Any]:
    """All of it."""
    rows = []
    whole_s, (without, with_all, saved) = added_s(), slower()
    published = read("offload.csv")
    before = {row["source"]: row for row in published if float(row["fraction"]) == 0}
    for row in published:
        share = float(row["fraction"])
        if not share:
            continue
        figures: dict[str, Any] = {"source": row["source"], "offloaded": share}
        figures["copies overlap"] = row["overlap"]
        if row["step_s"]:
            measured = float(row["step_s"]) - float(before[row["source"]]["step_s"])
            ours, gigabytes = share * whole_s, share * hosted_bytes(OPTIONS) * SMALL.params / 1e9
            figures |= {"added s, measured": round(measured, 3), "added s, ours": round(ours, 3)}
        else:
            measured = float(row["times"])
            ours, gigabytes = 1 + share * (with_all / without - 1), share * saved / 1e9
            figures |= {"times, measured": measured, "times, ours": round(ours, 2)}
        rows.append(
            figures
            | {
                "error": round(ours / measured - 1, 3),
                "saved GB, measured": float(row["saved_gb"]),
                "saved GB, ours": round(gigabytes, 2),
            }
        )
    return {
        "what": "optimizer states in host memory, published beside modelled",
        "fitted": "nothing on these rows",
        "mean absolute error": round(sum(abs(row["error"]) for row in rows) / len(rows), 3),
        "our step without, of the second source": round(without, 3),
        "rows": rows,
    }


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
