"""Which layout each policy runs in on the same devices, and what makes it fit.

Why
    A layout of four axes leaves nothing to a policy that divides documents over ranks: what
    context and pipeline ranks do for long documents, it does itself. Priced where it cannot run, it
    would lose by a refusal.

What it decides
    ``tp``, ``ep``, ZeRO and recomputation stay as given. Policies that divide documents over ranks
    get context and pipeline ranks as data ranks; those that divide over time get the context
    ranks, and one stage on each pipeline rank. A micro-batch of divided documents holds up to a
    quarter or an eighth more than an even share of a step, or than a half, a third or a quarter of
    one: smaller micro-batches keep fewer activations, and cost less than computing them again. One
    of whole documents holds up to a quarter more than a window; slices in time are a half, a
    quarter or an eighth of a window.

    Where a setting does not fit the devices, more ZeRO is tried, and if none is enough, under each
    stage of it the least recomputation that fits; the fastest stands, and the answer names it.

Kept true (tests/unit/sim/test_policies.py)
    Every setting has all devices, and the given ``tp``; recomputation comes after ZeRO alone.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from equipoise.base.errors import LayoutError, SpecError
from equipoise.base.nearest import nearest
from equipoise.cost.step.request import StepOptions
from equipoise.spec.catalog import POLICIES, SCHEDULES
from equipoise.spec.layout import Layout
from equipoise.spec.run.spec import Recompute

PLAIN = "plain"
"""The baseline: windows filled in order, or whole documents by tokens, each micro-batch cut in
chunks from both its ends, whose ranks gather all keys unless something else is asked for."""

Cut = Literal["windows", "documents"]
"""Where the pieces of all policies are cut: at every window's edge, or only longer documents."""

_SLICES = (2, 4, 8)
"""Parts of a window that a slice in time may be."""

_TURNS = (1, 2, 3, 4)
"""Micro-batches that a rank's share of a step may be, where documents are divided over ranks."""

_SLACK = (4, 8)
"""Parts of an even share of which a micro-batch may hold one more; the less, the less memory."""

_ZERO: tuple[Literal[2, 3], ...] = (2, 3)
_RECOMPUTE: tuple[Recompute, ...] = (
    "attention",
    "every-4",
    "every-3",
    "every-2",
    "selective",
    "full",
)


@dataclass(frozen=True, slots=True)
class PolicySetting:
    """One way to run a policy."""

    name: str
    """The policy, or ``plain``."""
    layout: Layout
    options: StepOptions
    max_tokens: int | None
    """Most tokens of a micro-batch; None: a quarter more than a window."""
    change: str = ""
    """What was changed so that it fits, as a command line has it."""

    @property
    def computes_again(self) -> bool:
        """Whether activations are computed again."""
        return self.options.recompute != "none"

    @property
    def policy(self) -> str:
        """``pack.policy``."""
        return self.options.policy

    @property
    def words(self) -> str:
        """The layout as ``--layout`` takes it."""
        layout = self.layout
        degrees = {name: getattr(layout, name) for name in ("tp", "cp", "pp", "dp", "ep", "etp")}
        degrees |= {"virtual": self.options.virtual}
        shown = [f"{name}={degree}" for name, degree in degrees.items() if degree > 1]
        return ",".join([*shown, f"zero={layout.zero}"])


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """What all policies of a comparison share beside the step."""

    cut: Cut = "windows"
    max_tokens: int | None = None
    """Most tokens that a rank may hold of a micro-batch; None: a quarter more than an even share
    where documents are divided, or than a window."""
    context_strategy: str | None = None
    """What travels between context ranks of ``plain``; None: all keys are gathered."""


def require_comparable(policies: list[str], layout: Layout, cut: Cut) -> None:
    """Refuse policies that cannot be compared on equal content.

    Raises:
        SpecError: an unknown policy, one named twice, or one that trains other pieces.
        LayoutError: slices in time without a pipeline.
    """
    for name in policies:
        if name not in POLICIES:
            raise SpecError(
                f'policy: "{name}" is not one of {", ".join(POLICIES)}. Nearest: '
                f'"{nearest(name, POLICIES)}".'
            )
        if POLICIES[name].cuts_further:
            raise SpecError(
                f"policy {name} cuts documents elsewhere than at windows, so it trains other "
                f"pieces and cannot be compared on equal content. Leave it out."
            )
        if POLICIES[name].fills_windows and cut == "documents":
            raise SpecError(
                f"policy {name} cuts documents at every window's edge, and cut = documents keeps "
                f"them whole. Give cut = windows, or leave it out."
            )
        if POLICIES[name].needs_pipeline and layout.pp == 1:
            raise LayoutError(
                f"policy {name} puts slices of a document into consecutive micro-batches of a "
                f"pipeline, and the layout has pp = 1. Give a layout with pp of 2 or more, or "
                f"leave it out."
            )
    if twice := sorted({name for name in policies if policies.count(name) > 1}):
        raise SpecError(f"policy {twice[0]} is named twice. Name each policy once.")


def settings_of(
    name: str, layout: Layout, options: StepOptions, how: CompareOptions
) -> list[PolicySetting]:
    """The settings of a policy among which the fastest that fits is taken.

    Args:
        name: A policy, or ``plain``.
        layout: As given for policies of whole documents.
        options: Likewise.
        how: Caps and cuts.

    >>> options, how = StepOptions(4096, 8), CompareOptions()
    >>> settings = settings_of("gangs", Layout(tp=2, cp=2, pp=2), options, how)
    >>> settings[0].words, [each.max_tokens for each in settings]
    ('tp=2,dp=4,zero=1', [5120, 4608, 2560, 2304, 1707, 1536, 1280, 1152])
    """
    if name == PLAIN:
        plain = dataclasses.replace(
            options,
            policy="in-order" if how.cut == "windows" else "by-tokens",
            sharding="head-tail",
            context_strategy=how.context_strategy or "all-gather",
        )
        return [PolicySetting(PLAIN, layout, plain, _of_context(layout, how))]
    mine = dataclasses.replace(options, policy=name)
    traits = POLICIES[name]
    if traits.runs_together:
        wide = dataclasses.replace(layout, dp=layout.dp * layout.cp * layout.pp, cp=1, pp=1)
        mine = _plain_schedule(mine)
        if how.max_tokens is not None or traits.is_slow:
            return [PolicySetting(name, wide, mine, _cap(wide, mine, how))]
        return [
            PolicySetting(name, wide, mine, share_tokens(wide, mine, turns, slack))
            for turns in _TURNS
            for slack in _SLACK
        ]
    if traits.needs_pipeline:
        beside = dataclasses.replace(layout, dp=layout.dp * layout.cp, cp=1)
        window = options.context_tokens * options.micro_batch
        least = _cap(beside, mine, how)
        return [
            PolicySetting(name, beside, _plain_schedule(mine), cap)
            for cap in (max(2, min(window, least) // each) for each in _SLICES)
        ]
    return [PolicySetting(name, layout, mine, _of_context(layout, how))]


def _of_context(layout: Layout, how: CompareOptions) -> int | None:
    """Most tokens of a micro-batch that context ranks share."""
    return None if how.max_tokens is None else how.max_tokens * layout.cp


def _cap(layout: Layout, options: StepOptions, how: CompareOptions) -> int:
    """Most tokens of a micro-batch of divided documents."""
    return how.max_tokens or share_tokens(layout, options)


def share_tokens(layout: Layout, options: StepOptions, turns: int = 1, slack: int = 4) -> int:
    """A quarter more than a rank's even share of a step, or than a window if that is less.

    Args:
        layout: Degrees.
        options: Of the step.
        turns: Micro-batches that the share is divided into.
        slack: Which part of it a micro-batch may hold in addition: 4 for a quarter.
    """
    step = options.context_tokens * options.step_sequences
    window = options.context_tokens * options.micro_batch
    share = -(-min(window, -(-step // layout.dp)) // turns)
    return max(2, share + share // slack)


def fitting(setting: PolicySetting) -> list[list[PolicySetting]]:
    """Changes that need less memory than the setting: rows, each from the least change to the most.

    The first row divides more of the weights' states; the others compute activations again, each
    under a ZeRO stage of its own.
    """
    layout, options = setting.layout, setting.options
    wider = [
        dataclasses.replace(
            setting, layout=dataclasses.replace(layout, zero=zero), change=f"zero={zero}"
        )
        for zero in _ZERO
        if layout.zero_ranks > 1 and zero > layout.zero and (layout.pp == 1 or zero == 2)
    ]
    if options.recompute != "none":
        return [wider]
    again = [
        [
            dataclasses.replace(
                each,
                options=dataclasses.replace(options, recompute=recompute),
                change=f"{each.change} --recompute {recompute}".strip(),
            )
            for recompute in _RECOMPUTE
        ]
        for each in (setting, *wider)
    ]
    return [wider, *again]


def _plain_schedule(options: StepOptions) -> StepOptions:
    """One stage a rank, in an order that runs slices, and needed keys alone."""
    schedule = options.schedule if SCHEDULES[options.schedule].runs_slices else "1f1b"
    return dataclasses.replace(options, virtual=1, schedule=schedule)
