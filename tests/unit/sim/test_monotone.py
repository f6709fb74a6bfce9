"""More of anything never makes a step worse: rates, links, power, and less to do."""

import dataclasses
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.cost.step.request import StepOptions
from equipoise.sim.machine import Machine
from equipoise.sim.step import price_step
from equipoise.spec.cluster.spec import ClusterSpec, find_cluster
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import PLANNED
from equipoise.spec.program.file import read_program
from support.machines import MODEL

SPARSE = dataclasses.replace(PLANNED["gpt-oss-120b"], layers=4)
LATENT = dataclasses.replace(PLANNED["deepseek-v3"], layers=4, dense_layers=2)
STEPS = [
    (MODEL, Layout(dp=16, zero=3)),
    (MODEL, Layout(dp=4, tp=4, zero=1)),
    (MODEL, Layout(dp=2, cp=8, zero=1)),
    (SPARSE, Layout(dp=16, ep=16, zero=1)),
    (LATENT, Layout(dp=8, pp=2, ep=8, zero=1)),
]


def changed(cluster: ClusterSpec, **changes: Any) -> ClusterSpec:
    [nodes] = cluster.classes
    device = dataclasses.replace(nodes.device, **changes)
    return dataclasses.replace(cluster, classes=(dataclasses.replace(nodes, device=device),))


def linked(cluster: ClusterSpec, times: float) -> ClusterSpec:
    [nodes] = cluster.classes
    assert nodes.nic is not None
    nic = dataclasses.replace(nodes.nic, bytes_per_s=times * nodes.nic.bytes_per_s)
    tiers = tuple(
        dataclasses.replace(
            tier, link=dataclasses.replace(tier.link, bytes_per_s=times * tier.link.bytes_per_s)
        )
        for tier in nodes.tiers
    )
    return dataclasses.replace(cluster, classes=(dataclasses.replace(nodes, nic=nic, tiers=tiers),))


@settings(max_examples=6, deadline=None)
@given(
    st.sampled_from(STEPS),
    st.sampled_from(["equipoise", "megatron-bridge", "torchtitan"]),
    st.sampled_from(["bf16", "fp8"]),
    st.floats(1.0, 8.0),
)
def test_a_better_machine_takes_no_longer_and_more_to_do_no_less(
    step: tuple[Any, Layout], program: str, precision: Any, times: float
) -> None:
    model, layout = step
    stack = read_program(program).stack
    options = StepOptions(4096, 32, precision=precision, stack=stack)
    cluster = find_cluster("h100-sxm:16")
    device = cluster.device

    def step_s(on: ClusterSpec = cluster, **more: int) -> float:
        asked = dataclasses.replace(options, **more)
        return price_step(model, Machine(on), layout, asked).step_s

    base = step_s() * (1 + 1e-9)
    faster = changed(
        cluster,
        name="faster",
        like=device.name,
        peaks=tuple((dtype, times * rate) for dtype, rate in device.peaks),
        memory_bytes_per_s=times * device.memory_bytes_per_s,
    )
    assert step_s(faster) <= base
    assert step_s(linked(cluster, times)) <= base
    assert (
        step_s(changed(cluster, power_w=device.power_w / times + device.idle_power_w)) >= step_s()
    )
    assert step_s(context_tokens=8192) * (1 + 1e-9) >= step_s()
    assert step_s(step_sequences=48) * (1 + 1e-9) >= step_s()
