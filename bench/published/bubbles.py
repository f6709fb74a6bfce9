"""Bubble rates of published pipelines, row by row: the replay beside the printed figure.

arXiv:2401.10241 prints profiled times and the bubble rates that its authors computed from them
(tables 5 and 6). Nothing is fitted. The replay is checked by a second sweep of its own, which
also answers one question: interleaved rates come out lower in print; with messages from the last
rank back to the first one free, as if that hop were not in the authors' sweep, they agree.
"""

import itertools
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.local.pipeline import published_table
from bench.published.rows import read
from equipoise.schedule.pipeline.prices import PipelinePrices, make_prices
from equipoise.schedule.pipeline.replay import needed_places, replay_pipeline
from equipoise.schedule.pipeline.schedule import PipelineSchedule
from equipoise.schedule.pipeline.strategies import write_pipeline

GOAL = {"1F1B and ZB-H1, absolute": 1e-4, "interleaved, relative": 0.03}
CHUNKS = {"1.5B": 3, "6.2B": 4, "14.6B": 3, "28.3B": 2}
"""Stages a rank of 1F1B-I: one layer each."""


def second_sweep(
    schedule: PipelineSchedule, prices: PipelinePrices, hops: Callable[[int, int], bool]
) -> float:
    """The bubble rate by the longest span, charging a hop where ``hops(source, target)``."""
    table = np.concatenate(schedule.orders)
    needs, travels = needed_places(schedule)
    takes = prices.of_ops()[table[:, 0], table[:, 1], table[:, 2]].tolist()
    starts = [0, *np.cumsum([len(each) for each in schedule.orders]).tolist()]
    ranks = np.repeat(np.arange(schedule.ranks), np.diff(starts)).tolist()
    begin, end = [0] * len(table), [-1] * len(table)
    now, hop = starts[:-1], int(prices.hop_ns[0])
    while now != starts[1:]:
        for rank, stop in enumerate(starts[1:]):
            while now[rank] < stop:
                at, need = now[rank], int(needs[now[rank]])
                if need >= 0 and end[need] < 0:
                    break
                time = end[at - 1] if at > starts[rank] else 0
                if need >= 0:
                    charged = travels[at] and hops(ranks[need], ranks[at])
                    time = max(time, end[need] + hop * int(charged))
                begin[at], end[at] = time, time + takes[at]
                now[rank] += 1
    spans = [end[stop - 1] - begin[start] for start, stop in itertools.pairwise(starts)]
    return 1.0 - sum(takes) / schedule.ranks / max(spans)


def interleaved() -> list[dict[str, Any]]:
    """Each row of 1F1B-I: all hops charged, and all but the one from the last rank to the first."""
    rows = []
    for row in read("zero_bubble_table5.csv"):
        ranks, count, chunks = int(row["p"]), int(row["m"]), CHUNKS[row["model"]]
        times = [1e6 * float(row[key]) / chunks for key in ("T_F_ms", "T_B_ms", "T_W_ms")]
        prices = make_prices(
            *times,
            hop_ns=1e6 * float(row["T_comm_ms"]),
            stages=ranks * chunks,
            micro_batches=count,
        )
        schedule = write_pipeline("interleaved", prices, ranks=ranks)
        every = second_sweep(schedule, prices, lambda _source, _target: True)
        if abs(every - replay_pipeline(schedule, prices).span_bubble_rate) > 1e-9:
            raise RuntimeError(f"two sweeps of {row['model']} differ")
        inner = second_sweep(
            schedule,
            prices,
            lambda s, t, last=ranks - 1: {s, t} != {0, last},  # type: ignore[misc]
        )
        printed = float(row["bubble_1F1B_I"])
        rows.append(
            {
                "model": row["model"],
                "m": count,
                "published": printed,
                "replay": round(every, 4),
                "error": round(every / printed - 1, 4),
                "replay, last to first free": round(inner, 4),
                "error, last to first free": round(inner / printed - 1, 4),
            }
        )
    return rows


def measure() -> dict[str, Any]:
    """All of it."""
    rows, loops = published_table(), interleaved()
    exact = {
        name: max(abs(row[name]["by span"] - row[name]["published"]) for row in rows)
        for name in ("1F1B", "ZB-H1", "ZB-H2", "ZB-1p", "ZB-2p")
    }
    return {
        "what": "bubble rate (cost - m (T_F + T_B + T_W)) / cost, published beside replayed",
        "fitted": "nothing",
        "goal": GOAL,
        "largest absolute error": {name: round(value, 4) for name, value in exact.items()},
        "interleaved, largest relative error": max(abs(row["error"]) for row in loops),
        "interleaved, last to first free": max(
            abs(row["error, last to first free"]) for row in loops
        ),
        "rows": rows,
        "interleaved rows": loops,
    }


if __name__ == "__main__":
    json.dump(measure(), sys.stdout, indent=1)
