"""The planner's speed: bounds of every choice, and a whole search of the largest published case.

Llama 3 405B on 16,384 H100s with the document lengths of a long-context corpus: how many choices
a second one core judges, and how far a search is after 10 s and after 60. Beside that the
simulator alone: pipeline instructions written and replayed in a second, and a whole
step of 16 stages and 192 micro-batches.
"""

import json
import time
from typing import Any

import numpy as np

from bench.lib.stamp import LoadStamp, environment, spread
from equipoise.cost.step.request import StepOptions
from equipoise.plan.bounds.roofline import memory_bound_bytes, peak_bound_s
from equipoise.plan.described import choice_packer
from equipoise.plan.search.search import Search
from equipoise.plan.space.listing import list_space
from equipoise.schedule.compiled import compile_loop
from equipoise.schedule.pipeline.prices import make_prices
from equipoise.schedule.pipeline.replay import replay_pipeline
from equipoise.schedule.pipeline.strategies import write_pipeline
from equipoise.schedule.pipeline.sweep import fill, sweep
from equipoise.sim.machine import Machine
from equipoise.sim.step import price_step
from equipoise.spec.cluster.spec import find_cluster
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import PLANNED

MODEL, DEVICES = "llama3-405b", 16_384
GOAL = {"choices_per_s": 200_000, "search_s": 10.0, "instructions_per_s": 1e6, "step_s": 0.5}
STAGES, MICRO_BATCHES = 16, 192
STRATEGIES = {"1f1b": 1, "zb-h1": 1, "interleaved": 4, "interleaved-zb": 4}
"""Schedules, with the stages of a rank."""


def judge() -> dict[str, Any]:
    """List the space, bound its memory and its time."""
    model, machine = PLANNED[MODEL], Machine(find_cluster(f"h100-sxm:{DEVICES}"))
    rates, choices = [], 0
    for _ in range(5):
        begin = time.process_time()
        space = list_space(model, DEVICES, StepOptions(8192, 2048))
        memory_bound_bytes(model, space)
        peak_bound_s(model, machine, space)
        choices = len(space)
        rates.append(choices / (time.process_time() - begin))
    return {"choices": choices, "choices_per_s": spread(rates)}


def simulate(strategy: str, virtual: int) -> dict[str, Any]:
    """Pipelines of uneven micro-batches; then whole steps, each on parts of its own."""
    draw = np.random.default_rng(0)
    for loop in (sweep, fill):  # from disk, where it was compiled before
        compile_loop(loop)
    shape = STAGES * virtual, MICRO_BATCHES
    rates, walls, instructions = [], [], 0
    for _ in range(9):
        prices = make_prices(*draw.integers(900, 1100, (3, *shape)), hop_ns=20)
        begin = time.process_time()
        schedule = write_pipeline(strategy, prices, ranks=STAGES)
        timeline = replay_pipeline(schedule, prices)
        instructions = len(timeline.rank)
        rates.append(instructions / (time.process_time() - begin))
    layout = Layout(tp=8, pp=STAGES, dp=8)
    options = StepOptions(8192, MICRO_BATCHES * layout.dp, virtual=virtual, schedule=strategy)
    for _ in range(5):
        begin = time.perf_counter()
        price_step(PLANNED[MODEL], Machine(find_cluster("h100-sxm:1024")), layout, options)
        walls.append(time.perf_counter() - begin)
    return {
        "strategy": strategy,
        "virtual": virtual,
        "instructions": instructions,
        "instructions_per_s": spread(rates),
        "step_s": spread(walls),
    }


def search(seconds: float, lengths: str | None) -> dict[str, Any]:
    """One search from nothing."""
    begin, cpu, load = time.perf_counter(), time.process_time(), LoadStamp()
    model, machine = PLANNED[MODEL], Machine(find_cluster(f"h100-sxm:{DEVICES}"))
    base = StepOptions(8192, 2048)
    space = list_space(model, DEVICES, base)
    packer = None if lengths is None else choice_packer(model, lengths, base)
    asked = Search(model, machine, space, packer=packer)
    outcome = asked.run(seconds=seconds)
    best = outcome.fitting[0]
    return {
        "lengths": lengths or "full windows",
        "seconds_allowed": seconds,
        "wall_s": time.perf_counter() - begin,
        "cpu_s": time.process_time() - cpu,
        "other_load_cores": load.other_load(),
        "choices": outcome.listed,
        "families": outcome.bounded,
        "replayed": outcome.progress.priced,
        "best_s": best.step_s,
        "best": space.choice(best.row).words(),
        "bound_s": outcome.progress.bound_s,
        "gap": outcome.progress.gap,
        "is_whole": outcome.progress.gap <= asked.gap,
    }


def main() -> None:
    report = {
        "environment": environment(),
        "goal": GOAL,
        "judge": judge(),
        "simulator": [simulate(*each) for each in STRATEGIES.items()],
        "searches": [
            search(10.0, "pretrain-128k"),
            search(10.0, None),
            search(60.0, "pretrain-128k"),
        ],
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
