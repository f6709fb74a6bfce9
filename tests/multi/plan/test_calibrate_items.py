"""Encoders are timed on real ranks, group by group, with the files of a corpus."""

from equipoise.comm.local import run_ranks
from equipoise.spec.modality.sections import VisionSpec
from equipoise.spec.model.presets import preset
from equipoise.train.calibrate.items import encoder_points, time_items, time_reading
from equipoise.train.calibrate.parts_plan import PartsPlan, choose_groups
from equipoise.train.check.items import draw_items

SPEC = VisionSpec(layers=1, hidden=16, heads=1, patch=2).encoder


def test_every_group_is_timed_by_every_rank() -> None:
    items = draw_items([60, 40, 90, 64], [SPEC])
    groups = choose_groups(items, [SPEC])
    plan = PartsPlan(preset("2m"), "fp32", 256, 128, encoders=(SPEC,), groups=groups)
    taken = time_reading(plan, items)
    for rank in run_ranks(2, time_items, plan, 0.0):
        for place, seconds in rank.items():
            assert len(seconds) == 1  # the least, once time is over
            taken.setdefault(place, []).extend(seconds)
    assert len(taken) == 3 * len(groups)
    (point,) = encoder_points(plan, taken)
    for cost in (point.reading, point.forward, point.backward):
        assert cost.seconds(4, 1e5) > 0
