"""What encoders take, fitted from groups of a corpus's items."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.cost.modality import timed_passes
from equipoise.spec.device.parts import EncoderPoint, PassCost, encoder_name
from equipoise.spec.modality.sections import AudioSpec, VisionSpec
from equipoise.spec.model.presets import preset
from equipoise.train.calibrate.items import encoder_points, fit_pass
from equipoise.train.calibrate.parts_plan import PartsPlan, choose_groups
from support.items import make_items

VISION, AUDIO = VisionSpec(layers=2, hidden=32).encoder, AudioSpec(layers=1).encoder
ITEMS = make_items([[(0, 1 + 3 * at, 0)] for at in range(30)] + [[(0, 2, 1)]])
MODEL = preset("2m")


def _plan() -> PartsPlan:
    encoders = VISION, AUDIO
    groups = choose_groups(ITEMS, encoders)
    return PartsPlan(MODEL, "fp32", 1024, 512, encoders=encoders, groups=groups)


def test_groups_are_of_one_kind_the_smallest_the_largest_and_between() -> None:
    groups = _plan().groups
    assert [(each.kind, len(each.items)) for each in groups] == [
        *(("image", count) for count in (1, 1, 4, 4, 4, 24, 24, 24)),
        ("audio", 1),
    ]
    assert groups[0].items == (0,) and groups[1].items == (29,) and groups[-1].items == (30,)
    assert groups[4].patches.tolist() == ITEMS.patches[26:30].tolist()
    assert choose_groups(make_items([[]]), [VISION]) == ()


@settings(max_examples=10, deadline=None)
@given(*[st.floats(0.0, 1e-3)] * 2, st.floats(1e-12, 1e-9))
def test_known_costs_are_found_again(call: float, item: float, work: float) -> None:
    counts, numbers = np.array([1.0, 1, 4, 4, 24, 24]), np.array([1e4, 9e6, 7e5, 4e7, 9e6, 3e8])
    seconds = call + item * counts + work * numbers
    cost = fit_pass(counts, numbers, seconds)
    found = cost.call_s + cost.part_s * counts + cost.work_s * numbers
    assert found == pytest.approx(seconds, rel=1e-6)
    assert min(cost.call_s, cost.part_s, cost.work_s) >= 0


def test_a_point_prices_what_was_timed_with_reading_in_the_forward() -> None:
    plan = _plan()
    samples = {}
    for number, group in enumerate(plan.groups):
        spec = VISION if group.kind == "image" else AUDIO
        work = float(spec.multiplications(group.patches, MODEL.hidden).sum())
        for kind, seconds in (
            ("items read", 1e-3 * len(group.items)),
            ("items forward", 2e-3 + 1e-9 * work),
            ("items backward", 4e-3 + 2e-9 * work),
        ):
            samples[kind, number] = [seconds, 9.0, seconds]
    image, audio = encoder_points(plan, samples)
    assert (image.encoder, audio.encoder) == tuple(
        encoder_name(each, MODEL.hidden) for each in (VISION, AUDIO)
    )
    patches = np.array([16, 64])
    work = float(VISION.multiplications(patches, MODEL.hidden).sum())
    both = timed_passes(image, VISION, patches, MODEL.hidden)
    assert both.forward_s == pytest.approx(2 * 1e-3 + 2e-3 + 1e-9 * work)
    assert both.backward_s == pytest.approx(4e-3 + 2e-9 * work)
    nothing = timed_passes(image, VISION, np.zeros(0, np.int64), MODEL.hidden)
    assert (nothing.forward_s, nothing.backward_s) == (0.0, 0.0)
    del samples["items backward", len(plan.groups) - 1]
    assert [each.title for each in encoder_points(plan, samples)] == ["image, 2 layers of 32"]


def test_what_was_timed_is_priced_and_nothing_else_of_that_machine() -> None:
    cost = PassCost(1e-3, 2e-3, 3e-3)
    point = EncoderPoint("other", "image", cost, cost, cost)
    assert cost.seconds(0, 7.0) == 0.0 and cost.seconds(2, 3.0) == pytest.approx(14e-3)
    assert point.encoder != encoder_name(VISION, 64) != encoder_name(VISION, 128)
