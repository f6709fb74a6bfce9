"""Every packing policy and every pipeline schedule: a row each, with its traits and its function.

Why
    Whether a policy divides documents, or a schedule goes down the ranks and back up, decides
    something in a dozen rooms. Each of them asks the row, so that one row adds a policy or a
    schedule to run.toml, to every verb and to the search.

What it decides
    Names, traits, and the order in which tables list them; nothing else follows from that order.
    A row names its function as ``"module:function"`` below ``equipoise``; ``base.load`` imports it
    when it is first needed.

Kept true (tests/unit/spec/test_catalog.py)
    Each row's function exists and does what the traits say; run.toml takes these names and no
    others; no other file lists them.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTraits:
    """What a packing policy does with a step's documents."""

    packer: str
    """A ``balance.packing.pack.Packer``; a ``StepPacker`` if the policy lets documents wait."""
    fills_windows: bool = False
    """Micro-batches are windows, whose edges cut documents."""
    cuts_further: bool = False
    """Cuts documents elsewhere than at the windows of ``pack.cut``, so it trains other pieces."""
    reads_prices: bool = True
    """Depends on what a document costs, not only on its length."""
    lets_wait: bool = False
    """Documents may wait for a later step, so each step depends on those before it."""
    divides_over: Literal["ranks", "time"] | None = None
    """Pieces of one document read each other's keys: on ranks that run them together, or in
    consecutive micro-batches of a pipeline."""
    evens_turns: bool = False
    """The packer takes ``meets_each_turn``: whether ranks meet in every micro-batch."""
    prices_travel: bool = False
    """The packer takes ``travel_ns``, the time to bring a token's keys to another rank."""
    is_slow: bool = False
    """Takes a second or more per step, so it runs only if named."""
    planned: Literal["always", "for any", "when given"] = "when given"
    """When ``equipoise plan`` compares it: if no policy is given, since each step then trains the
    same documents, whole; if any policy will do; or only by its name."""

    @property
    def divides(self) -> bool:
        """Whether pieces of one document read each other's keys."""
        return self.divides_over is not None

    @property
    def runs_together(self) -> bool:
        """Whether several ranks run the pieces of a document at the same time."""
        return self.divides_over == "ranks"

    @property
    def needs_pipeline(self) -> bool:
        """Whether the pieces of a document follow each other through a pipeline."""
        return self.divides_over == "time"


POLICIES: dict[str, PolicyTraits] = {
    "in-order": PolicyTraits(
        packer="balance.packing.windows:pack_in_order", fills_windows=True, reads_prices=False
    ),
    "fixed": PolicyTraits(
        packer="balance.packing.windows:pack_fixed", fills_windows=True, cuts_further=True
    ),
    "fixed-exact": PolicyTraits(
        packer="balance.packing.windows:pack_fixed_exact",
        fills_windows=True,
        cuts_further=True,
        is_slow=True,
    ),
    "by-tokens": PolicyTraits(
        packer="balance.packing.whole:pack_by_tokens", reads_prices=False, planned="always"
    ),
    "by-work": PolicyTraits(
        packer="balance.packing.whole:pack_by_work", evens_turns=True, planned="always"
    ),
    "delayed": PolicyTraits(packer="balance.packing.delayed:DelayedPacker", lets_wait=True),
    "divided": PolicyTraits(
        packer="balance.packing.divided:pack_divided",
        divides_over="ranks",
        evens_turns=True,
        prices_travel=True,
        planned="for any",
    ),
    "divided-in-time": PolicyTraits(
        packer="balance.packing.divided:pack_divided_in_time",
        divides_over="time",
        planned="for any",
    ),
    "gangs": PolicyTraits(
        packer="balance.groups.packs:pack_gangs",
        divides_over="ranks",
        evens_turns=True,
        prices_travel=True,
        planned="for any",
    ),
    "flexsp": PolicyTraits(
        packer="balance.groups.packs:pack_flexsp", divides_over="ranks", is_slow=True
    ),
    "bytescale": PolicyTraits(
        packer="balance.groups.packs:pack_bytescale", divides_over="ranks", planned="for any"
    ),
}
"""Every packing policy by name, in the order in which tables list them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleTraits:
    """In which order the ranks of a pipeline run a step's micro-batches."""

    writer: str
    """A ``schedule.pipeline.request.PipelineStrategy``."""
    least_stages: int = 1
    """Stages per rank that it is made for; a run's default."""
    most_stages: int | None = None
    """Most stages per rank; None for any number."""
    in_v: bool = False
    """Stages go down the ranks and back up, two per rank."""
    splits_backward: bool = True
    """Input and weight gradients are instructions of their own."""
    batches_per_rank: int = 0
    """Fewest micro-batches of a step, per rank."""
    runs_slices: bool = False
    """Runs backwards in the reverse order of forwards if micro-batches share a document."""
    is_lossy: bool = False
    """Trains another model: micro-batches leave stages out."""
    adapts: bool = False
    """Fits any memory bound that holds the largest micro-batch."""
    ahead: int = 0
    """Forwards that a rank runs ahead per later rank; 0 if it follows another rule."""
    order: str | None = None
    """If ``ahead`` is 0: the function that writes forwards and input gradients without prices."""
    planned: Literal["always", "when given", "never"] = "never"
    """Whether ``equipoise plan`` chooses it."""
    is_common: bool = False
    """A search looks here first."""
    torchtitan: str | None = None
    """Its name in torchtitan; None if torchtitan lacks it."""
    megatron: str | None = None
    """Likewise in Megatron-LM, which tells it by other flags: an empty name."""

    @property
    def is_plain(self) -> bool:
        """Whether it has one stage a rank and whole backwards: no bubble is less than 1F1B's."""
        return self.most_stages == 1 and not self.splits_backward

    @property
    def is_interleaved(self) -> bool:
        """Whether a rank has two stages or more, any number of them."""
        return self.least_stages > 1 and self.most_stages is None


SCHEDULES: dict[str, ScheduleTraits] = {
    "gpipe": ScheduleTraits(
        writer="schedule.pipeline.orders:gpipe", splits_backward=False, runs_slices=True
    ),
    "1f1b": ScheduleTraits(
        writer="schedule.pipeline.orders:one_forward_one_backward",
        most_stages=1,
        splits_backward=False,
        runs_slices=True,
        ahead=1,
        planned="always",
        is_common=True,
        torchtitan="1F1B",
        megatron="",
    ),
    "interleaved": ScheduleTraits(
        writer="schedule.pipeline.orders:interleaved",
        least_stages=2,
        splits_backward=False,
        ahead=2,
        planned="always",
        is_common=True,
        torchtitan="Interleaved1F1B",
        megatron="",
    ),
    "zb-h1": ScheduleTraits(
        writer="schedule.pipeline.zero_bubble:zb_h1", most_stages=1, ahead=1, planned="always"
    ),
    "zb-h2": ScheduleTraits(
        writer="schedule.pipeline.zero_bubble:zb_h2", most_stages=1, ahead=2, planned="always"
    ),
    "interleaved-zb": ScheduleTraits(
        writer="schedule.pipeline.zero_bubble:interleaved_zb",
        least_stages=2,
        ahead=1,
        planned="always",
        is_common=True,
        torchtitan="InterleavedZeroBubble",
    ),
    "zb-v": ScheduleTraits(
        writer="schedule.pipeline.v:zb_v",
        least_stages=2,
        most_stages=2,
        in_v=True,
        order="schedule.pipeline.v:order_zb_v",
        planned="always",
        torchtitan="ZBVZeroBubble",
    ),
    "dualpipe-v": ScheduleTraits(
        writer="schedule.pipeline.v:dualpipe_v",
        least_stages=2,
        most_stages=2,
        in_v=True,
        batches_per_rank=2,
        order="schedule.pipeline.v:dualpipe_v",
        planned="always",
        torchtitan="DualPipeV",
    ),
    "v-half": ScheduleTraits(
        writer="schedule.pipeline.v:v_half",
        least_stages=2,
        most_stages=2,
        in_v=True,
        planned="when given",
    ),
    "v-min": ScheduleTraits(
        writer="schedule.pipeline.v:v_min",
        least_stages=2,
        most_stages=2,
        in_v=True,
        planned="when given",
    ),
    "auto": ScheduleTraits(writer="schedule.pipeline.auto:auto", runs_slices=True, adapts=True),
    "skip-partial": ScheduleTraits(
        writer="schedule.pipeline.skip:skip_partial", is_lossy=True, adapts=True
    ),
    "skip-reordered": ScheduleTraits(
        writer="schedule.pipeline.skip:skip_reordered", is_lossy=True, adapts=True
    ),
}
"""Every pipeline schedule by name, in the order in which tables list them."""

LOSSY = tuple(name for name, traits in SCHEDULES.items() if traits.is_lossy)
"""Schedules that train another model, for the sentences that name them."""

if TYPE_CHECKING:  # a type checker cannot read names off a table; run.toml's reader can
    Policy: TypeAlias = str
    Schedule: TypeAlias = str
else:
    Policy = Literal[tuple(POLICIES)]
    Schedule = Literal[tuple(SCHEDULES)]
