"""The price of a step: what it depends on, and what it consists of.

Why
    Planner, simulator, benches and ``equipoise simulate`` must mean the same by a step's price.

What it decides
    The nouns. A *stack* (``spec.program.stack``) says how a training program runs a layout, in
    facts that its authors publish. *Residuals* say how far a whole step falls short of kernels
    measured one by one (clocks under load, host, interference); they are the only fitted numbers
    here (``bench/published/throughput.py``).

The interface
    One pure function prices a step; it is on a higher floor because it replays the pipeline
    schedule that runs (``equipoise.sim.step``)::

        machine = equipoise.sim.machine.Machine(cluster)    # caches what it looks up
        price_step(model, machine, layout, options, *, documents=None) -> StepPrice

    ``StepPrice.step_s`` is the step, ``terms`` adds up to it, ``memory`` is what the fullest
    stage holds and ``fits`` says whether it may.

Kept true (tests/unit/sim/test_step.py)
    Terms add up to the step; options of the wrong size are refused.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from equipoise.base.arrays import Floats
from equipoise.base.errors import LayoutError, SpecError
from equipoise.spec.device.by_name import DEVICES, DeviceSpec
from equipoise.spec.layout import Layout
from equipoise.spec.model.weights import TrainedShares
from equipoise.spec.offload import Offload, offloads_activations
from equipoise.spec.program.stack import Stack as Stack

Precision = Literal["bf16", "fp8", "fp32"]


def element_bytes(precision: Precision) -> int:
    """Bytes of an activation's element, and of a parameter's in compute.

    >>> element_bytes("fp8"), element_bytes("fp32")
    (2, 4)
    """
    return 4 if precision == "fp32" else 2


TERMS = (
    "products",
    "experts",
    "attention",
    "element-wise",
    "gradient sums",
    "tensor traffic",
    "context traffic",
    "expert traffic",
    "parameter traffic",
    "redistribution",
    "offload traffic",
    "launches",
)
"""The terms of a micro-batch's passes: columns of every table of parts."""

MOST_PASSES = 1 << 20
"""Micro-batches times stages of a pipeline that is replayed in seconds and in a few hundred MB."""

PASSES = ("forward", "input", "weight")
"""Rows of every table of parts: forward, input gradient, weight gradient."""


@dataclass(frozen=True, slots=True)
class Residuals:
    """Ratio of a step's time to that of its kernels one by one; 1 and 0 add nothing."""

    products: float = 1.0
    attention: float = 1.0
    moves: float = 1.0
    traffic: float = 1.0
    step_share: float = 0.0
    """Share of the whole step lost between its parts: host, stragglers, clock changes."""


FITTED = Residuals(products=1.13, traffic=1.24)
"""Fitted on 475 published steps of nine sources (``bench/published/throughput.py``, 2026-11-21):
clocks that drop under load, and links that others use. With any one source left out, these two move
by at most 0.02 and 0.08."""


FITTED_PROGRAMS = {
    False: Residuals(products=1.14, traffic=1.32),
    True: Residuals(products=1.25, traffic=1.32),
}
"""The same for programs by their files, by whether the device multiplies FP8: those that do lose
more of their clock under load (``bench/published/throughput.py``, 2026-11-23). With any one source
left out, these move by at most 0.04 and 0.08."""


_CHIPS = {"h20": "h100-sxm", "gb200": "b200", "b300": "b200", "gb300": "b200"}
"""Devices with the chip of another that has less power for its peak."""


def _kept_clock(device: DeviceSpec) -> float:
    """How much more of its clock a device keeps under load than the one whose chip it has.

    As ``cost.kernel`` has it, the sustained clock goes with the cube root of power above idle; here
    for each FLOP of the peak.
    """
    if device.name not in _CHIPS:
        return 1.0
    chip = DEVICES[_CHIPS[device.name]]
    here, there = (
        (each.power_w - each.idle_power_w) / each.peak_flop_per_s("bf16") for each in (device, chip)
    )
    return max(1.0, float((here / there) ** (1 / 3)))


def residuals_of(device: DeviceSpec, stack: Stack = Stack()) -> Residuals:  # noqa: B008
    """The residuals of a device under a program: the fitted ones, but none for this machine.

    This machine's curves were measured under a load like a run's, on all its cores or devices at
    once, and include its residuals.

    A device with more power for its peak than the one whose chip it has loses less of its clock.

    >>> from equipoise.spec.device.by_name import find_device
    >>> [residuals_of(find_device(name)).products for name in ("h100-sxm", "b200", "gb300", "h20")]
    [1.13, 1.13, 1.05, 1.0]
    """
    if device.is_here:
        return Residuals()
    fitted = FITTED if stack == Stack() else FITTED_PROGRAMS["fp8" in device.dtypes]
    products = max(1.0, round(fitted.products / _kept_clock(device), 2))
    return dataclasses.replace(fitted, products=products)


@dataclass(frozen=True, slots=True)
class ExpertForecast:
    """How unevenly routers choose, by the number of ranks that share a layer's experts."""

    owner_skews: tuple[tuple[int, float], ...]
    """Ranks, and rows of the fullest over the mean if every expert stays on its own [ratio]."""
    planned_skews: tuple[tuple[int, float], ...]
    """The same under the policy that balances them."""
    copied: tuple[tuple[int, float], ...]
    """Ranks, and copies that the busiest of them sends or receives for a layer's micro-batch."""
    slots: tuple[tuple[int, float], ...]
    """Ranks, and copies for which each of them keeps memory."""


@dataclass(frozen=True, slots=True)
class StepOptions:
    """Everything about a step that is neither model, cluster nor layout."""

    context_tokens: int
    """Window: tokens of one sequence."""
    step_sequences: int
    """Windows of one step over all ranks."""
    micro_batch: int = 1
    """Windows of one micro-batch."""
    virtual: int = 1
    """Stages of each pipeline rank."""
    schedule: str = "1f1b"
    """A strategy of ``schedule.pipeline.strategies``."""
    recompute: str = "none"
    """A setting of own runs, or modules joined with ``+`` (``spec.recompute``)."""
    offload: Offload = "none"
    precision: Precision = "bf16"
    expert_skew: float = 1.0
    """Rows of the expert rank with the most, over the mean [ratio]."""
    experts: ExpertForecast | None = None
    """Skews of each number of ranks; instead of ``expert_skew``."""
    policy: str = "by-work"
    """A policy of ``balance.packing.pack``, used if document lengths are given."""
    sharding: str = "mixed"
    """A sharding of ``balance.context.sharding``: which context rank holds which tokens."""
    context_strategy: str = "needed-kv"
    """A strategy of ``schedule.attention.strategies``: what travels between context ranks."""
    seed: int = 0
    """Seed of drawn documents."""
    stack: Stack = field(default_factory=Stack)
    residuals: Residuals = FITTED
    trained: TrainedShares | None = None
    """How much of the decoder is trained; None for all of it."""

    def skew_of(self, layout: Layout) -> float:
        """Rows of the fullest of the ranks that share experts, over the mean [ratio].

        Where ranks share the hidden units of each expert too, no policy copies any.
        """
        if self.experts is None:
            return self.expert_skew
        known = self.experts.owner_skews if layout.etp > 1 else self.experts.planned_skews
        return _at(known, layout.ep, 1.0)

    def copied_of(self, layout: Layout) -> float:
        """Copies that the busiest rank sends or receives for a layer's micro-batch."""
        if self.experts is None or layout.etp > 1:
            return 0.0
        return _at(self.experts.copied, layout.ep, 0.0)

    def slots_of(self, layout: Layout) -> int:
        """Copies for which each rank keeps memory."""
        if self.experts is None or layout.etp > 1 or layout.ep == 1:
            return 0
        return int(_at(self.experts.slots, layout.ep, 0.0))

    def count_micro_batches(self, layout: Layout) -> int:
        """Micro-batches of each data-parallel rank.

        Raises:
            LayoutError: the step's sequences do not divide into them.

        >>> StepOptions(8192, 2048).count_micro_batches(Layout(dp=64, tp=8, pp=16))
        32
        """
        each = layout.dp * self.micro_batch
        if self.step_sequences % each or self.step_sequences < 1:
            nearest = max(1, round(self.step_sequences / each)) * each
            raise LayoutError(
                f"A step of {self.step_sequences:,} sequences does not divide into micro-batches "
                f"of {self.micro_batch} on {layout.dp} data-parallel ranks. Nearest: {nearest:,}."
            )
        count = self.step_sequences // each
        passes = layout.pp * self.virtual * count
        if layout.pp > 1 and passes > MOST_PASSES:
            raise LayoutError(
                f"{count:,} micro-batches through {layout.pp * self.virtual:,} stages are "
                f"{passes:,} passes, and {MOST_PASSES:,} at most are replayed. Give larger "
                f"micro-batches, more data-parallel ranks, or a step of fewer sequences."
            )
        return count

    def require(self) -> None:
        """Refuse sizes below 1.

        Raises:
            SpecError: names the number.
        """
        for name in ("context_tokens", "step_sequences", "micro_batch", "virtual"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name} is {getattr(self, name)}. Give a whole number above 0.")
        if not self.expert_skew >= 1:
            raise SpecError(
                f"expert_skew is {self.expert_skew:g}. Give the rows of the fullest expert rank "
                f"over the mean: 1 is balanced."
            )


def _at(table: tuple[tuple[int, float], ...], ranks: int, least: float) -> float:
    """The value of these ranks, or of the most fewer ones that the table has."""
    return max((pair for pair in table if pair[0] <= ranks), default=(1, least))[1]


@dataclass(frozen=True, slots=True, eq=False)
class StepPrice:
    """The price of a step."""

    step_s: float
    terms: dict[str, float]
    """Seconds by term of the rank that computes the most; they add up to ``step_s``."""
    busy_s: Floats
    """Compute time of each stage's rank, float64 [pp]."""
    exposed_s: Floats
    """Time that each stage's rank waits for exposed messages, float64 [pp]."""
    bubble_s: Floats
    """Time that each stage's rank waits for other stages, float64 [pp]."""
    memory: dict[str, float]
    """Peak memory of the fullest stage by term [bytes]."""
    memory_bytes: Floats
    """Peak memory of each stage, float64 [pp]."""
    capacity_bytes: int
    """Device memory that tensors may fill; of several kinds of device, the smallest's."""
    host_bytes: Floats
    """Host memory used by each stage's rank, float64 [pp]."""
    host_capacity_bytes: int
    """A device's share of host memory."""
    tokens: int
    """Tokens of the whole step."""
    useful_flop: float
    """FLOP with each causal pair counted once."""
    published_flop: float
    """FLOP with every pair of a window, as Megatron-LM counts."""
    extrapolated: tuple[str, ...]
    """Curves read beyond their measured sizes."""
    capacities_bytes: Floats | None = None
    """Device memory that each stage may fill, float64 [pp]; None where all are alike."""

    @property
    def fullest(self) -> int:
        """The stage whose device is fullest."""
        if self.capacities_bytes is None:
            return int(self.memory_bytes.argmax())
        return int((self.memory_bytes / self.capacities_bytes).argmax())

    @property
    def fullest_capacity_bytes(self) -> float:
        """What its device may fill."""
        if self.capacities_bytes is None:
            return self.capacity_bytes
        return float(self.capacities_bytes[self.fullest])

    @property
    def fits(self) -> bool:
        """Whether every stage fits its device and its share of the host."""
        return self.needs_bytes <= self.capacity_bytes

    @property
    def fits_host(self) -> bool:
        """Whether what is offloaded fits."""
        return bool(self.host_bytes.max() <= self.host_capacity_bytes)

    @property
    def needs_bytes(self) -> float:
        """Device memory with which the step would fit; infinite if the host is full.

        Of several kinds of device that of the smallest, if all grow alike.
        """
        if not self.fits_host:
            return float("inf")
        held = float(self.memory_bytes[self.fullest])
        return held * (self.capacity_bytes / self.fullest_capacity_bytes)


def kernel_key(layout: Layout, options: StepOptions) -> tuple[object, ...]:
    """What the parts of a step depend on: choices with one key share them."""
    is_whole = layout.zero == 3
    return (
        *(layout.tp, layout.cp, layout.ep, layout.etp, layout.pp > 1, options.recompute),
        (layout.order, layout.dp) if layout.pp > 1 else (),
        options.context_strategy if layout.cp > 1 else "",
        (layout.pp, layout.dp, layout.replicas) if is_whole or layout.ep > 1 else (),
        is_whole,
        offloads_activations(options.offload),
    )
