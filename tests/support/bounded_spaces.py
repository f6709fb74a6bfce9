"""Spaces of choices whose bounds are compared with their prices."""

import functools
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from equipoise.cost.step.request import Stack, StepOptions
from equipoise.plan.space.columns import Space
from equipoise.plan.space.listing import list_space
from equipoise.sim.machine import Machine
from equipoise.spec.cluster.spec import find_cluster
from equipoise.spec.words import read_model

MODELS = {
    "dense": read_model("layers=13,hidden=1024,heads=16,kv_heads=8,vocab=32000"),
    "sparse": read_model(
        "layers=6,hidden=512,heads=8,vocab=8000,experts=8,top_k=2,expert_ffn=512,dense_layers=1"
    ),
}


@functools.cache
def setting(model: str, devices: int, stack: Stack, micro: int) -> tuple[Machine, Space]:
    """Every choice of ``windows`` windows a device, and the machine that prices them."""
    base = StepOptions(4096, micro * devices, stack=stack)
    machine = Machine(find_cluster(f"h100-sxm:{devices}"))
    return machine, list_space(MODELS[model], devices, base)


def draws(stacks: Mapping[str, Stack]) -> tuple[st.SearchStrategy[Any], ...]:
    """Model, devices, stack, windows a device, row and, where documents are packed, their seed."""
    return (
        st.sampled_from(sorted(MODELS)),
        st.sampled_from([4, 8, 16]),
        st.sampled_from(sorted(stacks)),
        st.sampled_from([1, 3, 8]),
        st.integers(0, 2**31),
        st.one_of(st.none(), st.integers(0, 2**31)),
    )
