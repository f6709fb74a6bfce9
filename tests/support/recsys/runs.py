"""A recommender's run of one process, trained in a second."""

from pathlib import Path

import torch

from equipoise.observe.journal import EventSink
from equipoise.recsys.exchange import TimedExchange
from equipoise.recsys.folder import prepare
from equipoise.recsys.place import plan_samples
from equipoise.recsys.rank.coding import write_coding
from equipoise.recsys.samples import read_samples
from equipoise.recsys.trainer import RankTrainer
from equipoise.spec.recommend import read_recommend
from support.recsys.clicks import write_clicks


def trained_run(folder: Path, *flags: tuple[str, str]) -> Path:
    """The folder of a run of ``write_clicks``, which lies in ``folder``; flags replace keys."""
    torch.set_num_threads(1)
    spec, base = read_recommend(write_clicks(folder), [("layout.dp", "1"), *flags])
    samples, own = read_samples(spec.data, base), folder / "run"
    prepare(own, spec, base)
    write_coding(own, samples.coding)
    plan = plan_samples(spec, samples).plan
    RankTrainer(own, spec, samples, plan, EventSink(), TimedExchange(alone=True)).run(print)
    return own
