"""What ``equipoise plan run.toml --measure`` prints."""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from equipoise.base.units import format_seconds
from equipoise.cli.console import make_console
from equipoise.plan.measured.next import MeasuredSpace, Trial, best_trial
from equipoise.plan.measured.settings import DEGREES, Choices


def say(keys: Mapping[str, str]) -> str:
    """A choice in one line.

    >>> say({"layout.dp": "2", "layout.tp": "1", "layout.zero": "3"})
    'dp=2 zero=3'
    """
    shown = (item for item in keys.items() if item[0] not in DEGREES or item[1] != "1")
    return " ".join(f"{name.rpartition('.')[2]}={value}" for name, value in shown)


def command_of(words: Sequence[str]) -> str:
    """What trains a choice."""
    return shlex.join(["equipoise", "train", *words])


def as_row(choices: Choices, space: MeasuredSpace, trials: Sequence[Trial]) -> dict[str, Any]:
    """The search as ``--json`` prints it."""
    rows = [
        {
            "keys": choices.keys[trial.choice],
            "predicted_s": _price(space, trial),
            "step_s": trial.step_s,
            "cause": trial.cause,
            "message": trial.message,
            "wall_s": trial.wall_s,
        }
        for trial in trials
    ]
    best = best_trial(trials)
    return {
        "best": rows[list(trials).index(best)] if best is not None else None,
        "trials": rows,
        "tried": len(trials),
        "exhaustive": len(choices.keys),
    }


def print_search(
    choices: Choices, space: MeasuredSpace, trials: Sequence[Trial], *, is_quiet: bool
) -> None:
    """The best; unless quiet, every trial, predicted beside measured."""
    from rich.table import Table

    console = make_console()
    best = best_trial(trials)
    if best is None or best.step_s is None:
        return
    console.print(
        f"{say(choices.keys[best.choice])}: {format_seconds(best.step_s)} a step, measured.",
        soft_wrap=True,
    )
    if is_quiet:
        return
    failed = Counter(trial.cause for trial in trials if trial.step_s is None)
    told = ", ".join(f"{count} {cause}" for cause, count in failed.items())
    console.print(
        f"{len(trials)} of the {len(choices.keys)} trials that an exhaustive search would take"
        + (f"; failed: {told}." if told else "; none failed."),
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False)
    for name in ("", "predicted", "measured", "slower by"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=bool(name))
    table.add_column("what failed", justify="left")
    for trial in sorted(trials, key=lambda trial: trial.step_s or np.inf):
        price, slower = _price(space, trial), ""
        if trial.step_s is not None and trial is not best:
            slower = f"{trial.step_s / best.step_s - 1:.1%}"
        table.add_row(
            say(choices.keys[trial.choice]),
            "" if price is None else format_seconds(price),
            "" if trial.step_s is None else format_seconds(trial.step_s),
            slower,
            "" if trial.step_s is not None else f"{trial.cause}: {trial.message}",
        )
    console.print(table)


def _price(space: MeasuredSpace, trial: Trial) -> float | None:
    price = float(space.prior_s[trial.choice])
    return None if np.isnan(price) else price
