"""The cheapest way to divide a step, by the price of its slowest rank and of what travels to it.

What it decides
    Between what a policy made of the step, its documents whole, and wraps of them that keep
    documents whole up to some unevenness.

Kept true (tests/unit/balance/packing/test_divided_choice.py, by Hypothesis)
    No candidate is cheaper than the answer; the answer depends on the arguments alone.
"""

import dataclasses
from collections.abc import Callable, Sequence

from equipoise.balance.packing.divided_price import price_ns, travel_ns_of
from equipoise.balance.packing.divided_wrap import Wrap
from equipoise.balance.packing.whole import pack_by_work
from equipoise.base.errors import LayoutError
from equipoise.cost.curve import LoadCurve
from equipoise.spec.pack import PackedStep, Pieces, lengths_of
from equipoise.spec.run.spec import PackSpec

_EVEN = (1.03, 1.01, 1.002, 1.0)
"""Heaviest over mean up to which a wrap keeps documents whole."""


Known = Callable[[int | None], tuple[PackedStep, int] | None]
"""A policy's own answer and the least time that it takes, or None where it is over a price [ns]."""


def cheapest_division(
    policy: str,
    known: Sequence[Known],
    pieces: Pieces,
    pack: PackSpec,
    ranks: int,
    curve: LoadCurve,
    *,
    travel_ns: float | None,
    meets_each_turn: bool,
) -> PackedStep:
    """The cheapest of a policy's own answers, documents whole, and wraps over neighbours.

    Args:
        policy: Name of the answer.
        known: The policy's own answers.
        pieces: The step's.
        pack: Windows and caps.
        ranks: Data-parallel ranks.
        curve: Price of a document.
        travel_ns: To bring one token's keys and values to a rank; a default unless given [ns].
        meets_each_turn: Ranks wait for each other in every micro-batch.

    Returns:
        Of equal prices whole documents, then the wrap with the fewest cuts.

    Raises:
        LayoutError: the policy finds no answer, and there is no other.
    """
    sizes, cap = lengths_of(pieces), pack.most_tokens
    each_ns = travel_ns_of(curve, travel_ns)
    best: tuple[int, PackedStep] | None = None

    def offer(packed: PackedStep | None, least_ns: int = 0) -> None:
        nonlocal best
        if packed is None:
            return
        price = price_ns(packed, curve, travel_ns=each_ns, meets_each_turn=meets_each_turn)
        if best is None or max(price, least_ns) < best[0]:
            best = max(price, least_ns), packed

    if len(sizes) >= ranks and int(sizes.max()) <= cap:
        offer(pack_by_work(pieces, pack, ranks, curve, meets_each_turn=meets_each_turn))
    if ranks > 1:
        turns = -(-int(sizes.sum()) // (ranks * pack.context_tokens))
        wrap = Wrap(pieces, ranks, turns, cap, curve)
        for even in _EVEN:
            offer(wrap.cut(policy, even))
    for answer in known:
        if (found := answer(None if best is None else best[0])) is not None:
            offer(*found)
    if best is None:
        raise LayoutError("A policy had no answer, and was given no price to be under.")
    return dataclasses.replace(best[1], policy=policy)
