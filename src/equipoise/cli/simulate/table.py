"""What ``equipoise simulate`` prints: a step's time, where it goes, memory, energy and money."""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.base.units import GIB, format_seconds
from equipoise.cli.console import make_console
from equipoise.cost.curves.sources import sources_of
from equipoise.cost.step.request import StepOptions
from equipoise.sim.machine import Machine
from equipoise.sim.moments import bytes_over_time
from equipoise.sim.step import StepRun


def step_row(found: StepRun, machine: Machine, options: StepOptions) -> dict[str, Any]:
    """One step as plain data: the keys that ``--json`` prints."""
    price, devices = found.price, machine.cluster.devices
    peak = machine.mean_peak_flop_per_s(options.precision)
    rate = price.published_flop / price.step_s / devices
    useful = price.useful_flop / price.step_s / devices
    energy_j, usd = energy_and_money(found, machine)
    return {
        "step_s": price.step_s,
        "tokens_per_s_per_device": price.tokens / price.step_s / devices,
        "tflops_per_device": rate / 1e12,
        "mfu": rate / peak,
        "useful_tflops_per_device": useful / 1e12,
        "useful_mfu": useful / peak,
        "memory_gib_max": float(price.memory_bytes.max()) / GIB,
        "memory_gib": (price.memory_bytes / GIB).tolist(),
        "capacity_gib": price.capacity_bytes / GIB,
        "host_memory_gib_max": float(price.host_bytes.max()) / GIB,
        "host_capacity_gib": price.host_capacity_bytes / GIB,
        "fits": price.fits,
        "memory": {name: value / GIB for name, value in price.memory.items()},
        "terms": price.terms,
        "stages": {
            "layers": list(found.layers),
            "nodes": list(found.sites) or [machine.cluster.classes[0].name] * len(price.busy_s),
            "busy_s": price.busy_s.tolist(),
            "exposed_s": price.exposed_s.tolist(),
            "bubble_s": price.bubble_s.tolist(),
        },
        "energy_j_per_step": energy_j,
        "energy_j_per_token": energy_j / price.tokens,
        "usd_per_step": usd,
        "usd_per_million_tokens": None if usd is None else 1e6 * usd / price.tokens,
        "extrapolated": list(price.extrapolated),
    }


def energy_and_money(found: StepRun, machine: Machine) -> tuple[float, float | None]:
    """Joules and dollars of one step over all devices.

    A device draws its full power while it computes, what it draws at rest while it waits, and
    its share of the host all the time. Dollars are None where a device has no public price.
    """
    price, hours = found.price, found.price.step_s / 3600
    computing = float(np.mean(price.busy_s)) / price.step_s
    energy_j, usd = 0.0, 0.0
    for each in machine.cluster.classes:
        device = each.device
        watts = computing * device.power_w + (1 - computing) * device.idle_power_w
        energy_j += (watts + device.host_power_w) * price.step_s * each.devices
        usd += (device.usd_per_hour or 0.0) * each.devices * hours
    is_priced = all(each.device.usd_per_hour is not None for each in machine.cluster.classes)
    return energy_j, usd if is_priced else None


def add_counters(file: Path, found: StepRun) -> None:
    """Add the memory of each rank at every moment to a trace of the step."""
    trace = json.loads(file.read_text())
    for rank, curve in enumerate(bytes_over_time(found.slowest, found.memory)):
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


def print_step(
    found: StepRun,
    machine: Machine,
    options: StepOptions,
    title: str,
    noise: Mapping[str, Any],
    *,
    is_quiet: bool,
) -> None:
    """The headline, and unless quiet where the seconds and the bytes go."""
    from rich.table import Table

    console = make_console()
    row = step_row(found, machine, options)
    fits = "fits" if row["fits"] else "DOES NOT FIT"
    console.print(
        f"{title}: a step of {found.price.tokens:,} tokens takes "
        f"{format_seconds(row['step_s'])}, {row['tokens_per_s_per_device']:,.0f} tokens/s a "
        f"device, {row['tflops_per_device']:.3g} TFLOP/s ({row['mfu']:.1%} MFU); "
        f"{row['memory_gib_max']:.1f} GiB on the fullest rank of {row['capacity_gib']:.1f}"
        f"{host_sentence(row)}: {fits}.",
        soft_wrap=True,
    )
    if is_quiet:
        return
    table = Table(box=None, pad_edge=False)
    for name in ("seconds of the busiest rank", "", "share", "GiB of the fullest rank", ""):
        table.add_column(
            name, justify="left" if name[:1] in ("s", "G") and name != "share" else "right"
        )
    times = sorted(row["terms"].items(), key=lambda each: -each[1])
    held = [(name, gib) for name, gib in row["memory"].items() if gib]
    sizes = sorted(held, key=lambda each: -each[1])
    for at in range(max(len(times), len(sizes))):
        seconds = times[at] if at < len(times) else None
        gib = sizes[at] if at < len(sizes) else None
        table.add_row(
            seconds[0] if seconds else "",
            format_seconds(seconds[1]) if seconds else "",
            f"{seconds[1] / row['step_s']:.1%}" if seconds else "",
            gib[0] if gib else "",
            f"{gib[1]:.2f}" if gib else "",
        )
    console.print(table)
    usd = row["usd_per_million_tokens"]
    money = "no public price" if usd is None else f"${usd:,.2f} a million tokens"
    console.print(
        f"{row['energy_j_per_token']:.3g} J a token, {money}. Layers of the stages: "
        f"{_in_runs(found.layers)}.",
        soft_wrap=True,
    )
    if found.sites:
        console.print(f"Stages stand on: {', '.join(found.sites)}.", soft_wrap=True)
    for line in _noise_lines(noise):
        console.print(line, soft_wrap=True)
    if "experts" in row["terms"] and options.expert_skew == 1:
        console.print("Experts are taken as balanced; --expert-skew says by how much they are not.")
    if row["extrapolated"]:
        names = ", ".join(row["extrapolated"])
        console.print(f"Not measured on this device at these sizes: {names}.", style="dim")
    for line in source_lines(sources_of(machine.cluster, options.precision)):
        console.print(line, style="dim", soft_wrap=True)


def host_sentence(row: Mapping[str, Any]) -> str:
    """What a device's share of its host holds; nothing where nothing is offloaded."""
    if not row["host_memory_gib_max"]:
        return ""
    return (
        f" and {row['host_memory_gib_max']:.1f} GiB in its host's memory of "
        f"{row['host_capacity_gib']:.1f}"
    )


def source_lines(sources: Mapping[str, str]) -> list[str]:
    """Names of one source on one line.

    >>> source_lines({"peaks": "a datasheet", "price": "a list", "power_w": "a datasheet"})
    ['Sources', '  peaks, power w: a datasheet', '  price: a list']
    """
    of_source: dict[str, list[str]] = {}
    for name, source in sources.items():
        of_source.setdefault(source, []).append(name.replace("_", " "))
    return ["Sources", *(f"  {', '.join(names)}: {each}" for each, names in of_source.items())]


def _in_runs(layers: Sequence[int]) -> str:
    """Stages that follow each other with as many layers are told once."""
    runs = [(each, len(list(run))) for each, run in groupby(layers)]
    return ", ".join(str(each) if count == 1 else f"{count} x {each}" for each, count in runs)


def _noise_lines(noise: Mapping[str, Any]) -> list[str]:
    """What would fit, and what jitter and failures make of the step."""
    lines = []
    if "would_fit" in noise:
        found = [
            f"{each['change']} ({each['memory_gib_max']:.1f} GiB, {format_seconds(each['step_s'])})"
            for each in noise["would_fit"]
        ]
        lines.append(
            f"Changes of one setting that fit: {', '.join(found)}."
            if found
            else "No change of one setting fits: give more devices, or higher degrees."
        )
    if "jitter" in noise:
        found = noise["jitter"]
        lines.append(
            f"With jitter the step takes {found['mean']:.3f} times that, p95 {found['p95']:.3f}."
        )
    if "goodput" in noise:
        found = noise["goodput"]
        hours = found["wall_s"] / max(1, found["failures"]) / 3600
        lines.append(
            f"With failures, one every {hours:.1f} h, {found['goodput']:.1%} of the time goes into "
            f"steps that are kept: {found['lost_s'] / found['wall_s']:.1%} is computed in vain, "
            f"{found['saving_s'] / found['wall_s']:.1%} saves, every {found['checkpoint_steps']} "
            f"steps, {found['restarting_s'] / found['wall_s']:.1%} restarts."
        )
    return lines
