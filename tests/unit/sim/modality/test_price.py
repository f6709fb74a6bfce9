"""What encoders add to a step: terms that add up, the slowest rank, and the bytes of the bridge."""

import dataclasses

import numpy as np
import pytest

from equipoise.balance.modality.step import ModalityStep, plan_step
from equipoise.cost.modality import encode_passes, encoder_params
from equipoise.cost.step.request import Residuals, StepOptions
from equipoise.schedule.modality.readers import embedding_places
from equipoise.sim.machine import Machine
from equipoise.sim.modality.price import bridge_s, price_encoders
from equipoise.sim.step import price_step
from equipoise.spec.cluster.spec import find_cluster
from equipoise.spec.layout import Layout
from equipoise.spec.modality.items import Items
from equipoise.spec.modality.sections import AudioSpec, VisionSpec
from equipoise.spec.model.presets import preset
from equipoise.spec.pack import MicroBatch, PackedStep
from support.items import make_items

ENCODERS = (VisionSpec(layers=2, hidden=64, heads=2).encoder, AudioSpec(layers=1).encoder)
MACHINE, MODEL = Machine(find_cluster("h100-sxm:4")), preset("7m")
ITEMS = make_items([[(0, 900, 0)], [(5, 40, 0), (50, 10, 1)], [(3, 300, 0)], []])


def _step(items: Items = ITEMS, documents: tuple[int, ...] = (0, 1, 2, 3)) -> ModalityStep:
    batches = [MicroBatch(np.array([[each, 0, 1024]])) for each in documents]
    packed = PackedStep("by-work", tuple((each,) for each in batches))

    def embeds(data_rank: int, turn: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = packed.ranks[data_rank][turn].tokens
        return embedding_places(Layout(dp=4), data_rank, [np.arange(tokens)])

    return plan_step(packed, items, 4, embeds, ENCODERS, ranks=4, width=320, element_bytes=4)


def test_terms_add_up_to_what_the_step_takes_longer() -> None:
    encoders = price_encoders(_step(), ITEMS, ENCODERS, 320, MACHINE, Residuals())
    options = StepOptions(1024, 4, precision="fp32")
    alone = price_step(MODEL, MACHINE, Layout(dp=4), options)
    both = encoders.added_to(alone)
    assert both.step_s == pytest.approx(alone.step_s + encoders.step_s)
    assert sum(both.terms.values()) == pytest.approx(both.step_s)
    assert both.memory["encoders"] == encoders.held_bytes.max()
    assert (both.memory_bytes - alone.memory_bytes == encoders.held_bytes.max()).all()
    assert encoders.least_s == pytest.approx(encoders.step_s - encoders.bridge_s)


def test_the_slowest_rank_sets_the_pace_and_held_bytes_are_by_rank() -> None:
    step = _step()
    encoders = price_encoders(step, ITEMS, ENCODERS, 320, MACHINE, Residuals())
    (largest,) = (rank for rank in range(4) if 0 in step.own(rank))
    assert encoders.encode_s.argmax() == largest
    patches = ITEMS.patches[[0]]
    alone = encode_passes(ENCODERS[0], patches, 320, MACHINE.at("fp32"))
    assert encoders.terms["encoders"] == pytest.approx(alone.forward_s + alone.backward_s)
    assert len(set(encoders.held_bytes.tolist())) == 4


def test_a_step_without_items_pays_for_sums_and_updates_alone() -> None:
    empty = price_encoders(_step(documents=(3,) * 4), ITEMS, ENCODERS, 320, MACHINE, Residuals())
    assert (empty.terms["encoders"], empty.bridge_s) == (0.0, 0.0)
    assert empty.step_s == pytest.approx(empty.sum_s + empty.update_s)
    weights = sum(encoder_params(each, 320) for each in ENCODERS)
    assert empty.held_bytes.tolist() == [16 * weights] * 4


def test_the_bridge_is_priced_by_its_busiest_rank_both_ways() -> None:
    plan = _step().plan
    away = plan.sent * ~np.eye(4, dtype=np.bool_)
    most = max(away.sum(axis=0).max(), away.sum(axis=1).max())
    exchange = MACHINE.collective((0, 1, 2, 3))
    assert bridge_s(plan, 320, MACHINE) == pytest.approx(
        2 * exchange("all_to_all", most * 320 * 4 * 4 / 3)
    )
    in_two = dataclasses.replace(plan, rounds=2)
    assert bridge_s(in_two, 320, MACHINE) > bridge_s(plan, 320, MACHINE)
    at_home = dataclasses.replace(plan, rounds=0)
    assert bridge_s(at_home, 320, MACHINE) == 0.0
