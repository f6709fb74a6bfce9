"""What ``equipoise simulate`` prints: a step's time, where it goes, memory, energy and money."""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from equipoise.base.units import GIB, format_seconds
from equipoise.cli.console import make_console
from equipoise.cli.show import host_sentence, print_sources
from equipoise.cli.table import Column, print_columns
from equipoise.cost.step.request import ExpertForecast
from equipoise.sim.answer import StepAnswer
from equipoise.sim.moments import bytes_over_time
from equipoise.sim.step import StepRun


def add_counters(file: Path, run: StepRun) -> None:
    """Add the memory of each rank at every moment to a trace of the step."""
    trace = json.loads(file.read_text())
    for rank, curve in enumerate(bytes_over_time(run.slowest, run.memory)):
        trace["traceEvents"] += [
            {
                "name": f"rank {rank} memory [GiB]",
                "ph": "C",
                "pid": 0,
                "ts": at / 1e3,
                "args": {"GiB": round(held / GIB, 3)},
            }
            for at, held in zip(curve.at_ns.tolist(), curve.held.tolist(), strict=True)
        ]
    file.write_text(json.dumps(trace, separators=(",", ":")))


def print_step(answer: StepAnswer, title: str, *, is_quiet: bool, sources_are_listed: bool) -> None:
    """The headline, and unless quiet where the seconds and the bytes go."""
    console = make_console()
    row, run = answer.as_row(), answer.run
    fits = "fits" if row["fits"] else "DOES NOT FIT"
    console.print(
        f"{title}: a step of {answer.tokens:,} tokens takes "
        f"{format_seconds(row['step_s'])}, {row['tokens_per_s_per_device']:,.0f} tokens/s a "
        f"device, {row['tflops_per_device']:.3g} TFLOP/s ({row['mfu']:.1%} MFU); "
        f"{row['memory_gib_max']:.1f} GiB on the fullest rank of {row['capacity_gib']:.1f}"
        f"{host_sentence(row)}: {fits}.",
        soft_wrap=True,
    )
    if is_quiet:
        return
    columns = (
        Column("seconds of the busiest rank", is_left=True, wraps=16),
        Column(""),
        Column("share"),
        Column("GiB of the fullest rank", is_left=True, wraps=14),
        Column(""),
    )
    times = sorted(row["terms"].items(), key=lambda each: -each[1])
    held = [(name, gib) for name, gib in row["memory"].items() if gib]
    sizes = sorted(held, key=lambda each: -each[1])
    spent = [(name, format_seconds(s), f"{s / row['step_s']:.1%}") for name, s in times]
    kept = [(name, f"{gib:.2f}") for name, gib in sizes]
    spent += [("", "", "")] * (len(kept) - len(spent))
    kept += [("", "")] * (len(spent) - len(kept))
    rows = [(*one, *other) for one, other in zip(spent, kept, strict=True)]
    print_columns(console, columns, rows, box=None, pad_edge=False)
    usd = row["usd_per_million_tokens"]
    money = "no public price" if usd is None else f"${usd:,.2f} a million tokens"
    console.print(
        f"{row['energy_j_per_token']:.3g} J a token, {money}. Layers of the stages: "
        f"{_in_runs(run.layers)}.",
        soft_wrap=True,
    )
    if run.sites:
        console.print(f"Stages stand on: {', '.join(run.sites)}.", soft_wrap=True)
    for line in (*answer.doubts, *_noise_lines(row)):
        console.print(line, soft_wrap=True)
    options = answer.options
    if "experts" in row["terms"] and options.experts is None and options.expert_skew == 1:
        console.print(
            "Experts count as balanced; --expert-skew or --expert-loads says how they are not."
        )
    if options.experts is not None:
        console.print(_skews_line(options.experts), soft_wrap=True)
    print_sources(row["extrapolated"], row["sources"], is_listed=sources_are_listed)


def _skews_line(experts: ExpertForecast) -> str:
    """What loads do to ranks that share experts."""
    owner = ", ".join(f"{skew:.2f} on {ranks}" for ranks, skew in experts.owner_skews[1:])
    line = f"The fullest rank's rows of experts over the mean, by the ranks that share: {owner}"
    if not any(copies for _, copies in experts.slots):
        return f"{line}."
    planned = ", ".join(f"{skew:.2f}" for _, skew in experts.planned_skews[1:])
    return f"{line}; with copies {planned}."


def _in_runs(layers: Sequence[int]) -> str:
    """Neighbouring stages with equal numbers of layers, written once."""
    runs = [(each, len(list(run))) for each, run in groupby(layers)]
    return ", ".join(str(each) if count == 1 else f"{count} x {each}" for each, count in runs)


def _noise_lines(row: Mapping[str, Any]) -> list[str]:
    """What would fit, and what jitter and failures make of the step."""
    lines = []
    if "interval" in row:
        low_s, high_s = row["interval"]["low_s"], row["interval"]["high_s"]
        lines.append(
            f"{row['interval']['share']:.0%} of such steps take between {format_seconds(low_s)} "
            f"and {format_seconds(high_s)}; --explain says why."
        )
    if "would_fit" in row:
        fitting = [
            f"{each['change']} ({each['memory_gib_max']:.1f} GiB, {format_seconds(each['step_s'])})"
            for each in row["would_fit"]
        ]
        lines.append(
            f"Changes of one setting that fit: {', '.join(fitting)}."
            if fitting
            else "No change of one setting fits: give more devices, or higher degrees."
        )
    if "jitter" in row:
        jitter = row["jitter"]
        lines.append(
            f"With jitter the step takes {jitter['mean']:.3f} times that, p95 {jitter['p95']:.3f}."
        )
    if "goodput" in row:
        long_run = row["goodput"]
        wall_s = long_run["wall_s"]
        hours = wall_s / max(1, long_run["failures"]) / 3600
        lines.append(
            f"With failures, one every {hours:.1f} h, {long_run['goodput']:.1%} of the time goes "
            f"into steps that are kept: {long_run['lost_s'] / wall_s:.1%} is computed in vain, "
            f"{long_run['saving_s'] / wall_s:.1%} saves, every {long_run['checkpoint_steps']} "
            f"steps, {long_run['restarting_s'] / wall_s:.1%} restarts."
        )
    if "days" in row:
        lines.append(_days_line(row["days"]))
    return lines


def _days_line(days: Mapping[str, Any]) -> str:
    """Sentences on some days of a run that fails and goes on."""
    mean = days["mean"]
    wall_s = mean["wall_s"]
    parts = {
        "is computed in vain": mean["lost_s"],
        "saves": mean["saving_s"],
        "passes until failures are detected": mean["detecting_s"],
        "restarts": mean["restarting_s"],
        "waits for a spare": mean["waiting_s"],
    }
    spent = [
        f"{seconds / wall_s:.1%} {what}"
        for what, seconds in parts.items()
        if seconds >= 5e-4 * wall_s
    ]
    money = "" if days["usd"] is None else f" for ${days['usd']:,.0f}"
    spares = "" if days["spares"] is None else f" and {days['spares']:,} spares"
    return (
        f"In {days['days']:g} days {days['devices']:,} devices{spares} fail {mean['failures']:,} "
        f"times and keep {mean['steps']:,} steps, {days['tokens']:,} tokens{money}. "
        f"{mean['goodput']:.1%} of the time goes into them (90% of such runs: "
        f"{days['goodput_low']:.1%} to {days['goodput_high']:.1%}; {days['expected']:.1%} in the "
        f"long mean with a spare for each failure); {', '.join(spent) or 'nothing is lost'}. They "
        f"save every {mean['checkpoint_steps']:,} steps; best by Young: {days['young_steps']:,}, "
        f"by Daly: {days['daly_steps']:,}."
    )
