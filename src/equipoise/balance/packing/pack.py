"""Packing policies: one step's pieces in, every rank's micro-batches out.

Why
    Ranks meet at the end of each step. A pack of equal token counts is a pack of unequal
    work: one document of 8,192 tokens has 32 times the attention of 32 documents of 256.

What it decides
    How a run calls the function that ``spec.catalog`` names for its policy: ``windows`` fills
    fixed windows, ``whole`` keeps documents whole under a token cap, ``delayed`` lets outliers
    wait, ``divided`` and ``balance.groups`` share them out.

    With ``cut = "windows"`` every policy gets the same pieces as in-order, so that two policies
    differ only in who computes what: equal gradients, different times.

Kept true (tests/unit/balance/packing/test_pack.py, by Hypothesis)
    Each token of the step is in exactly one piece; no micro-batch is over its cap; pieces are
    whole where the policy says so; the answer depends on the arguments alone, so ranks need
    not ask each other.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np

from equipoise.balance.packing.windows import cut_at_windows
from equipoise.base.load import load
from equipoise.cost.curve import LoadCurve
from equipoise.spec.catalog import POLICIES
from equipoise.spec.pack import MicroBatch, PackedStep, Pieces
from equipoise.spec.run.spec import PackSpec

Packer = Callable[[Pieces, PackSpec, int, LoadCurve], PackedStep]
"""From a step's pieces, the wishes, the data-parallel ranks and a price curve to a pack."""


class StepPacker(Protocol):
    """Packs a run's steps one after the other, the same on every rank."""

    def step(self, pieces: Pieces) -> PackedStep:
        """Pack one step's pieces, and what earlier steps left over."""

    def flush(self) -> list[PackedStep]:
        """Pack what is left over."""

    def state_dict(self) -> dict[str, Any]:
        """What is left over; plain data for a checkpoint."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a ``state_dict``."""


class _OneByOne:
    """The packer of policies that leave nothing for later steps."""

    def __init__(
        self, packer: Packer, pack: PackSpec, ranks: int, curve: LoadCurve, *, idles: bool
    ) -> None:
        self._packer, self._pack, self._ranks, self._curve = packer, pack, ranks, curve
        traits = POLICIES[pack.policy]
        self._idles = idles and not (traits.divides or traits.fills_windows)

    def step(self, pieces: Pieces) -> PackedStep:
        some = min(self._ranks, len(pieces)) if self._idles else self._ranks
        if self._idles and not some:
            return with_idle(PackedStep(self._pack.policy, ()), self._ranks)
        packed = self._packer(pieces, self._pack, some, self._curve)
        return packed if some == self._ranks else with_idle(packed, self._ranks)

    def flush(self) -> list[PackedStep]:
        return []

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state


def with_idle(packed: PackedStep, ranks: int) -> PackedStep:
    """The step on more ranks, whose micro-batches have no tokens."""
    turns = max(map(len, packed.ranks), default=1)
    nothing = (MicroBatch(np.zeros((0, 3), dtype=np.int64)),) * turns
    idle = (nothing for _ in range(ranks - len(packed.ranks)))
    return PackedStep(packed.policy, (*packed.ranks, *idle))


class _CutAtWindows:
    """Cuts each step at window edges before another packer sees it."""

    def __init__(self, inner: StepPacker, context_tokens: int) -> None:
        self._inner, self._context_tokens = inner, context_tokens
        self.flush, self.state_dict = inner.flush, inner.state_dict
        self.load_state_dict = inner.load_state_dict

    def step(self, pieces: Pieces) -> PackedStep:
        return self._inner.step(cut_at_windows(pieces, self._context_tokens))


def make_packer(
    pack: PackSpec,
    ranks: int,
    curve: LoadCurve,
    *,
    meets_each_turn: bool = False,
    travel_ns: float | None = None,
    idles: bool = False,
) -> StepPacker:
    """The packer of a run.

    Args:
        pack: Policy, windows and caps.
        ranks: Data-parallel ranks.
        curve: Price of a document in seconds, the same on every rank.
        meets_each_turn: Ranks wait for each other in every micro-batch, as
            ``Layout.meets_each_turn`` says of a layout; policies that can then even out each turn.
        travel_ns: To bring one token's keys and values to another rank, for policies that price
            it; ``divided_price.TRAVEL_SHARE`` of its linear layers unless given [ns].
        idles: Whether ranks stay idle in a step of fewer documents than ranks, where documents are
            packed whole; without it, such a step is a ``LayoutError``.
    """
    traits = POLICIES[pack.policy]
    packs = load(traits.packer)
    more: dict[str, Any] = {"meets_each_turn": meets_each_turn} if traits.evens_turns else {}
    more |= {"travel_ns": travel_ns} if traits.prices_travel else {}
    packer: StepPacker = (
        packs(pack, ranks, curve)
        if traits.lets_wait
        else _OneByOne(partial(packs, **more), pack, ranks, curve, idles=idles)
    )
    return _CutAtWindows(packer, pack.context_tokens) if pack.cut == "windows" else packer


def pack_step(
    pieces: Pieces,
    pack: PackSpec,
    ranks: int,
    curve: LoadCurve,
    *,
    meets_each_turn: bool = False,
    travel_ns: float | None = None,
) -> PackedStep:
    """Pack one step's pieces by the policy of ``pack``, cut where ``pack.cut`` says.

    Under ``delayed`` nothing has waited before it, and what it lets wait is not in the answer.

    Args:
        pieces: int64 [n, 3] of (document, start, stop); n >= 1.
        pack: Policy, window and caps.
        ranks: Data-parallel ranks.
        curve: Price of a document in seconds, the same on every rank.
        meets_each_turn: As in ``make_packer``.
        travel_ns: As in ``make_packer``.

    Raises:
        LayoutError: fewer documents than ranks, or a document over the cap.
    """
    packer = make_packer(pack, ranks, curve, meets_each_turn=meets_each_turn, travel_ns=travel_ns)
    return packer.step(pieces)


def batch_ns(batch: MicroBatch, curve: LoadCurve) -> int:
    """Predicted compute of a micro-batch's pieces, with what they read in others [ns]."""
    if not len(batch.pieces):
        return 0
    history = batch.history_tokens
    loads = curve.slice_ns(history, history + batch.doc_tokens)
    return int((loads - curve.saved_ns(batch.pieces)).sum())


def rank_seconds(packed: PackedStep, curve: LoadCurve) -> list[float]:
    """Predicted compute of each rank: forward and backward of its micro-batches [s]."""
    return [
        sum(curve.fixed_ns + batch_ns(batch, curve) for batch in rank) * 1e-9
        for rank in packed.ranks
    ]


def turns_seconds(packed: PackedStep, curve: LoadCurve) -> float:
    """Sum of each turn's slowest micro-batch: compute of ranks that meet in each turn [s].

    >>> import numpy as np
    >>> from equipoise.cost.curve import break_even_curve
    >>> long, short = (MicroBatch(np.array([[0, 0, tokens]])) for tokens in (9, 1))
    >>> packed = PackedStep("by-work", ((long, short), (short, long)))
    >>> curve = break_even_curve(float("inf"))
    >>> round(turns_seconds(packed, curve) / max(rank_seconds(packed, curve)), 3)
    1.8
    """
    return 1e-9 * sum(
        curve.fixed_ns + max(batch_ns(batch, curve) for batch in turn if batch is not None)
        for turn in itertools.zip_longest(*packed.ranks)
    )


def skew(loads: list[float]) -> float:
    """Maximum over mean: 1.0 is perfect balance.

    >>> skew([3.0, 1.0])
    1.5
    """
    mean = sum(loads) / len(loads)
    return max(loads) / mean if mean else 1.0
