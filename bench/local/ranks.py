"""Two ranks, one core each: by-work against in-order, and two ranks against one.

The very same pieces under both policies (``cut = "windows"``), documents of Wikipedia's
lengths over real tokens, two windows a rank. Policies alternate step by step in one run;
one rank runs the same steps before and after. The prediction is the curve's, plus an
overhead that the first two steps measured; the figures are of the later ones.
"""

import dataclasses
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from bench.lib.corpus import open_corpus, recut
from bench.lib.stamp import LoadStamp, environment, spread
from equipoise.balance.packing.pack import pack_step, rank_seconds, skew
from equipoise.comm.group import Ranks
from equipoise.comm.local import run_ranks
from equipoise.data.stream import DocumentStream
from equipoise.nn.decoder import Decoder, initialize
from equipoise.observe.journal import Journal
from equipoise.optim.adamw import make_adamw
from equipoise.parallel.zero.shard import ShardedDecoder
from equipoise.spec.model.presets import preset
from equipoise.spec.run.spec import PackSpec, RunSpec, TrainSpec
from equipoise.spec.workload import draw_lengths
from equipoise.train.curves import obtain_curve
from equipoise.train.process import settle
from equipoise.train.step import StepRunner

STEPS, WARM = 7, 2
PACK = PackSpec(policy="by-work", context_tokens=16_384, step_tokens=65_536, cut="windows")
MODEL = preset("2m")
POLICIES = ("in-order", "by-work")


def _run(ranks: Ranks, zero: int, steps: int) -> list[dict[str, object]]:
    """Alternate policies over the same steps; one row a step and policy."""
    settle(ranks.rank, pin=False)
    corpus = open_corpus()
    lengths = draw_lengths("wikipedia", 40_000, seed=1)
    store = recut(corpus, lengths[lengths.cumsum() <= len(corpus.tokens)])
    curve = obtain_curve(RunSpec(pack=PACK), MODEL, ranks, Path(tempfile.gettempdir()))
    decoder = Decoder(MODEL)
    initialize(decoder, 0)
    sharded = ShardedDecoder(decoder, ranks, zero=zero, precision="fp32")
    stream = DocumentStream(store.doc_tokens, seed=0, context_tokens=PACK.context_tokens)
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        runner = StepRunner(
            sharded,
            make_adamw(decoder, TrainSpec()),
            store,
            ranks,
            Journal(Path(folder), ranks.rank),
        )
        for step in range(steps + 1):
            pieces = stream.step(step * PACK.step_tokens, PACK.step_tokens)
            for policy in POLICIES if step % 2 else reversed(POLICIES):
                began = time.perf_counter()
                pack = dataclasses.replace(PACK, policy=policy)
                packed = pack_step(pieces, pack, ranks.world, curve)
                plan_s = time.perf_counter() - began
                predicted = rank_seconds(packed, curve)
                result = runner.run(
                    packed,
                    step=step,
                    rate=1e-3,
                    clip_norm=1.0,
                    last_good=lambda: None,
                    stop_asked=False,
                )
                rows.append(
                    {
                        "step": step,
                        "policy": policy,
                        "predicted_compute_s": predicted,
                        "busy_s": result.rank_busy_s,
                        "step_s": result.step_s,
                        "plan_s": plan_s,
                        "skew": skew(predicted),
                        "cpu_s": time.process_time(),
                    }
                )
    return rows


def _cpu_s(rows: list[dict[str, object]]) -> float:
    """CPU seconds of the rank that measured these rows; its peer used about as many."""
    return float(str(rows[-1]["cpu_s"]))


def _median(rows: list[dict[str, object]], policy: str, key: str) -> float:
    return statistics.median(float(str(r[key])) for r in rows if r["policy"] == policy)


def measure() -> dict[str, object]:
    """Run one rank, two ranks and one rank again."""
    stamp = LoadStamp()
    single = run_ranks(1, _run, 1, 4)[0]
    rows = run_ranks(2, _run, 1, STEPS)[0]
    single += run_ranks(1, _run, 1, 4)[0]
    first = [row for row in rows if row["step"] < WARM]
    overhead_s = statistics.mean(float(str(r["step_s"])) - max(r["busy_s"]) for r in first)  # type: ignore[call-overload]
    later = [row for row in rows if row["step"] >= WARM]
    for row in later:
        row["predicted_step_s"] = max(row["predicted_compute_s"]) + overhead_s  # type: ignore[call-overload]

    def total(key: str, policy: str) -> float:
        return sum(float(str(row[key])) for row in later if row["policy"] == policy)

    measured = total("step_s", "in-order") / total("step_s", "by-work")
    predicted = total("predicted_step_s", "in-order") / total("predicted_step_s", "by-work")
    alone = {r["step"]: [] for r in single if r["step"] >= WARM}
    for row in single:
        if row["step"] >= WARM and row["policy"] == "by-work":
            alone[row["step"]].append(float(str(row["step_s"])))
    pairs = [
        min(times) / (2 * float(str(row["step_s"])))
        for row in later
        if row["policy"] == "by-work" and (times := alone.get(row["step"]))
    ]
    return {
        "what": "two ranks, one core each, 2m decoder, wikipedia lengths, 16,384-token windows",
        "measured_ratio (goal 1.2)": measured,
        "predicted_ratio": predicted,
        "ratio_error (goal 0.05)": measured / predicted - 1,
        "parallel_efficiency (goal 0.90)": spread(pairs),
        "plan_share_of_step (goal 0.01)": _median(later, "by-work", "plan_s")
        / _median(later, "by-work", "step_s"),
        "rows": later,
        "other_load_cores": stamp.other_load(
            _cpu_s(single[:10]) + _cpu_s(single[10:]) + 2 * _cpu_s(rows)
        ),
        "environment": environment(),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    json.dump(measure(), sys.stdout, indent=1)
