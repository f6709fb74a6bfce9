"""What ``sim.request.simulate`` answers: a step's time, where it goes, memory, energy and money.

Kept true (tests/unit/sim/test_request.py)
    ``as_row`` is what ``equipoise simulate --json`` prints.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from equipoise.base.arrays import Floats
from equipoise.base.units import GIB
from equipoise.cost.curves.sources import sources_of
from equipoise.cost.step.request import StepOptions
from equipoise.cost.step.spread import SHARE, Interval, step_interval
from equipoise.sim.faults import FaultRun, Month
from equipoise.sim.jitter import JitterRun
from equipoise.sim.machine import Machine
from equipoise.sim.step import StepRun
from equipoise.spec.cluster.spec import ClusterSpec
from equipoise.spec.device.file import doubts_of, read_device_file
from equipoise.spec.device.spec import THIS_CPU, DeviceSpec
from equipoise.spec.layout import Layout
from equipoise.spec.offload import OFFLOADS
from equipoise.spec.program.spec import DEFAULT, ProgramSpec
from equipoise.spec.run.spec import Recompute


@dataclass(frozen=True, slots=True)
class FittingChange:
    """A change of one setting with which a step fits that does not fit without."""

    change: str
    """As a command line has it: ``zero=3``, ``--recompute full``."""
    memory_gib_max: float
    step_s: float


_SPARING: tuple[Recompute, ...] = ("attention", "every-2", "selective", "full")
"""Recomputation, from what costs least time to what saves most memory."""


def fitting_changes(
    price: Callable[[Layout, StepOptions], StepRun],
    layout: Layout,
    options: StepOptions,
    device: DeviceSpec,
) -> tuple[FittingChange, ...]:
    """Changes of one setting with which a step fits that does not fit without, fastest first.

    Args:
        price: The step with another layout and other options.
        layout: That does not fit.
        options: Likewise.
        device: Whether it can offload to its host.
    """
    changed = [
        (f"zero={zero}", dataclasses.replace(layout, zero=zero), options)
        for zero in (2, 3)
        if zero > layout.zero and layout.zero_ranks > 1
    ]
    changed += [
        (f"--recompute {name}", layout, dataclasses.replace(options, recompute=name))
        for name in _SPARING
        if options.recompute == "none"
    ]
    changed += [
        (f"--offload {name}", layout, dataclasses.replace(options, offload=name))
        for name in OFFLOADS[1:]
        if options.offload == "none" and device.name != THIS_CPU
    ]
    fitting = []
    for change, other, asked in changed:
        tried = price(other, asked).price
        if tried.fits:
            gib = float(tried.memory_bytes[tried.fullest]) / GIB
            fitting.append(FittingChange(change, gib, tried.step_s))
    return tuple(sorted(fitting, key=lambda each: each.step_s))


@dataclass(frozen=True, slots=True, eq=False)
class StepAnswer:
    """One step, priced."""

    run: StepRun
    """The replayed step: its price, and the schedule and timeline of its slowest pipeline."""
    machine: Machine
    options: StepOptions
    jitter: JitterRun | None = None
    """Step seconds with jitter over those without; None unless requested."""
    goodput: FaultRun | None = None
    """A long run with failures; None unless requested."""
    would_fit: tuple[FittingChange, ...] | None = None
    """Changes of one setting that fit, fastest first; None if the step fits."""
    month: Month | None = None
    """Some days of a run with failures; None unless requested."""
    program: ProgramSpec | None = None
    """The program that trains; None: equipoise."""

    @property
    def step_s(self) -> float:
        """Seconds of the step, without jitter."""
        return self.run.price.step_s

    @property
    def tokens(self) -> int:
        """Tokens of the step, over all ranks."""
        return self.run.price.tokens

    @property
    def interval(self) -> Interval | None:
        """Seconds between which 80% of such steps lie; None on this machine's own curves.

        Spreads of curves are those of published steps on described clusters, and this machine's
        curves have intervals of their own.
        """
        return None if self.machine.device.is_here else step_interval(self.terms)

    @property
    def terms(self) -> dict[str, float]:
        """Seconds by what they are spent on, on the rank that computes most; they sum to step_s."""
        return self.run.price.terms

    @property
    def memory(self) -> dict[str, float]:
        """Bytes on the fullest rank, by what they hold."""
        return self.run.price.memory

    @property
    def memory_bytes(self) -> Floats:
        """Peak bytes of each pipeline rank, float64 [pp]."""
        return self.run.price.memory_bytes

    @property
    def capacity_bytes(self) -> int:
        """Bytes that tensors may fill on a device."""
        return self.run.price.capacity_bytes

    @property
    def fits(self) -> bool:
        """Whether every rank fits its device and its share of the host's memory."""
        return self.run.price.fits

    @property
    def useful_flop(self) -> float:
        """FLOP of the step, each causal pair counted once."""
        return self.run.price.useful_flop

    @property
    def skew(self) -> float:
        """Computing time of the busiest pipeline rank over the mean [ratio]."""
        busy_s = self.run.price.busy_s
        return float(busy_s.max() / busy_s.mean())

    @property
    def energy_j(self) -> float:
        """Joules of the step, over all devices."""
        return _energy_and_money(self.run, self.machine)[0]

    @property
    def usd(self) -> float | None:
        """Dollars of the step, over all devices; None where a device has no public price."""
        return _energy_and_money(self.run, self.machine)[1]

    @property
    def sources(self) -> dict[str, str]:
        """Where each number of the cluster comes from, by its name, and each of the program's."""
        return program_sources(self.machine.cluster, self.options, self.program)

    @property
    def doubts(self) -> tuple[str, ...]:
        """What was measured of this machine under load, or only in part, a sentence each."""
        return calibration_doubts(self.machine.cluster)

    def noise(self) -> dict[str, Any]:
        """Intervals, jitter, failures, changes that would fit: plain data, absent ones left out."""
        noise: dict[str, Any] = {}
        if (sure := self.interval) is not None:
            noise |= interval_row(sure)
        if self.jitter is not None:
            noise["jitter"] = dataclasses.asdict(self.jitter)
        if self.goodput is not None:
            noise["goodput"] = dataclasses.asdict(self.goodput)
        if self.month is not None:
            noise["days"] = self._days(self.month)
        if self.would_fit is not None:
            noise["would_fit"] = [dataclasses.asdict(each) for each in self.would_fit]
        return noise

    def _days(self, month: Month) -> dict[str, Any]:
        """Days of a run with failures, with what they train and cost."""
        _, usd = _energy_and_money(self.run, self.machine)
        bought = month.mean.wall_s / self.step_s * (1 + (month.spares or 0) / month.devices)
        return dataclasses.asdict(month) | {
            "tokens": month.mean.steps * self.tokens,
            "usd": None if usd is None else usd * bought,
        }

    def as_row(self) -> dict[str, Any]:
        """Plain data: what ``equipoise simulate --json`` prints."""
        row = step_row(self.run, self.machine, self.options)
        return row | self.noise() | {"doubts": list(self.doubts), "sources": self.sources}


def interval_row(sure: Interval) -> dict[str, Any]:
    """An interval, and what makes it wide, as keys of ``equipoise simulate --json``."""
    return {
        "interval": {"share": SHARE, "low_s": sure.low_s, "high_s": sure.high_s},
        "spreads": [
            dataclasses.asdict(each) | {"terms": list(each.terms)} for each in sure.spreads
        ],
    }


def calibration_doubts(cluster: ClusterSpec) -> tuple[str, ...]:
    """What forecasts on a cluster must say of how its devices were measured; empty of others.

    Args:
        cluster: Its classes may be of this machine.
    """
    files = {each.device.curve_file: each.device.name for each in cluster.classes}
    return tuple(
        doubt
        for file, name in files.items()
        if file is not None
        for doubt in doubts_of(read_device_file(file), name)
    )


def program_sources(
    cluster: ClusterSpec, options: StepOptions, program: ProgramSpec | None
) -> dict[str, str]:
    """Sources of the numbers of a cluster, and of the facts of a program but equipoise."""
    sources = sources_of(cluster, options.precision, options.stack)
    if program is None or program.name == DEFAULT:
        return sources
    return sources | {f"{program.name}: {name}": source for name, source in program.sources}


def step_row(run: StepRun, machine: Machine, options: StepOptions) -> dict[str, Any]:
    """A step as plain data, in the keys of ``equipoise simulate --json``.

    Args:
        run: The replayed step.
        machine: It was replayed on.
        options: Of the step.
    """
    price, devices = run.price, machine.cluster.devices
    peak = machine.mean_peak_flop_per_s(options.precision)
    rate = price.published_flop / price.step_s / devices
    useful = price.useful_flop / price.step_s / devices
    energy_j, usd = _energy_and_money(run, machine)
    return {
        "step_s": price.step_s,
        "tokens_per_s_per_device": price.tokens / price.step_s / devices,
        "tflops_per_device": rate / 1e12,
        "mfu": rate / peak,
        "useful_tflops_per_device": useful / 1e12,
        "useful_mfu": useful / peak,
        "memory_gib_max": float(price.memory_bytes[price.fullest]) / GIB,
        "memory_gib": (price.memory_bytes / GIB).tolist(),
        "capacity_gib": price.fullest_capacity_bytes / GIB,
        "host_memory_gib_max": float(price.host_bytes.max()) / GIB,
        "host_capacity_gib": price.host_capacity_bytes / GIB,
        "fits": price.fits,
        "memory": {name: value / GIB for name, value in price.memory.items()},
        "terms": price.terms,
        "stages": {
            "layers": list(run.layers),
            "nodes": list(run.sites) or [machine.cluster.classes[0].name] * len(price.busy_s),
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


def _energy_and_money(run: StepRun, machine: Machine) -> tuple[float, float | None]:
    """Joules and dollars of one step over all devices.

    A device draws its full power while it computes, its idle power while it waits, and its share
    of the host's all the time. Dollars are None where a device has no public price.
    """
    price, hours = run.price, run.price.step_s / 3600
    computing = float(np.mean(price.busy_s)) / price.step_s
    energy_j, usd = 0.0, 0.0
    for each in machine.cluster.classes:
        device = each.device
        watts = computing * device.power_w + (1 - computing) * device.idle_power_w
        energy_j += (watts + device.host_power_w) * price.step_s * each.devices
        usd += (device.usd_per_hour or 0.0) * each.devices * hours
    is_priced = all(each.device.usd_per_hour is not None for each in machine.cluster.classes)
    return energy_j, usd if is_priced else None
