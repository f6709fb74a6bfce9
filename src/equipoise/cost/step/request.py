"""What a step is made of, what is asked about it, and what is answered.

Why
    Planner, simulator, benches and ``equipoise simulate`` must mean the same by a step's price.

What it decides
    The nouns. A *stack* says how a training program runs a layout, in facts that its authors
    publish: which attention kernel, what is fused, what is overlapped. *Residuals* say how far
    a whole step falls short of kernels that are measured one by one (clocks under load, host,
    interference); they are fitted on published steps (``bench/published/throughput.py``) and
    are the only numbers here that are.

The interface
    One pure function prices a step; it stands on a higher floor because it replays the very
    pipeline schedule that runs (``equipoise.sim.step``)::

        machine = equipoise.sim.machine.Machine(cluster)    # keeps what it has looked up
        price_step(model, machine, layout, options, *, documents=None) -> StepPrice

    ``StepPrice.step_s`` is the step, ``terms`` adds up to it, ``memory`` is what the fullest
    stage holds and ``fits`` says whether it may.

Kept true (tests/unit/sim/test_step.py)
    Terms add up to the step; options of the wrong size are refused.
"""

from dataclasses import dataclass, field
from typing import Literal

from equipoise.base.arrays import Floats
from equipoise.base.errors import LayoutError, SpecError
from equipoise.spec.device.by_name import THIS_CPU, DeviceSpec
from equipoise.spec.layout import Layout
from equipoise.spec.offload import Offload
from equipoise.spec.run.spec import Recompute

Precision = Literal["bf16", "fp8", "fp32"]


def element_bytes(precision: Precision) -> int:
    """Bytes of an activation, and of a parameter as it is computed with.

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
"""What a micro-batch's passes are made of, in the order of every table of parts."""

PASSES = ("forward", "input", "weight")
"""Rows of a table of parts: forward, gradient of the input, gradient of the weights."""


@dataclass(frozen=True, slots=True)
class Stack:
    """How a training program runs a layout."""

    attention: Literal["flash", "unfused"] = "flash"
    """``unfused`` writes scores to memory, and computes masked ones too."""
    attention_rate: float = 1.0
    """Speed of the attention kernel over the device's measured one, which is its fastest."""
    repeats_keys: bool = False
    """Keys and values are copied for every query head before attention, and travel so."""
    fused: bool = True
    """Neighbouring element-wise operations are one kernel."""
    sequence_parallel: bool = True
    """Norms and residuals are divided over tensor-parallel ranks."""
    tensor_overlap: float = 0.0
    """Share of tensor-parallel traffic that travels beside the products it feeds, 0 to 1."""
    data_overlap: bool = True
    """Gradients and parameters travel beside backward and forward."""
    grad_bytes: int = 4
    """Of a gradient as it is reduced."""
    sum_bytes: float = 8.0
    """Of a weight, moved to add a micro-batch's gradient to the sum of those before: a sum in
    fp32 read and written, or one in 16 bits beside a gradient written apart."""
    rails: float = 1.0
    """Share of a node's network ports that parameters of ZeRO 3 travel over."""
    dropout: bool = False
    """Layers drop out, and keep the masks."""
    offloads_master: bool = True
    """An optimizer in host memory takes fp32 weights along; otherwise its moments alone."""
    logit_bytes: float = 6.0
    """Held of each logit at once: one in 16 bits and one in fp32; 0 where the loss is made in
    chunks."""
    slack_share: float = 0.04
    """What a caching allocator cannot use, as a share of what comes and goes: 2 to 5 percent."""
    split: Literal["exact", "equal"] = "exact"
    """Layers to stages: so that the slowest is fastest, or as many in each."""


@dataclass(frozen=True, slots=True)
class Residuals:
    """What a step takes over what its kernels take one by one; all 1 and 0 is kernels alone."""

    products: float = 1.0
    attention: float = 1.0
    moves: float = 1.0
    traffic: float = 1.0
    step_share: float = 0.0
    """Of the whole step, lost between its parts: host, stragglers, checkpoints of clocks."""


FITTED = Residuals(products=1.13, traffic=1.24)
"""Fitted on 475 published steps of nine sources (``bench/published/throughput.py``, 2026-11-21):
clocks that sink under load, and links that others use. Each source left out in turn, these two move
by at most 0.02 and 0.08."""


def residuals_of(device: DeviceSpec) -> Residuals:
    """Of a device: the fitted ones, but none for this machine.

    Its curves were measured here under a load like a run's, and hold residuals of their own.

    >>> from equipoise.spec.device.by_name import find_device
    >>> residuals_of(find_device("h100-sxm")).products
    1.13
    """
    return Residuals() if device.name == THIS_CPU else FITTED


@dataclass(frozen=True, slots=True)
class StepOptions:
    """Everything about a step that is neither model, cluster nor layout."""

    context_tokens: int
    """Window: tokens of one sequence."""
    step_sequences: int
    """Windows of one step, over all ranks."""
    micro_batch: int = 1
    """Windows of one micro-batch."""
    virtual: int = 1
    """Stages of each pipeline rank."""
    schedule: str = "1f1b"
    """A strategy of ``schedule.pipeline.strategies``."""
    recompute: Recompute = "none"
    offload: Offload = "none"
    precision: Precision = "bf16"
    expert_skew: float = 1.0
    """Rows of the expert rank that has most, over the mean [ratio]."""
    policy: str = "by-work"
    """Of ``balance.packing.pack``, where document lengths are given."""
    sharding: str = "mixed"
    """Of ``balance.context.sharding``: which context rank holds which tokens."""
    context_strategy: str = "needed-kv"
    """Of ``schedule.attention.strategies``: what travels between context ranks."""
    seed: int = 0
    """Of the documents that are drawn."""
    stack: Stack = field(default_factory=Stack)
    residuals: Residuals = FITTED

    def count_micro_batches(self, layout: Layout) -> int:
        """Micro-batches of each data-parallel rank.

        Raises:
            LayoutError: the step's sequences are no whole number of them.

        >>> StepOptions(8192, 2048).count_micro_batches(Layout(dp=64, tp=8, pp=16))
        32
        """
        each = layout.dp * self.micro_batch
        if self.step_sequences % each or self.step_sequences < 1:
            nearest = max(1, round(self.step_sequences / each)) * each
            raise LayoutError(
                f"{self.step_sequences:,} sequences of a step are no whole number of micro-batches "
                f"of {self.micro_batch} on {layout.dp} data-parallel ranks. Nearest: {nearest:,}."
            )
        return self.step_sequences // each

    def require(self) -> None:
        """Refuse numbers that are no sizes.

        Raises:
            SpecError: names the number.
        """
        for name in ("context_tokens", "step_sequences", "micro_batch", "virtual"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name} is {getattr(self, name)}. Give a whole number above 0.")
        if not self.expert_skew >= 1:
            raise SpecError(
                f"expert_skew is {self.expert_skew:g}. Give the rows of the expert rank that has "
                f"most over the mean: 1 is balanced."
            )


@dataclass(frozen=True, slots=True, eq=False)
class StepPrice:
    """A step, priced."""

    step_s: float
    terms: dict[str, float]
    """Of the rank that computes most, in seconds; they add up to ``step_s``."""
    busy_s: Floats
    """Computing, of each stage's rank, float64 [pp]."""
    exposed_s: Floats
    """Waiting for messages that nothing hides, float64 [pp]."""
    bubble_s: Floats
    """Waiting for other stages, float64 [pp]."""
    memory: dict[str, float]
    """Peak of the fullest stage by term [bytes]."""
    memory_bytes: Floats
    """Peak of each stage, float64 [pp]."""
    capacity_bytes: int
    """What tensors may fill."""
    host_bytes: Floats
    """Of host memory, by each stage's rank, float64 [pp]."""
    host_capacity_bytes: int
    """Of host memory, a device's share."""
    tokens: int
    """Of the whole step."""
    useful_flop: float
    """Each causal pair once."""
    published_flop: float
    """Every pair of a window, as Megatron-LM counts."""
    extrapolated: tuple[str, ...]
    """Curves that were read beyond their measured sizes."""

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
        """Memory of a device with which the step would fit: none is enough for a full host."""
        return float(self.memory_bytes.max()) if self.fits_host else float("inf")
