"""What ``sim.request.simulate`` answers: a step's time, where it goes, memory, energy and money.

Kept true (tests/unit/sim/test_request.py)
    ``as_row`` is what ``equipoise simulate --json`` prints.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from equipoise.base.arrays import Floats
from equipoise.base.units import GIB
from equipoise.cost.curves.sources import sources_of
from equipoise.cost.step.request import StepOptions
from equipoise.sim.faults import FaultRun
from equipoise.sim.jitter import JitterRun
from equipoise.sim.machine import Machine
from equipoise.sim.step import StepRun


@dataclass(frozen=True, slots=True)
class FittingChange:
    """A change of one setting with which a step fits that does not fit without."""

    change: str
    """As a command line has it: ``zero=3``, ``--recompute full``."""
    memory_gib_max: float
    step_s: float


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

    @property
    def step_s(self) -> float:
        """Seconds of the step, without jitter."""
        return self.run.price.step_s

    @property
    def tokens(self) -> int:
        """Tokens of the step, over all ranks."""
        return self.run.price.tokens

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
        """Where each number of the cluster comes from, by its name."""
        return sources_of(self.machine.cluster, self.options.precision)

    def noise(self) -> dict[str, Any]:
        """Jitter, failures and changes that would fit, as plain data; absent ones left out."""
        noise: dict[str, Any] = {}
        if self.jitter is not None:
            noise["jitter"] = dataclasses.asdict(self.jitter)
        if self.goodput is not None:
            noise["goodput"] = dataclasses.asdict(self.goodput)
        if self.would_fit is not None:
            noise["would_fit"] = [dataclasses.asdict(each) for each in self.would_fit]
        return noise

    def as_row(self) -> dict[str, Any]:
        """Plain data: what ``equipoise simulate --json`` prints."""
        row = step_row(self.run, self.machine, self.options)
        return row | self.noise() | {"sources": self.sources}


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
        "memory_gib_max": float(price.memory_bytes.max()) / GIB,
        "memory_gib": (price.memory_bytes / GIB).tolist(),
        "capacity_gib": price.capacity_bytes / GIB,
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
