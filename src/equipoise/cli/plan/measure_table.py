"""What ``equipoise plan run.toml --measure`` prints."""

import shlex
from collections import Counter
from collections.abc import Sequence

import numpy as np

from equipoise.base.units import format_seconds
from equipoise.cli.console import make_console
from equipoise.cli.table import Column, print_columns
from equipoise.plan.measured.request import MeasureAnswer, say_keys


def command_of(words: Sequence[str]) -> str:
    """The command that trains a choice."""
    return shlex.join(["equipoise", "train", *words])


def print_search(answer: MeasureAnswer, *, is_quiet: bool) -> None:
    """The best; unless quiet, every trial, predicted beside measured."""
    console, best = make_console(), answer.best
    if best.step_s is None:
        return
    console.print(
        f"{say_keys(answer.keys(best))}: {format_seconds(best.step_s)} a step, measured.",
        soft_wrap=True,
    )
    if is_quiet:
        return
    trials = answer.trials
    failed = Counter(trial.cause for trial in trials if trial.step_s is None)
    causes = ", ".join(f"{count} {cause}" for cause, count in failed.items())
    console.print(
        f"{len(trials)} of the {len(answer.run.choices.keys)} trials that an exhaustive search "
        f"would take" + (f"; failed: {causes}." if causes else "; none failed."),
        soft_wrap=True,
    )
    columns = (
        Column("", is_left=True, wraps=20),
        Column("predicted"),
        Column("measured"),
        Column("slower by"),
        Column("what failed", is_left=True, goes=1, wraps=24),
    )
    rows = []
    for trial in sorted(trials, key=lambda trial: trial.step_s or np.inf):
        price, slower = answer.predicted_s(trial), ""
        if trial.step_s is not None and trial is not best:
            slower = f"{trial.step_s / best.step_s - 1:.1%}"
        rows.append(
            (
                say_keys(answer.keys(trial)),
                "" if price is None else format_seconds(price),
                "" if trial.step_s is None else format_seconds(trial.step_s),
                slower,
                "" if trial.step_s is not None else f"{trial.cause}: {trial.message}",
            )
        )
    print_columns(console, columns, rows, box=None, pad_edge=False)
