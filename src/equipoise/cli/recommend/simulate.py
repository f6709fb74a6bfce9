"""``equipoise simulate`` of a recommender: a predicted step, beside what a journal measured."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from equipoise.base.errors import DataError, SpecError
from equipoise.base.shown import counted
from equipoise.cli.recommend.asked import read_asked
from equipoise.cli.recommend.plan import UNMEASURED, describe, origin_of


def simulate_recommend(
    args: argparse.Namespace, add_arguments: Callable[[argparse.ArgumentParser], None]
) -> int:
    """Print each part's seconds on the slowest rank, predicted and measured."""
    from equipoise.cli.console import make_console
    from equipoise.cli.table import Column, print_columns
    from equipoise.cost.recommend import PARTS
    from equipoise.recsys.foresight.forecast import count_step, read_rates

    asked, rates = read_asked(args, add_arguments, ("run",)), read_rates()
    if rates is None:
        raise SpecError(UNMEASURED)
    prices = [rates.price(each) for each in count_step(asked.spec, asked.samples, asked.answer)]
    slowest = max(prices, key=lambda parts: sum(parts.values()))
    predicted = {**slowest, "step": sum(slowest.values())}
    folder = args.run or Path("runs") / asked.spec.name
    measured = None
    if args.run is not None or (folder / "journal").is_dir():
        measured = read_measured(folder, asked.spec.layout.dp)
    epoch_steps = -(-asked.samples.edges[1] // asked.spec.train.batch)
    row: dict[str, Any] = {
        "predicted": {f"{part}_s": value for part, value in predicted.items()},
        "measured": None
        if measured is None
        else {f"{part}_s": value for part, value in measured.items()},
        "samples_per_s": asked.spec.train.batch / predicted["step"],
        "epoch_s": epoch_steps * predicted["step"],
        "rates": origin_of(rates),
        "run": None if measured is None else str(folder),
    }
    if args.json:
        sys.stdout.write(json.dumps(row, indent=1) + "\n")
        return 0
    console = make_console()
    console.print(
        f"{asked.title}: a step takes {1e3 * predicted['step']:.2f} ms, an epoch "
        f"{row['epoch_s']:.1f} s without its scores, predicted by {describe(rates)}.",
        soft_wrap=True,
    )
    if not args.quiet:
        columns = [Column("part", is_left=True), Column("predicted [ms]")]
        columns += [] if measured is None else [Column("measured [ms]")]
        cells = [
            [
                part,
                f"{1e3 * predicted[part]:.2f}",
                *([] if measured is None else [f"{1e3 * measured[part]:.2f}"]),
            ]
            for part in (*PARTS, "step")
        ]
        print_columns(console, columns, cells)
        if measured is not None:
            console.print(f"Measured in {folder}: medians of its slowest rank.", soft_wrap=True)
    return 0


def read_measured(folder: Path, ranks: int) -> dict[str, float]:
    """Median seconds of each part of a run's steps, on its slowest rank.

    Raises:
        DataError: no recommender's run on this many ranks.
    """
    from equipoise.recsys.foresight.calibrate import median_parts, parts_of

    rows = []
    for file in sorted((folder / "journal").glob("rank-*.jsonl")):
        steps: dict[int, dict[str, float]] = {}
        for line in file.read_text(encoding="utf-8").splitlines():
            if '"name":"recommend"' not in line:
                continue
            try:
                event = json.loads(line)
                steps[int(event["step"])] = parts_of(event)
            except (ValueError, KeyError, TypeError):  # torn where a rank was killed
                continue
        if steps:
            warm = [steps[step] for step in sorted(steps)][min(3, len(steps) - 1) :]
            rows.append(median_parts(warm))
    if len(rows) != ranks:
        raise DataError(
            f"{folder} has journals of steps from {counted(len(rows), 'rank')}, and the run asked "
            f"about has {ranks}. Give the folder of such a run with --run, or its ranks with "
            "--layout.dp."
        )
    return max(rows, key=lambda parts: parts["step"])
