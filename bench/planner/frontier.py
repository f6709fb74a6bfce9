"""Weak and strong scaling of three models on Frontier, simulated beside what was published.

The study (arXiv:2312.12705) trains GPTs of 22B, 175B and 1T weights with Megatron-DeepSpeed on dies
of MI250X: 38.38, 36.14 and 31.96% of 191.5 TFLOP/s, weak scaling of 100% on 1,024 and 3,072 dies,
strong scaling of 89 and 87%. Its degrees and batches are second-hand here, and of the 22B model's
nothing is known: that one is searched, on 64 dies. No kernel of the device was measured, so its
seconds are those of declared shares of its peaks; scaling hangs less on them. In weak scaling
sequences grow with the dies; in strong scaling they are those of all dies.
"""

import json
from typing import Any

import numpy as np

from bench.published.rows import gpt, megatron_flop, read
from equipoise.cost.step.request import StepOptions
from equipoise.plan.search.search import Search
from equipoise.plan.space.listing import list_lattice
from equipoise.plan.space.runnable import keep_runnable
from equipoise.sim.machine import Machine
from equipoise.sim.step import price_step
from equipoise.spec.cluster.spec import find_cluster
from equipoise.spec.layout import ORDERS, Layout
from equipoise.spec.model.sizes import ModelSpec
from equipoise.spec.program.file import read_program

_PEAK = 191.5
_WINDOW, _VOCAB = 2048, 51_200
_MODELS = {"22B": (48, 6144, 48), "175B": (96, 12_288, 96), "1T": (128, 25_600, 160)}
"""Layers, width, heads."""
_RUNS = {"175B": (4, 16, 40), "1T": (8, 64, 266)}
"""Tensor ranks, stages, and sequences of each data-parallel rank."""
_STRONG = 8
"""Times as many sequences of each rank as in weak scaling, where dies are fewest."""
_SECONDS = 20.0


def _price(model: ModelSpec, tp: int, pp: int, dp: int, sequences: int) -> float:
    """Percent of the peak."""
    program, dies = read_program("megatron-deepspeed"), tp * pp * dp
    layout = Layout(dp=dp, tp=tp, pp=pp, order=ORDERS[program.order])
    options = StepOptions(_WINDOW, sequences, recompute="full", stack=program.stack)
    price = price_step(model, Machine(find_cluster(f"mi250x:{dies}")), layout, options)
    return 100 * megatron_flop(model, sequences, _WINDOW) / price.step_s / dies / 1e12 / _PEAK


def searched(model: ModelSpec, dies: int, sequences: int) -> dict[str, Any]:
    """The best that Megatron-DeepSpeed runs, with all recomputed as their FLOP are counted."""
    program, machine = read_program("megatron-deepspeed"), Machine(find_cluster(f"mi250x:{dies}"))
    base = StepOptions(_WINDOW, sequences, stack=program.stack)
    every = list_lattice(model, dies, base, fixed={"recompute": "full"})
    lattice = keep_runnable(program, every)
    space = lattice.keep(np.arange(len(lattice)))
    best = Search(model, machine, space).run(seconds=_SECONDS).fitting[0]
    rate = megatron_flop(model, sequences, _WINDOW) / best.step_s / dies / 1e12
    return {
        "words": space.choice(best.row).words(),
        "percent of peak": round(100 * rate / _PEAK, 2),
    }


def scaling(name: str, row: dict[str, str]) -> dict[str, Any]:
    """One model on one replica's dies and on as many as were published."""
    tp, pp, sequences = _RUNS[name]
    model = gpt(*_MODELS[name], _VOCAB)
    most = int(row["weak_gpus"]) // (tp * pp)
    weak = [_price(model, tp, pp, dp, sequences * dp) for dp in (1, most)]
    whole = _STRONG * sequences * most // most
    strong = [_price(model, tp, pp, dp, whole * most // dp * dp) for dp in (1, most)]
    return {
        "layout": f"tp={tp},pp={pp},zero=1",
        "dies": [tp * pp, tp * pp * most],
        "percent of peak": round(weak[1], 2),
        "published percent of peak": float(row["pct_peak"]),
        "weak scaling": round(100 * weak[1] / weak[0], 1),
        "published weak scaling": float(row["weak_scaling_eff_pct"]),
        "strong scaling": round(100 * strong[1] / strong[0], 1),
        "published strong scaling": float(row["strong_scaling_eff_pct"]),
        "sequences of strong scaling": whole * most,
    }


def main() -> None:
    rows = {row["model"]: row for row in read("frontier.csv")}
    small = searched(gpt(*_MODELS["22B"], _VOCAB), 64, 512)
    report = {
        "what": "simulated, beside arXiv:2312.12705; its degrees and batches are second-hand",
        "22B": small | {"published percent of peak": float(rows["22B"]["pct_peak"])},
    } | {name: scaling(name, rows[name]) for name in _RUNS}
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
