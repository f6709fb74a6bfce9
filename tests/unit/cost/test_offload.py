"""Offloading: what leaves the device is in the host, and what no pass hides is waited for."""

import dataclasses

import numpy as np
import pytest

from equipoise.base.arrays import Floats
from equipoise.base.errors import SpecError
from equipoise.cost.memory.device import host_memory, kept_bytes, rank_memory
from equipoise.cost.memory.share import StageShare
from equipoise.cost.offload import (
    COPIES,
    add_copies,
    copies_share,
    copy_bytes_per_s,
    host_update_s,
    loads_without_copies,
    require_host,
)
from equipoise.cost.step.request import TERMS, Stack, StepOptions
from equipoise.spec.device.by_name import DEVICES, find_device
from equipoise.spec.device.here import this_cpu
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import PLANNED
from equipoise.spec.offload import (
    KEPT_LAYERS,
    OFFLOADS,
    Offload,
    offloads_activations,
    offloads_optimizer,
    resident_layers,
)

MODEL = dataclasses.replace(PLANNED["llama3-8b"], layers=8)
PLAIN = Stack(slack_share=0.0)


def asked(offload: Offload, **changes: object) -> StepOptions:
    return dataclasses.replace(StepOptions(4096, 8, offload=offload, stack=PLAIN), **changes)  # type: ignore[arg-type]


TOKENS = 4096.0


def share(batches: float = 1.0, layers: int = 8) -> StageShare:
    return StageShare(tuple(range(layers)), kept_micro_batches=batches)


def test_the_settings_are_all_combinations() -> None:
    each = {(offloads_optimizer(name), offloads_activations(name)) for name in OFFLOADS}
    assert len(each) == len(OFFLOADS) == 4


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=8, zero=1), Layout(tp=2, pp=4)], ids=str)
@pytest.mark.parametrize("offload", OFFLOADS)
def test_what_leaves_the_device_is_in_the_host(layout: Layout, offload: Offload) -> None:
    mine = share(batches=layout.pp, layers=8 // layout.pp)
    whole = rank_memory(MODEL, layout, asked("none"), mine, TOKENS)
    here = rank_memory(MODEL, layout, asked(offload), mine, TOKENS)
    there = host_memory(MODEL, layout, asked(offload), mine, TOKENS)
    changed = {name for name in whole if here[name] != whole[name]}
    assert changed == {name for name, value in there.items() if value}
    assert ("optimizer" in changed) == offloads_optimizer(offload)
    assert ("activations" in changed) == offloads_activations(offload)
    if offloads_optimizer(offload):
        # Beside 12 bytes of states the host has a gradient and a narrow weight to copy.
        assert here["optimizer"] == 0
        assert there["optimizer"] == pytest.approx(whole["optimizer"] * (12 + 4 + 2) / 12)
    if offloads_activations(offload):
        assert there["activations"] == pytest.approx(whole["activations"] - here["activations"])
        each = whole["activations"] / (8 // layout.pp * layout.pp)
        assert here["activations"] == pytest.approx(resident_layers(layout.pp) * each)


def test_master_weights_that_stay() -> None:
    layout, mine = Layout(dp=8, zero=1), share()
    whole = rank_memory(MODEL, layout, asked("none"), mine, TOKENS)["optimizer"]
    stack = dataclasses.replace(PLAIN, offloads_master=False)
    left = asked("optimizer", stack=stack)
    assert rank_memory(MODEL, layout, left, mine, TOKENS)["optimizer"] == pytest.approx(
        whole * 4 / 12
    )
    there = host_memory(MODEL, layout, left, mine, TOKENS)["optimizer"]
    assert there == pytest.approx(whole * (8 + 4 + 2) / 12)
    wide = asked("optimizer", stack=stack, precision="fp32")  # whose weights are their masters
    assert rank_memory(MODEL, layout, wide, mine, TOKENS)["optimizer"] == 0


def test_few_layers_stay_whole() -> None:
    mine = share(layers=KEPT_LAYERS)
    options = asked("activations")
    assert host_memory(MODEL, Layout(), options, mine, TOKENS) == {"activations": 0.0}
    assert rank_memory(MODEL, Layout(), options, mine, TOKENS) == rank_memory(
        MODEL, Layout(), asked("none"), mine, TOKENS
    )


@pytest.mark.parametrize("device", DEVICES.values(), ids=list(DEVICES))
def test_the_host_is_slower_than_the_device(device) -> None:
    copies, update = host_update_s(device, 1e9, asked("optimizer"))
    assert update > 10 * 30e9 / device.memory_bytes_per_s
    assert 0 < copies < update
    assert copies_share(device, asked("optimizer")) == pytest.approx(copies / (copies + update))
    assert copies_share(device, asked("activations")) == 0
    assert copy_bytes_per_s(device) < device.host_bytes_per_s


def parts(forward_s: float, backward_s: float) -> Floats:
    table = np.zeros((3, len(TERMS)))
    table[:, 0] = forward_s, 0.5 * backward_s, 0.5 * backward_s
    return table


def test_what_a_pass_hides_costs_nothing() -> None:
    device, options, kind = find_device("h100-sxm"), asked("activations"), (False, "none")
    each = kept_bytes(MODEL, Layout(), options, sparse=False, recompute="none", doc_tokens=4096.0)
    copy_s = 4096 * each / copy_bytes_per_s(device)
    for forward, backward in ((1.1, 2.0), (0.5, 2.0), (0.5, 0.75)):
        table = parts(forward * copy_s, backward * copy_s)
        add_copies(table, MODEL, device, Layout(), options, kind, 4096.0)  # type: ignore[arg-type]
        waits = [max(0.0, 1 - forward), max(0.0, 1 - backward), 0.0]
        # Of eight layers the last two stay.
        assert table[:, COPIES] == pytest.approx(0.75 * copy_s * np.array(waits), abs=1e-12)
        staged = parts(forward * copy_s, backward * copy_s)
        add_copies(staged, MODEL, device, Layout(pp=2), options, kind, 4096.0)  # type: ignore[arg-type]
        assert staged[:, COPIES] == pytest.approx(copy_s * np.array(waits), abs=1e-12)
        assert loads_without_copies([table, staged]) == pytest.approx(
            (forward + backward) * copy_s * np.ones(2)
        )
    table = parts(0.0, 0.0)
    add_copies(table, MODEL, device, Layout(), asked("optimizer"), kind, 4096.0)  # type: ignore[arg-type]
    assert not table.any()


def test_nowhere_to_offload_to() -> None:
    require_host(this_cpu(), "none")
    require_host(find_device("h100-sxm"), "both")
    with pytest.raises(SpecError) as caught:
        require_host(this_cpu(), "both")
    assert str(caught.value) == (
        "this-cpu computes in host memory, so there is nowhere to offload to. Omit --offload."
    )
