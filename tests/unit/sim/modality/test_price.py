"""What encoders add to a step: terms that add up, the slowest rank, and the bytes of the bridge."""

import dataclasses

import numpy as np
import pytest

from equipoise.balance.modality.step import ModalityStep, plan_step
from equipoise.cost.modality import encode_passes, encoder_groups, encoder_params
from equipoise.cost.step.request import Residuals, StepOptions
from equipoise.schedule.modality.readers import embedding_places
from equipoise.sim.machine import Machine
from equipoise.sim.modality.price import EncoderPrice, price_encoders, way_s
from equipoise.sim.step import price_step
from equipoise.spec.cluster.spec import find_cluster
from equipoise.spec.layout import Layout
from equipoise.spec.modality.encoder import EncoderSpec
from equipoise.spec.modality.items import Items
from equipoise.spec.modality.sections import AudioSpec, VisionSpec
from equipoise.spec.model.presets import preset
from equipoise.spec.pack import MicroBatch, PackedStep
from support.items import make_items

ENCODERS = (VisionSpec(layers=2, hidden=64, heads=2).encoder, AudioSpec(layers=1).encoder)
MACHINE, MODEL = Machine(find_cluster("h100-sxm:4")), preset("7m")
ITEMS = make_items([[(0, 900, 0)], [(5, 40, 0), (50, 10, 1)], [(3, 300, 0)], []])


def _step(
    items: Items = ITEMS,
    documents: tuple[int, ...] = (0, 1, 2, 3),
    specs: tuple[EncoderSpec, ...] = ENCODERS,
) -> ModalityStep:
    batches = [MicroBatch(np.array([[each, 0, 1024]])) for each in documents]
    packed = PackedStep("by-work", tuple((each,) for each in batches))

    def embeds(data_rank: int, turn: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = packed.ranks[data_rank][turn].tokens
        return embedding_places(Layout(dp=4), data_rank, [np.arange(tokens)])

    return plan_step(packed, items, 4, embeds, specs, ranks=4, width=320, element_bytes=4)


def _price(
    step: ModalityStep,
    specs: tuple[EncoderSpec, ...] = ENCODERS,
    layout: Layout = Layout(dp=4),  # noqa: B008 - frozen
) -> EncoderPrice:
    return price_encoders(step, ITEMS, specs, 320, MACHINE, Residuals(), layout)


def test_terms_add_up_to_what_the_step_takes_longer() -> None:
    encoders = _price(_step())
    options = StepOptions(1024, 4, precision="fp32")
    alone = price_step(MODEL, MACHINE, Layout(dp=4), options)
    both = encoders.added_to(alone)
    assert both.step_s == pytest.approx(alone.step_s + encoders.step_s)
    assert sum(both.terms.values()) == pytest.approx(both.step_s)
    assert both.memory["encoders"] == encoders.held_bytes.max()
    assert (both.memory_bytes - alone.memory_bytes == encoders.held_bytes.max()).all()
    assert encoders.least_s == pytest.approx(encoders.terms["encoders"])


def test_the_slowest_rank_sets_the_pace_and_held_bytes_are_by_rank() -> None:
    step = _step()
    encoders = _price(step)
    (largest,) = (rank for rank in range(4) if 0 in step.own(rank))
    assert encoders.encode_s.argmax() == largest
    patches = ITEMS.patches[[0]]
    alone = encode_passes(ENCODERS[0], patches, 320, MACHINE.at("fp32"))
    assert encoders.terms["encoders"] == pytest.approx(alone.forward_s + alone.backward_s)
    assert len(set(encoders.held_bytes.tolist())) == 4


def test_a_step_without_items_pays_for_sums_and_updates_alone() -> None:
    empty = _price(_step(documents=(3,) * 4))
    assert (empty.terms["encoders"], empty.bridge_s) == (0.0, 0.0)
    assert empty.step_s == pytest.approx(empty.weights_s + empty.update_s)
    weights = sum(encoder_params(each, 320) for each in ENCODERS)
    assert empty.held_bytes.tolist() == [8 * weights + 12 * weights // 4] * 4


def test_weights_travel_and_stay_by_the_stage() -> None:
    step, large = _step(documents=(3,) * 4), (VisionSpec(layers=3, hidden=512).encoder,)

    def prices(specs: tuple[EncoderSpec, ...], **keys: int) -> list[EncoderPrice]:
        layouts = [Layout(dp=4, zero=zero, **keys) for zero in (0, 1, 2, 3)]
        return [_price(step, specs, layout) for layout in layouts]

    whole, split, early, gathered = prices(large)
    assert whole.update_s == pytest.approx(4 * split.update_s)
    assert split.weights_s == early.weights_s < gathered.weights_s
    held = [int(each.held_bytes[0]) for each in (whole, split, early, gathered)]
    assert held == sorted(held, reverse=True) and held[0] > 3 * held[3]
    exchange, groups = MACHINE.collective((0, 1, 2, 3)), encoder_groups(large[0], 320, Layout())
    gather_s = sum(exchange("all_gather", 4 * each.params) for each in groups)
    assert gathered.weights_s - split.weights_s == pytest.approx(gather_s)
    assert whole.weights_s == pytest.approx(
        sum(exchange("all_reduce", 4 * each.params) for each in groups)
    )
    # Groups of at most 1 MiB are kept for the step.
    small = prices(ENCODERS)
    assert small[1].weights_s == small[3].weights_s
    assert small[1].held_bytes.tolist() == small[3].held_bytes.tolist()
    copied = prices(large, replicas=2)
    assert copied[0].weights_s == pytest.approx(whole.weights_s)
    assert copied[1].update_s == pytest.approx(2 * split.update_s)
    alone = MACHINE.collective((0, 1)), MACHINE.collective((0, 2))
    assert copied[1].weights_s == pytest.approx(
        sum(
            alone[0]("all_gather", 4 * each.params)
            + alone[0]("reduce_scatter", 4 * each.params)
            + alone[1]("all_reduce", 2 * each.params)
            for each in groups
        )
    )


def test_the_bridge_is_priced_by_its_busiest_rank_both_ways() -> None:
    plan = _step().plan
    away = plan.sent * ~np.eye(4, dtype=np.bool_)
    most = max(away.sum(axis=0).max(), away.sum(axis=1).max())
    exchange = MACHINE.collective((0, 1, 2, 3))
    one_way_s = exchange("all_to_all", most * 320 * 4 * 4 / 3)
    assert way_s(plan, 320, MACHINE) == pytest.approx(one_way_s)
    assert _price(_step()).bridge_s == pytest.approx(2 * one_way_s)
    in_two = dataclasses.replace(plan, rounds=2)
    assert way_s(in_two, 320, MACHINE) > way_s(plan, 320, MACHINE)
    at_home = dataclasses.replace(plan, rounds=0)
    assert way_s(at_home, 320, MACHINE) == 0.0


def _frozen(*patterns: str) -> tuple[EncoderSpec, ...]:
    return tuple(each.with_frozen(patterns) for each in ENCODERS)


def test_what_is_frozen_has_no_backward_no_update_and_no_way_back() -> None:
    step = _step()
    whole, nothing = _price(step), _price(_step(specs=_frozen("encoders")), _frozen("encoders"))
    assert nothing.update_s == 0.0
    assert [each.backward_s for each in nothing.passes] == [0.0] * 4
    assert [each.forward_s for each in nothing.passes] == [each.forward_s for each in whole.passes]
    assert nothing.bridge_s == pytest.approx(way_s(step.plan, 320, MACHINE))
    assert (nothing.held_bytes < whole.held_bytes).all()
    # A gather, where there was one and a sum.
    exchange = MACHINE.collective((0, 1, 2, 3))
    groups = [group for each in ENCODERS for group in encoder_groups(each, 320, Layout(dp=4))]
    assert nothing.weights_s == pytest.approx(
        sum(exchange("all_gather", 4 * each.params) for each in groups)
    )
    parts = [("encoders.*.project",), ("encoders.*.embed",), ("encoders.*.layers",)]
    some = [_price(step, _frozen(*each)) for each in parts]
    deep = _price(step, _frozen("encoders.*.embed", "encoders.*.layers", "encoders.*.norm"))
    for each in (*some, deep):
        assert 0 < each.update_s < whole.update_s
        assert nothing.step_s < each.step_s < whole.step_s
        assert (each.held_bytes < whole.held_bytes).all()
    # Below the last products nothing is trained, so nothing runs back through the layers.
    assert deep.terms["encoders"] < min(each.terms["encoders"] for each in some)


def test_rows_of_a_frozen_encoder_do_not_return() -> None:
    whole, step = _step(), _step(specs=_frozen("encoders.image"))
    assert step.returns and not _step(specs=_frozen("encoders")).returns
    assert step.plan.digest == whole.plan.digest and whole.back is whole.plan
    kinds = ITEMS.kind[step.items[step.back.readers.item]]
    assert set(kinds.tolist()) == {1}
    assert int(step.back.sent.sum()) == 10  # the rows of the only sound
    sent = step.bytes(320, element_bytes=4)
    assert (sent == 4 * 320 * (step.plan.away + step.back.away.T)).all()
    assert step.back.messages < step.plan.messages == whole.messages
    assert step.messages == (step.plan.messages + step.back.messages) // 2
