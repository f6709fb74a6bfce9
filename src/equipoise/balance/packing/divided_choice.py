"""Choose the cheapest way to divide a step: the slowest rank's compute plus what travels to it.

What it decides
    Between a policy's own answer, whole documents, and wraps that keep documents whole up to a
    given skew.

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
"""Skews up to which a wrap keeps documents whole."""


Known = Callable[[int | None], tuple[PackedStep, int] | None]
"""A policy's answer under a price, with a lower bound on its time; None if it has none [ns]."""


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
    """The cheapest of a policy's own answers, whole documents, and wraps over neighbours.

    ``known`` yields the policy's own answers; the other arguments are those of
    ``balance.packing.pack.make_packer``.

    Returns:
        The cheapest; ties go to whole documents, then to the wrap with the fewest cuts.

    Raises:
        LayoutError: neither the policy nor any other way has an answer.
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
        if (division := answer(None if best is None else best[0])) is not None:
            offer(*division)
    if best is None:
        raise LayoutError("A policy had no answer, and was given no price to be under.")
    return dataclasses.replace(best[1], policy=policy)
