"""What crosses sites bounds every choice, and most choices by more than their FLOP do."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.base.errors import LayoutError, SpecError
from equipoise.cost.step.request import StepOptions
from equipoise.plan.bounds.across import across_bound_s, least_across_s
from equipoise.plan.bounds.roofline import peak_bound_s
from equipoise.plan.space.listing import list_lattice, list_space
from equipoise.sim.machine import Machine
from equipoise.sim.mixed.replay import run_sites
from equipoise.spec.cluster.link import find_link
from equipoise.spec.cluster.spec import ClusterSpec, node_class
from equipoise.spec.program.file import read_program
from equipoise.spec.words import read_model

DENSE = read_model("layers=6,hidden=2048,heads=16,kv_heads=4,vocab=32000")
SPARSE = read_model(
    "layers=6,hidden=1024,heads=16,kv_heads=4,vocab=32000,experts=8,top_k=2,expert_ffn=512"
)
SEQUENCES = 24


def sites(count: int, devices: int, *, trunk: float | None) -> ClusterSpec:
    """Sites of one or more nodes of at most eight devices, with a pipe between them."""
    one = node_class("h100-sxm", devices)
    classes = [dataclasses.replace(one, name=str(at)) for at in range(count)]
    between = find_link("ethernet-25")
    return ClusterSpec("sites", tuple(classes), between, trunk_bytes_per_s=trunk)


def options(program: str, precision: str) -> StepOptions:
    stack = read_program(program).stack
    return StepOptions(4096, SEQUENCES, stack=stack, precision=precision)  # type: ignore[arg-type]


@settings(max_examples=150)
@given(
    st.sampled_from([(2, 4), (3, 4), (2, 8), (4, 2), (3, 8), (2, 16)]),
    st.sampled_from([None, 1e9, 2e8]),
    st.sampled_from([DENSE, SPARSE]),
    st.sampled_from(["equipoise", "megatron-core", "torchtitan"]),
    st.sampled_from(["bf16", "fp8"]),
    st.data(),
)
def test_no_price_is_below_what_crosses(
    shape: tuple[int, int],
    trunk: float | None,
    model: object,
    program: str,
    precision: str,
    data: st.DataObject,
) -> None:
    machine, base = Machine(sites(*shape, trunk=trunk)), options(program, precision)
    rows = list_space(model, machine.cluster.devices, base)  # type: ignore[arg-type]
    row = data.draw(st.integers(0, len(rows) - 1))
    one = rows.keep(np.array([row]))
    choice = one.choice(0)
    bound = across_bound_s(model, machine, one.columns, base)[0]  # type: ignore[arg-type]
    try:
        price = run_sites(model, machine, choice.layout, choice.options).price  # type: ignore[arg-type]
    except (LayoutError, SpecError):
        return
    assert bound <= price.step_s


def test_it_says_more_than_flop_where_the_pipe_is_narrow() -> None:
    machine = Machine(sites(3, 8, trunk=2e8))
    base = options("equipoise", "bf16")
    rows = list_space(DENSE, 24, base)
    bound = across_bound_s(DENSE, machine, rows.columns, base)
    assert (bound > peak_bound_s(DENSE, machine, rows)).mean() > 0.9
    assert bound.min() > 0.0


def test_the_least_of_a_lattice_is_that_of_its_choices() -> None:
    machine, base = Machine(sites(3, 8, trunk=2e8)), options("equipoise", "bf16")
    lattice = list_lattice(DENSE, 24, base)
    every = lattice.keep(np.arange(len(lattice)))
    bound = across_bound_s(DENSE, machine, every.columns, base)
    assert least_across_s(DENSE, machine, lattice) == pytest.approx(float(bound.min()))


def test_one_site_has_nothing_to_cross() -> None:
    machine, base = Machine(sites(1, 8, trunk=None)), options("equipoise", "bf16")
    rows = list_space(DENSE, 8, base)
    assert not across_bound_s(DENSE, machine, rows.columns, base).any()
    assert least_across_s(DENSE, machine, list_lattice(DENSE, 8, base)) == 0.0


def test_messages_over_a_link_follow_each_other() -> None:
    """A pipeline over sites takes at least all that one stage sends to the next."""
    narrow, wide = (Machine(sites(2, 4, trunk=rate)) for rate in (1e8, 1e12))
    base = options("equipoise", "bf16")
    rows = list_space(
        DENSE, 8, base, fixed={"pp": 2, "tp": 1, "cp": 1, "order": "pp-dp", "schedule": "1f1b"}
    )
    choice = rows.choice(0)
    slow, fast = (
        run_sites(DENSE, machine, choice.layout, choice.options).price for machine in (narrow, wide)
    )
    size = SEQUENCES * 4096 * DENSE.hidden * 2
    efficiency = find_link("ethernet-25").efficiency
    assert slow.step_s >= size / (1e8 * efficiency) > 2 * fast.step_s
