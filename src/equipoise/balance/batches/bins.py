"""Items with several costs into bins: heaviest first, then exchanges. Loops that can be compiled.

Why
    ``balance.partition`` evens out one cost. A sample of images and text has two, with a barrier
    between them, and a trainer that packs in front of every step has three milliseconds.

What it decides
    The bin of each item, under limits on each bin's sizes. With costs ``p`` and a barrier after
    each, a step takes ``sum over p of (the heaviest bin in p)``; that sum is what exchanges
    lower. Ties go to the first bin and the first item, so every rank finds the same answer.

Kept true (tests/unit/balance/batches/test_bins.py, by Hypothesis)
    Every item has one bin; no limit is exceeded; exchanges never make the sum larger, and empty
    no bin; compiled and in Python the answer is the same.

Sources
    LPT: R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969. Shelves as high as
    their first item: Coffman, Garey, Johnson and Tarjan, "Performance bounds for level-oriented
    two-dimensional packing algorithms", 1980.
"""

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.schedule.compiled import Numbers, run_loop

_SCALE = 1 << 20
"""A bin's mean cost while bins are filled, so that seconds of several phases compare."""

_PARTNERS = 4
"""Lightest bins with which the heaviest one tries an exchange."""

_TRIES = 400_000
"""Exchanges that one call weighs at most; counted, so that all ranks stop alike."""


def into_bins(loads: Ints, sizes: Ints, limits: Ints, bins: int) -> Ints | None:
    """Give each item a bin so that the sum over costs of the heaviest bin is small.

    Args:
        loads: What is evened out, int64 [items, costs]; each >= 0, their sum below 2**62.
        sizes: What is limited, int64 [items, limits].
        limits: Most of each size in one bin, int64 [limits].
        bins: Number of bins, >= 1.

    Returns:
        The bin of each item, int64 [items]; None if placing finds no room for one. If there are
        at least as many items as bins and no limit binds, no bin is empty.

    Cost: O(items x bins x costs).

    >>> loads = np.array([[4, 0], [0, 4], [2, 2], [2, 2]])
    >>> into_bins(loads, loads[:, :1], np.array([99]), 2).tolist()
    [1, 1, 0, 0]
    """
    bin_of = place(loads, sizes, limits, bins)
    if bin_of is not None:
        exchange(loads, sizes, limits, bin_of, bins)
    return bin_of


def place(loads: Ints, sizes: Ints, limits: Ints, bins: int) -> Ints | None:
    """``into_bins`` without exchanges: heaviest first, each into the lightest bin with room."""
    scaled = loads
    if loads.shape[1] > 1:
        scaled = (loads * (_SCALE / np.maximum(loads.sum(0) / bins, 1))).astype(np.int64)
    order = heaviest_first(scaled)
    bin_of = np.zeros(len(loads), dtype=np.int64)
    failed = run_loop(
        fill_loop,
        scaled.size * bins,
        *_flat([len(loads), bins, scaled.shape[1], sizes.shape[1]], order, scaled, sizes, limits),
        np.zeros(bins * scaled.shape[1], dtype=np.int64),
        np.zeros(bins * sizes.shape[1], dtype=np.int64),
        bin_of,
    )
    return None if failed else bin_of


def heaviest_first(loads: Ints) -> Ints:
    """Items in falling order of their largest cost, then of their sum, then by index."""
    return np.lexsort((-loads.sum(1), -loads.max(1)))


def exchange(loads: Ints, sizes: Ints, limits: Ints, bin_of: Ints, bins: int) -> None:
    """Move or swap items out of the heaviest bin while that lowers the sum; in place."""
    if bins < 2 or len(loads) < 2:
        return
    phases, kinds = loads.shape[1], sizes.shape[1]
    load = np.zeros((bins, phases), dtype=np.int64)
    np.add.at(load, bin_of, loads)
    floor = np.maximum(-(-loads.sum(0) // bins), loads.max(0))
    if int(load.max(0).sum()) * 10_000 <= int(floor.sum()) * 10_001:
        return
    used = np.zeros((bins, kinds), dtype=np.int64)
    np.add.at(used, bin_of, sizes)
    run_loop(
        exchange_loop,
        16 * len(loads),
        *_flat([len(loads), bins, phases, kinds, _TRIES, _PARTNERS], loads, sizes, limits, floor),
        *_flat(load, used),
        bin_of,
        *np.full((3, max(len(loads), bins, 3 * phases, _PARTNERS)), -1, dtype=np.int64),
    )


def shelve(loads: Ints, sizes: Ints, limits: Ints, ranks: int, turns: int) -> tuple[Ints, int]:
    """Fill turns as high as their heaviest item, while one stands out of what is left.

    Args:
        loads: Cost of each item, int64 [items].
        sizes: What is limited, int64 [items, limits].
        limits: Most of each size in one micro-batch.
        ranks: Micro-batches of a turn.
        turns: Number of turns.

    Returns:
        The micro-batch of each item that was placed, ``turn x ranks + rank``, -1 for the others;
        and how many turns were filled, below ``turns``.

    >>> loads = np.array([9, 9, 1, 1])
    >>> shelve(loads, loads[:, None], np.array([99]), ranks=2, turns=2)[0].tolist()
    [0, 1, -1, -1]
    """
    cell_of = np.full(len(loads), -1, dtype=np.int64)
    filled = run_loop(
        shelve_loop,
        len(loads) * ranks,
        *_flat([len(loads), ranks, turns, sizes.shape[1]], np.argsort(-loads, kind="stable")),
        *_flat(loads, sizes, limits),
        np.zeros(ranks, dtype=np.int64),
        np.zeros(ranks * sizes.shape[1], dtype=np.int64),
        cell_of,
    )
    return cell_of, filled


def _flat(*tables: Ints | list[int]) -> list[Ints]:
    return [np.ascontiguousarray(table, dtype=np.int64).reshape(-1) for table in tables]


def fill_loop(
    shape: Numbers,
    order: Numbers,
    loads: Numbers,
    sizes: Numbers,
    limits: Numbers,
    load: Numbers,
    used: Numbers,
    bin_of: Numbers,
) -> int:
    """Place each item, in the given order, where the largest cost is smallest; 1 if one fails."""
    items, bins, phases, kinds = shape[0], shape[1], shape[2], shape[3]
    for at in range(items):
        item = order[at]
        best, best_top, best_sum = -1, 0, 0
        begin, stop = 0, bins
        if phases == 1:
            # Mostly the lightest bin has room; finding it without looking at sizes is fast.
            least = load[0]
            for each in range(1, bins):
                least = min(least, load[each])
            while load[begin] != least:
                begin += 1
            fits = 1
            for kind in range(kinds):
                if used[begin * kinds + kind] + sizes[item * kinds + kind] > limits[kind]:
                    fits = 0
            if fits == 1:
                stop = begin + 1
            else:
                begin = 0
        for each in range(begin, stop):
            top = whole = load[each * phases] + loads[item * phases]
            for phase in range(1, phases):
                one = load[each * phases + phase] + loads[item * phases + phase]
                top = max(top, one)
                whole += one
            if best >= 0 and (top > best_top or (top == best_top and whole >= best_sum)):
                continue
            fits = 1
            for kind in range(kinds):
                if used[each * kinds + kind] + sizes[item * kinds + kind] > limits[kind]:
                    fits = 0
            if fits == 1:
                best, best_top, best_sum = each, top, whole
        if best < 0:
            return 1
        bin_of[item] = best
        for phase in range(phases):
            load[best * phases + phase] += loads[item * phases + phase]
        for kind in range(kinds):
            used[best * kinds + kind] += sizes[item * kinds + kind]
    return 0


def exchange_loop(
    shape: Numbers,
    loads: Numbers,
    sizes: Numbers,
    limits: Numbers,
    floor: Numbers,
    load: Numbers,
    used: Numbers,
    bin_of: Numbers,
    head: Numbers,
    following: Numbers,
    few: Numbers,
) -> int:
    """Exchange items until nothing helps; returns how many exchanges were made.

    ``head`` and ``following`` chain each bin's items; ``few`` holds the three heaviest bins of
    each phase, and then the partners of one.
    """
    items, bins, phases, kinds = shape[0], shape[1], shape[2], shape[3]
    left, most_partners = shape[4], shape[5]
    for item in range(items - 1, -1, -1):
        following[item] = head[bin_of[item]]
        head[bin_of[item]] = item
    made = 0
    while left > 0:
        whole = 0
        for phase in range(phases):
            for place in range(3):
                few[3 * phase + place] = -1
            for each in range(bins):
                here = load[each * phases + phase]
                if few[3 * phase] < 0 or here > load[few[3 * phase] * phases + phase]:
                    few[3 * phase + 2] = few[3 * phase + 1]
                    few[3 * phase + 1] = few[3 * phase]
                    few[3 * phase] = each
                elif few[3 * phase + 1] < 0 or here > load[few[3 * phase + 1] * phases + phase]:
                    few[3 * phase + 2] = few[3 * phase + 1]
                    few[3 * phase + 1] = each
                elif few[3 * phase + 2] < 0 or here > load[few[3 * phase + 2] * phases + phase]:
                    few[3 * phase + 2] = each
            whole += load[few[3 * phase] * phases + phase]
        best_value, best_inner = whole, 0
        best_giver, best_taker, best_low, best_high = -1, -1, -1, -1
        for heavy in range(phases):
            high = few[3 * heavy]
            if load[high * phases + heavy] <= floor[heavy]:
                continue
            low = -1
            for _ in range(min(most_partners, bins - 1)):
                # The next lightest bin after the last partner, by load and then by index.
                before, low = low, -1
                for each in range(bins):
                    if each == high:
                        continue
                    here = load[each * phases + heavy]
                    if before >= 0:
                        last = load[before * phases + heavy]
                        if here < last or (here == last and each <= before):
                            continue
                    if low < 0 or here < load[low * phases + heavy]:
                        low = each
                if low < 0:
                    break
                giver = head[high]
                while giver >= 0:
                    taker = -1
                    while True:
                        left -= 1
                        fits = 1
                        for kind in range(kinds):
                            shift = sizes[giver * kinds + kind]
                            if taker >= 0:
                                shift -= sizes[taker * kinds + kind]
                            if used[low * kinds + kind] + shift > limits[kind]:
                                fits = 0
                            if used[high * kinds + kind] - shift > limits[kind]:
                                fits = 0
                        if fits == 1:
                            value = inner = 0
                            for phase in range(phases):
                                shift = loads[giver * phases + phase]
                                if taker >= 0:
                                    shift -= loads[taker * phases + phase]
                                pair = max(
                                    load[high * phases + phase] - shift,
                                    load[low * phases + phase] + shift,
                                )
                                inner += pair
                                for place in range(3):
                                    other = few[3 * phase + place]
                                    if other >= 0 and other != high and other != low:
                                        pair = max(pair, load[other * phases + phase])
                                        break
                                value += pair
                            if value < best_value or (
                                value == best_value and best_giver >= 0 and inner < best_inner
                            ):
                                best_value, best_inner = value, inner
                                best_giver, best_taker = giver, taker
                                best_high, best_low = high, low
                        taker = head[low] if taker < 0 else following[taker]
                        if taker < 0:
                            break
                    giver = following[giver]
        if best_giver < 0:
            return made
        made += 1
        for moved, source, target in (
            (best_giver, best_high, best_low),
            (best_taker, best_low, best_high),
        ):
            if moved < 0:
                continue
            if head[source] == moved:
                head[source] = following[moved]
            else:
                before = head[source]
                while following[before] != moved:
                    before = following[before]
                following[before] = following[moved]
            following[moved] = head[target]
            head[target] = moved
            bin_of[moved] = target
            for phase in range(phases):
                load[source * phases + phase] -= loads[moved * phases + phase]
                load[target * phases + phase] += loads[moved * phases + phase]
            for kind in range(kinds):
                used[source * kinds + kind] -= sizes[moved * kinds + kind]
                used[target * kinds + kind] += sizes[moved * kinds + kind]
    return made


def shelve_loop(
    shape: Numbers,
    order: Numbers,
    loads: Numbers,
    sizes: Numbers,
    limits: Numbers,
    gap: Numbers,
    used: Numbers,
    cell_of: Numbers,
) -> int:
    """Fill turns, heaviest item first, each into the rank with the largest gap that has room."""
    items, ranks, turns, kinds = shape[0], shape[1], shape[2], shape[3]
    whole = first = turn = 0
    for item in range(items):
        whole += loads[item]
    while turn < turns - 1:
        while first < items and cell_of[order[first]] >= 0:
            first += 1
        if first == items or loads[order[first]] * ranks * (turns - turn) <= whole:
            return turn
        for rank in range(ranks):
            gap[rank] = loads[order[first]]
            for kind in range(kinds):
                used[rank * kinds + kind] = 0
        for at in range(first, items):
            item = order[at]
            if cell_of[item] >= 0:
                continue
            best = -1
            for rank in range(ranks):
                if gap[rank] < loads[item] or (best >= 0 and gap[rank] <= gap[best]):
                    continue
                fits = 1
                for kind in range(kinds):
                    if used[rank * kinds + kind] + sizes[item * kinds + kind] > limits[kind]:
                        fits = 0
                if fits == 1:
                    best = rank
            if best >= 0:
                cell_of[item] = turn * ranks + best
                gap[best] -= loads[item]
                whole -= loads[item]
                for kind in range(kinds):
                    used[best * kinds + kind] += sizes[item * kinds + kind]
        turn += 1
    return turn
