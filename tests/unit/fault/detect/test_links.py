"""Which links are called slow, by what they carry while they have something to carry."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping

from equipoise.fault.detect.links import SlowLink, SlowLinks
from equipoise.observe.links import LinkTotals

Pair = tuple[int, int]
FAST, MOVED = 900e6, 9e6
"""Bytes a second while busy, and bytes in each look."""


def watch(
    ranks: int,
    rate: Callable[[Pair, int], float],
    *,
    looks: int = 40,
    moved: Callable[[Pair], float] = lambda _: MOVED,
    resent: int = 0,
    delayed: float = 0.0,
    sampled: Callable[[Pair, int], float] | None = None,
) -> list[tuple[int, SlowLink]]:
    """Verdicts with the number of their look, of links that each have a rate in each look.

    For a share of the time, ``delayed``, threads of both ranks of a link have no core.
    """
    slow, said, delivered = SlowLinks(), [], sampled or rate
    totals = dict.fromkeys(itertools.permutations(range(ranks), 2), LinkTotals())
    for look in range(looks):
        waited_s = 0.5 * look * delayed
        for pair, before in totals.items():
            busy_s = moved(pair) / rate(pair, look)
            one = LinkTotals(int(moved(pair)), busy_s, resent)
            totals[pair] = dataclasses.replace(
                before + one,
                delivery_rate=delivered(pair, look),
                delays_s=(waited_s, waited_s),
            )
        said += [(look, each) for each in slow.learn(0.5 * look, totals)]
    return said


def only(slow: Mapping[Pair, float], since: int = 0, until: int = 99):
    return lambda pair, look: slow.get(pair, FAST) if since <= look < until else FAST


def test_a_cell_is_the_link_and_no_rank() -> None:
    said = watch(3, only({(1, 0): 20e6}), resent=2)
    assert len(said) == 1
    ((look, verdict),) = said
    assert (verdict.source, verdict.target, verdict.whole) == (1, 0, "")
    assert look <= 4
    assert verdict.sentence == (
        "The link from rank 1 to rank 0 is slow: it carries 19.1 MiB/s while it has bytes to "
        "carry, where 858.3 MiB/s are expected, and 2 packets had to be sent again. No rank is "
        "slow by that; look at the network between their hosts."
    )


def test_a_row_and_a_column_are_named_once() -> None:
    row = {(1, 0): 20e6, (1, 2): 20e6}
    ((_, verdict),) = watch(3, only(row, since=9))
    assert (verdict.whole, verdict.source) == ("row", 1)
    assert verdict.sentence.startswith("All links from rank 1 are slow: the one to rank ")
    column = {(0, 2): 20e6, (1, 2): 20e6}
    ((_, verdict),) = watch(3, only(column, since=9))
    assert (verdict.whole, verdict.target) == ("column", 2)
    assert verdict.sentence.startswith("All links to rank 2 are slow: the one from rank ")


def test_of_two_ranks_the_other_direction_or_the_past_says_it() -> None:
    ((_, verdict),) = watch(2, only({(0, 1): 20e6}))
    assert (verdict.source, verdict.target) == (0, 1)
    both = watch(2, only({(0, 1): 20e6, (1, 0): 20e6}, since=12))
    assert {(each.source, each.target) for _, each in both} == {(0, 1), (1, 0)}
    assert all(12 < look < 17 for look, _ in both)
    assert not watch(2, only({(0, 1): 20e6, (1, 0): 20e6}))  # nothing better is known


def test_a_link_that_recovers_is_cleared() -> None:
    (_, slow), (look, over) = watch(3, only({(2, 1): 20e6}, since=8, until=20))
    assert not slow.is_over and over.is_over
    assert 20 <= look <= 24
    assert over.sentence == (
        "The link from rank 2 to rank 1 is as fast as it should be again: 858.3 MiB/s while it has "
        "bytes to carry."
    )


def test_what_carries_less_is_not_slow_and_neither_is_what_hardly_carries() -> None:
    small = {(0, 1), (1, 0)}
    of_stages = watch(
        3,
        lambda pair, _: 50e6 if pair in small else FAST,
        moved=lambda pair: MOVED / 9 if pair in small else MOVED,
    )
    assert not of_stages  # single messages take their time, and bulk says nothing about them
    idle = watch(3, only({(0, 1): 200e6}), moved=lambda _: MOVED / 3)
    assert not idle  # it is busy for a thirtieth of the time


def test_closed_connections_and_missing_ones_do_no_harm() -> None:
    slow = SlowLinks()
    for look, sent in enumerate([9e6, 18e6, 1e6, 9e6, 19e6, 29e6, 39e6]):
        assert not slow.learn(look, {(0, 1): LinkTotals(int(sent), sent / FAST)})
    assert not slow.learn(9.0, {})


def test_what_load_explains_is_nobodys_link() -> None:
    """Messages wait for a core of their receiver, on some links longer than on others."""
    unlucky = {(1, 2): 45e6, (0, 2): 60e6, (2, 1): 140e6}  # busy for 40, 30 and 13% of the time
    assert not watch(3, only(unlucky), delayed=0.5)
    assert [each.source for _, each in watch(3, only({(1, 2): 45e6}))] == [1]  # on an idle host


def test_load_does_not_hide_a_slow_link() -> None:
    loaded = {(1, 0): 20e6, (1, 2): 90e6, (0, 2): 120e6, (2, 1): 140e6}
    ((look, verdict),) = watch(3, only(loaded), delayed=0.9)
    assert (verdict.source, verdict.target) == (1, 0)
    assert 8 <= look <= 11  # it takes longer than without load


def test_what_is_acknowledged_late_is_not_slow() -> None:
    """Where nothing is sent back a message is acknowledged 40 ms late, on a link as fast as any."""
    assert not watch(2, only({(0, 1): 45e6}), sampled=lambda *_: FAST)
    assert not watch(2, only({(0, 1): 45e6}), sampled=lambda *_: 0.0)


def test_ticks_of_the_kernel_are_no_rates() -> None:
    """A link that was busy for less than a tick has no rate that another could be held against."""
    lucky = {(0, 1): 1e15, (0, 2): 1e15, (2, 0): 1e15, (2, 1): 1e15}
    assert not watch(3, lambda pair, _: lucky.get(pair, 400e6))


def test_a_link_that_stays_slow_is_named_once_though_the_others_become_slow() -> None:
    def rate(pair: Pair, look: int) -> float:
        return 20e6 if pair == (1, 0) else FAST if look < 20 or look > 30 else 25e6

    ((_, verdict),) = watch(3, rate, delayed=0.7)
    assert (verdict.source, verdict.target) == (1, 0)
