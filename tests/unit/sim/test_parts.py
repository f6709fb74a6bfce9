"""Attention, parameters and stages of a step, each by itself."""

import dataclasses

import numpy as np
import pytest

from equipoise.base.arrays import Floats
from equipoise.cost.step.request import TERMS
from equipoise.sim.attention import AttentionCore
from equipoise.sim.parameters import Held, gather_s, held_by_layer, optimizer_s, reduce_s
from equipoise.sim.parts import StepParts, layers_of_ranks, split_layers
from equipoise.spec.layout import Layout
from support.machines import MODEL, SPARSE, h100, options, stack


def core(layout: Layout, **changes: object) -> AttentionCore:
    machine = h100(16)
    return AttentionCore(MODEL, layout, options(**changes), machine, machine.context_links(layout))


def test_one_context_rank_waits_for_nobody() -> None:
    found = core(Layout(dp=16)).price([4096, 100])
    assert (found.tokens, found.forward_exposed_s, found.backward_exposed_s) == (4196, 0, 0)
    assert found.backward_s > 2 * found.forward_s


def test_context_ranks_share_a_document_and_are_never_faster_than_their_share() -> None:
    alone = core(Layout(dp=16)).price([65_536])
    for cp in (2, 4, 16):
        shared = core(Layout(cp=cp, dp=16 // cp)).price([65_536])
        assert shared.tokens == 65_536 / cp
        assert alone.forward_s / cp * 0.8 < shared.forward_s < alone.forward_s
        assert shared.forward_exposed_s >= 0
    assert shared.forward_exposed_s > 0  # over two nodes


def test_a_micro_batch_is_priced_once() -> None:
    priced = core(Layout(dp=16))
    assert priced.price([4096, 100]) is priced.price([100, 4096])


def test_of_many_micro_batches_some_are_replayed_and_the_others_near_them() -> None:
    layout = Layout(cp=8, dp=2)
    batches = [[16_384 - 97 * i, 97 * i, 4000 + 11 * i] for i in range(1, 13)]
    some = core(layout)
    found = [some.price(each) for each in batches]
    for lengths, near in zip(batches[8:], found[8:], strict=True):
        exact = core(layout).price(lengths)
        assert near.tokens == exact.tokens
        assert near.forward_s == pytest.approx(exact.forward_s, rel=0.3)
        total = exact.backward_s + exact.backward_exposed_s
        assert near.backward_s + near.backward_exposed_s == pytest.approx(total, rel=0.3)


def test_scores_that_are_written_cost_masked_pairs() -> None:
    fused = core(Layout(dp=16)).price([4096])
    written = core(Layout(dp=16), stack=stack(attention="unfused")).price([4096])
    assert written.forward_s > 1.5 * fused.forward_s


@pytest.mark.parametrize("recompute", ["none", "attention", "selective", "full"])
def test_a_layer_of_experts_takes_what_its_host_takes(recompute: str) -> None:
    """Or what its device takes, whichever is longer; attention counts as the device's."""
    layout, model = Layout(dp=8, ep=8), dataclasses.replace(SPARSE, dense_layers=1)

    def passes(tokens: int, host_s: float) -> tuple[Floats, Floats]:
        asked = options(recompute=recompute, stack=stack(host_experts_s=host_s))
        batch = StepParts(model, h100(8), layout, asked).price([tokens])
        return batch.layers[0].sum(axis=1), batch.layers[-1].sum(axis=1)

    host_s, shares = 0.05, np.array([1.0, 1.2, 0.5]) / 2.7
    free_dense, free = passes(512, 0.0)
    dense, held = passes(512, host_s)
    assert np.array_equal(dense, free_dense)
    assert (free[[0, 2]] < host_s * shares[[0, 2]]).all()
    assert held[[0, 2]] == pytest.approx(host_s * shares[[0, 2]])
    again = {"none": 0.0, "attention": 0.0, "selective": 1.0, "full": 1.0}[recompute]
    assert held[1] >= host_s * (shares[1] + again * shares[0]) * (1 - 1e-9)
    _, busy = passes(262_144, 0.0)
    assert (busy > host_s).all() and np.array_equal(passes(262_144, host_s)[1], busy)


def test_weights_of_a_rank() -> None:
    whole = held_by_layer(SPARSE, Layout(), sparse=True)
    assert whole.shared + whole.experts == SPARSE.count_layer(sparse=True, active=False)
    shared = held_by_layer(SPARSE, Layout(dp=8, tp=2, ep=8, etp=2), sparse=True)
    assert shared.experts == whole.experts / 16
    assert shared.shared == whole.shared / 2


def test_traffic_of_parameters() -> None:
    machine, held = h100(64), Held(1e9, 0.0)
    assert gather_s(machine, Layout(tp=64), held, 2.0) == 0
    scatter = reduce_s(machine, Layout(dp=64, zero=1), held, 4.0)
    whole = reduce_s(machine, Layout(dp=64, zero=0), held, 4.0)
    assert scatter < whole
    copies = Layout(dp=64, zero=3, replicas=8)
    assert gather_s(machine, copies, held, 2.0) < gather_s(machine, Layout(dp=64), held, 2.0)
    assert reduce_s(machine, copies, held, 4.0) > 0
    experts = Held(0.0, 1e9)
    assert gather_s(machine, Layout(dp=64, ep=64), experts, 2.0) == 0
    assert gather_s(machine, Layout(dp=64, ep=8), experts, 2.0) > 0


def test_the_optimizer_works_on_its_shard() -> None:
    machine, asked = h100(64), options()
    whole = optimizer_s(machine, Layout(dp=64, zero=0), Held(1e9, 0.0), asked)
    shard = optimizer_s(machine, Layout(dp=64, zero=1), Held(1e9, 0.0), asked)
    assert whole == pytest.approx(64 * shard)


@pytest.mark.parametrize("layout", [Layout(dp=16), Layout(dp=2, tp=8), Layout(cp=4, dp=4)])
def test_parts_are_never_negative(layout: Layout) -> None:
    made = StepParts(MODEL, h100(16), layout, options(recompute="full")).price(np.array([4096]))
    assert len(made.layers) == MODEL.layers
    assert min(float(layer.min()) for layer in (*made.layers, made.first, made.last)) >= 0
    at = TERMS.index("products")
    plain = StepParts(MODEL, h100(16), layout, options()).price(np.array([4096]))
    again = made.layers[0][1, at] - plain.layers[0][1, at]
    assert again == pytest.approx(plain.layers[0][0, at])  # a forward, and nothing else


def test_layers_of_every_split_are_the_model() -> None:
    layout = Layout(pp=4, dp=4)
    made = StepParts(MODEL, h100(16), layout, options()).price(np.array([4096]))
    for schedule, virtual in (("1f1b", 1), ("interleaved", 2), ("zb-v", 2)):
        asked = options(schedule=schedule, virtual=virtual)
        split = split_layers(made, asked, 4 * virtual)
        held = layers_of_ranks(split, layout, asked)
        assert sorted(layer for mine in held for layer in mine) == list(range(8))
    assert held[0][0] == 0 and held[0][-1] == 7  # a V: the first rank has both ends
    equal = split_layers(made, options(stack=stack(split="equal")), 4)
    assert equal.layers.tolist() == [2, 2, 2, 2]


def test_a_machine_answers_alike_and_names_what_it_did_not_measure() -> None:
    machine = h100(16)
    assert machine.product_s(64, 64, 64, fp8=False) == machine.product_s(64, 64, 64, fp8=False)
    assert not machine.extrapolated
    machine.hop_s(0, 8, 1e6)
    assert machine.extrapolated == {"collectives"}
    assert machine.peak_flop_per_s("fp8") > machine.peak_flop_per_s("bf16")
    assert machine.context_links(Layout(dp=16)).near.bytes_per_s == float("inf")
    links = machine.context_links(Layout(cp=16))
    assert links.far is not None
    assert (links.ranks_per_node, links.far.bytes_per_s < links.near.bytes_per_s) == (8, True)
    assert machine.context_links(Layout(cp=2, tp=8)).far is None


def test_changed_sizes_are_another_price() -> None:
    deeper = dataclasses.replace(MODEL, layers=9)
    made = StepParts(deeper, h100(16), Layout(dp=16), options()).price(np.array([4096]))
    assert len(made.layers) == 9
