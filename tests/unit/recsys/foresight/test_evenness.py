"""Placements share a run's batches: nothing is lost, and the planned one is named first."""

from pathlib import Path

import numpy as np

from equipoise.recsys.foresight.evenness import deal, measure_evenness, named_plans
from equipoise.recsys.place import plan_samples
from equipoise.recsys.samples import read_samples
from equipoise.recsys.trainer import draw_order
from equipoise.spec.recommend import read_recommend
from support.recsys.clicks import write_clicks


def test_all_ranks_together_look_up_the_batch(tmp_path: Path) -> None:
    flags = [("layout.dp", "3"), ("tables.kinds", '["row", "column", "data"]')]
    spec, base = read_recommend(write_clicks(tmp_path), flags)
    samples = read_samples(spec.data, base)
    plans = named_plans(spec, samples, plan_samples(spec, samples))
    assert next(iter(plans)) == "planned"
    index = draw_order(spec, samples, 0)[:64]
    lookups = [offsets[index + 1] - offsets[index] for offsets in samples.offsets]
    whole = spec.model.width * sum(int(each.sum()) for each in lookups)
    for name, plan in plans.items():
        floats = deal(plan, samples, index)
        assert floats.sum() == whole, name
        row = measure_evenness(name, plan, spec, samples, steps=4)
        assert 1.0 <= row.skew <= row.worst_skew <= 3.0
    assert len({tuple(np.sort(deal(plan, samples, index))) for plan in plans.values()}) > 2
