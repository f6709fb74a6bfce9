"""Parts of a decoder's step, timed as ``equipoise calibrate`` does, one way at a time."""

import pickle
import time
from pathlib import Path

from bench.lib.stamp import LoadStamp
from bench.planner.real_cases import CALIBRATED
from equipoise.comm.group import Ranks
from equipoise.comm.local import run_ranks
from equipoise.schedule.attention.price import LinkPrice
from equipoise.spec.device.parts import ModelParts, Way
from equipoise.spec.run.load import read_run
from equipoise.train.calibrate.model import put_together
from equipoise.train.calibrate.parts import time_way
from equipoise.train.calibrate.parts_plan import PartsPlan, WaySamples


def _plan() -> PartsPlan:
    return PartsPlan.for_run(read_run(None, list(CALIBRATED.items())))


def _timed(ranks: Ranks, plan: PartsPlan, way: Way) -> tuple[WaySamples, float]:
    begin = time.process_time()
    return time_way(ranks, plan, way), time.process_time() - begin


def time_once(way: Way, file: Path) -> float:
    """Time one way and keep the samples; returns the cores that others kept busy meanwhile."""
    stamp = LoadStamp()
    samples_of = run_ranks(2, _timed, _plan(), way)
    load = stamp.other_load(sum(processor_s for _, processor_s in samples_of))
    file.write_bytes(pickle.dumps([samples for samples, _ in samples_of]))
    return load


def parts_of(files: dict[Way, Path], link: LinkPrice) -> ModelParts:
    """The table of the ways that were timed."""
    samples_of = {way: pickle.loads(file.read_bytes()) for way, file in files.items()}
    return put_together(_plan(), samples_of, link)
