"""The parts of a decoder's step as ``plans_real`` times them: one way at a time, in many passes."""

import pickle
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from bench.plans_real_cases import CALIBRATED
from equipoise.cli.calibrate import parts_plan_for
from equipoise.comm.local import run_ranks
from equipoise.schedule.attention_price import LinkPrice
from equipoise.spec.device_parts import ModelParts, Way
from equipoise.spec.load import read_run
from equipoise.train.calibrate_model import put_together
from equipoise.train.calibrate_parts import time_way
from equipoise.train.parts_plan import PartsPlan, StepRecord, WaySamples

RANKS = 2


def decoder_plan() -> PartsPlan:
    """What ``equipoise calibrate`` times of the bench's decoder."""
    return parts_plan_for(read_run(None, list(CALIBRATED.items())))


def time_once(way: Way, file: Path) -> None:
    """One way as ``equipoise calibrate`` times it; the samples are kept."""
    file.write_bytes(pickle.dumps(run_ranks(RANKS, time_way, decoder_plan(), way)))


def parts_of(files: dict[Way, list[Path]], link: LinkPrice) -> ModelParts:
    """The table of all passes' samples, as if one calibration had drawn them."""
    found = {}
    for way, passes in files.items():
        by_pass = [pickle.loads(file.read_bytes()) for file in passes]
        found[way] = [_pooled([each[rank] for each in by_pass]) for rank in range(RANKS)]
    return put_together(decoder_plan(), found, link)


def _pooled(passes: Sequence[WaySamples]) -> WaySamples:
    """Samples of one rank, pass after pass."""
    pool = WaySamples({})
    for each in passes:
        for key, record in each.steps.items():
            _extend(pool.steps.setdefault(key, StepRecord(spans=defaultdict(list))), record)
        for tokens, (forward, backward) in each.documents.items():
            both = pool.documents.setdefault(tokens, ([], []))
            both[0].extend(forward)
            both[1].extend(backward)
        for pack, (forward, backward) in each.context.items():
            both = pool.context.setdefault(pack, ([], []))
            both[0].extend(forward)
            both[1].extend(backward)
    return pool


def _extend(pool: StepRecord, record: StepRecord) -> None:
    pool.step_s.extend(record.step_s)
    pool.began.extend(record.began)
    pool.ended.extend(record.ended)
    for key, seconds in record.spans.items():
        pool.spans[key].extend(seconds)
