"""More of anything never makes it worse: steps and plans of machines and tasks that differ in one.

A step on a device with twice the rates and memory, over links twice as fast, or on the next
generation takes no longer; one of longer windows, of more windows or on a card held to less power
takes no less. The best plan of a machine that has more of one thing is no slower than that of one
that has less, but for the gap that the search leaves, nor is that of more devices that share a step
of many sequences. Prints every pair that is not so: ratios are of seconds, the better machine's or
the smaller task's over the other's.
"""

import dataclasses
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.lib.stamp import environment
from equipoise.base.errors import EquipoiseError
from equipoise.cost.step.request import StepOptions
from equipoise.plan.described import PlanRequest
from equipoise.plan.request import plan
from equipoise.sim.machine import Machine
from equipoise.sim.step import price_step
from equipoise.spec.cluster.spec import ClusterSpec, find_cluster
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import PLANNED, ModelSpec
from equipoise.spec.program.file import read_program

_ROUNDING = 1e-9
_GAP = 0.01
"""By which an answer of a search that ended by itself may miss the best."""
_SECONDS = 6.0

Change = Callable[[ClusterSpec], ClusterSpec]


def _with_device(cluster: ClusterSpec, **changes: Any) -> ClusterSpec:
    classes = tuple(
        dataclasses.replace(each, device=dataclasses.replace(each.device, **changes))
        for each in cluster.classes
    )
    return dataclasses.replace(cluster, classes=classes)


def twice_as_fast(cluster: ClusterSpec) -> ClusterSpec:
    """Twice the peaks and the memory's rate."""
    device = cluster.device
    return _with_device(
        cluster,
        name=f"twice {device.name}",
        like=device.name,
        peaks=tuple((dtype, 2 * rate) for dtype, rate in device.peaks),
        memory_bytes_per_s=2 * device.memory_bytes_per_s,
    )


def twice_the_links(cluster: ClusterSpec) -> ClusterSpec:
    """Twice the rate of every link."""

    def faster(link: Any) -> Any:
        return link and dataclasses.replace(link, bytes_per_s=2 * link.bytes_per_s)

    classes = tuple(
        dataclasses.replace(
            each,
            nic=faster(each.nic),
            tiers=tuple(dataclasses.replace(tier, link=faster(tier.link)) for tier in each.tiers),
        )
        for each in cluster.classes
    )
    return dataclasses.replace(cluster, classes=classes)


CHANGES: dict[str, Change] = {
    "twice as fast a device": twice_as_fast,
    "twice the links": twice_the_links,
}
NEXT = (("a100-80", "h100-sxm"), ("h100-sxm", "h200"), ("h800", "h100-sxm"), ("b200", "b300"))
"""Devices, each with one that lacks nothing of it."""

MODELS = ("llama3-8b", "llama3-70b", "qwen3-30b-a3b", "deepseek-v3", "gpt-oss-120b")
PROGRAMS = ("equipoise", "megatron-core", "torchtitan")
LAYOUTS = (
    Layout(dp=64, zero=3),
    Layout(dp=16, tp=4, zero=1),
    Layout(dp=8, cp=8, zero=1),
    Layout(dp=8, tp=2, pp=4, zero=1),
    Layout(dp=64, ep=16, zero=1),
    Layout(dp=16, pp=4, ep=16, zero=1),
)


def settings() -> Iterator[tuple[str, ModelSpec, Layout, StepOptions]]:
    """Models, layouts and programs that go together."""
    for model, layout, program in itertools.product(MODELS, LAYOUTS, PROGRAMS):
        stack = read_program(program).stack
        spec = dataclasses.replace(PLANNED[model], layers=8, dense_layers=0)
        if layout.ep > 1 and not spec.experts:
            continue
        for precision in ("bf16", "fp8"):
            options = StepOptions(4096, 256, precision=precision, stack=stack)
            yield f"{model} {layout} {program} {precision}", spec, layout, options


def _step_s(model: ModelSpec, cluster: ClusterSpec, layout: Layout, options: StepOptions) -> float:
    return price_step(model, Machine(cluster), layout, options).step_s


def steps() -> dict[str, Any]:
    """Steps that take longer on the better machine, or less of the larger task."""
    compared, worse = 0, list[dict[str, Any]]()

    def compare(what: str, name: str, less: float, more: float) -> None:
        nonlocal compared
        compared += 1
        if less > more * (1 + _ROUNDING):
            worse.append({"what": what, "step": name, "ratio": round(less / more, 5)})

    for name, model, layout, options in settings():
        cluster = find_cluster("h100-sxm:64")
        base = _step_s(model, cluster, layout, options)
        for what, change in CHANGES.items():
            compare(what, name, _step_s(model, change(cluster), layout, options), base)
        held = _with_device(cluster, power_w=0.7 * cluster.device.power_w)
        compare("full power", name, base, _step_s(model, held, layout, options))
        for what, changed in (
            ("windows half as long", {"context_tokens": 8192}),
            ("a fifth fewer windows", {"step_sequences": 320}),
        ):
            larger = dataclasses.replace(options, **changed)
            compare(what, name, base, _step_s(model, cluster, layout, larger))
        if options.precision == "bf16":
            for older, newer in NEXT:
                seconds = [
                    _step_s(model, find_cluster(f"{device}:64"), layout, options)
                    for device in (newer, older)
                ]
                compare(f"{newer} for {older}", name, *seconds)
    return {"compared": compared, "worse": sorted(worse, key=lambda each: -each["ratio"])}


_FILE = """name = "x"
[[nodes]]
device = "mine"
nodes = {nodes}
inside = "inner"
nic = "outer"
[links.inner]
like = "nvlink4"
gbit_per_s = {inner}
[links.outer]
like = "ib-ndr"
gbit_per_s = {outer}
[devices.mine]
like = "h100-sxm"
source = "bench"
tflops = {{fp8 = {fp8}, bf16 = {bf16}, fp32 = 66.9}}
memory_gib = {gib}
memory_gbyte_per_s = {memory}
"""
_PLAIN = {"inner": 3600, "outer": 400, "fp8": 1978.9, "bf16": 989.4, "gib": 80, "memory": 3350}
_TASKS = (
    ("llama3-8b", 8, 8192, 256),
    ("llama3-70b", 16, 8192, 256),
    ("mixtral-8x7b", 8, 4096, 512),
)


def plans() -> list[dict[str, Any]]:
    """Best plans of machines and what having more does to them."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:

        def planned(model: str, nodes: int, window: int, sequences: int, **sizes: float) -> Any:
            file = Path(folder) / "cluster.toml"
            file.write_text(_FILE.format(nodes=nodes, **(_PLAIN | sizes)))
            request = PlanRequest(model, str(file), window, sequences, seconds=_SECONDS)
            try:
                return plan(request)
            except EquipoiseError:  # nothing fits
                return None

        for task in _TASKS:
            base = planned(*task)
            smaller = planned(*task, gib=56)
            model, nodes, window, sequences = task
            better = {
                "a half more memory": (base, smaller),
                "twice the memory": (planned(*task, gib=160), base),
                "twice the links": (planned(*task, inner=7200, outer=800), base),
                "twice as fast a device": (
                    planned(*task, fp8=3957.8, bf16=1978.8, memory=6700),
                    base,
                ),
                "twice the devices": (planned(model, 2 * nodes, window, sequences), base),
            }
            for what, (more, less) in better.items():
                if more is None or less is None:  # what fits must go on fitting
                    is_worse = more is None and less is not None
                    rows.append({"plan": task, "what": what, "worse": is_worse})
                    continue
                ratio = more.best.price["step_s"] / less.best.price["step_s"]
                allowed = max(_GAP, more.gap or 0.0)
                rows.append(
                    {
                        "plan": task,
                        "what": what,
                        "ratio": round(ratio, 4),
                        "gap": round(more.gap or 0.0, 4),
                        "worse": ratio > 1 + allowed,
                        "best": [each.best.words["layout"] for each in (more, less)],
                    }
                )
    return rows


if __name__ == "__main__":
    print(json.dumps({"steps": steps(), "plans": plans(), "environment": environment()}, indent=1))
