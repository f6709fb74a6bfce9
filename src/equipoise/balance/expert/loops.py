"""Loops of the expert planners: whole numbers in, whole numbers out, in Python or compiled.

What it decides
    ``fill`` lowers every rank to a target by copies of experts. The fullest rank gives rows of its
    largest expert to the rank whose room fits best. A rank's room that a copy leaves empty is lost
    once its slots are used; where more would be lost than the target allows, the copy takes all
    the room instead, and the giver, then below the target, receives a copy later.

    ``level`` moves rows between the places of one expert, pair by pair, until no move lowers the
    fuller of the two. ``share`` divides what each place computes over the ranks that have the
    rows: its own first, the rest in the order of ranks.

    ``join_groups`` divides ranks into groups that even out among themselves with fewest copies.

Kept true (tests/unit/balance/expert/test_exact.py, test_fewest.py, by Hypothesis)
    Compiled and in Python they give the same numbers; rows are neither lost nor made.

Sources
    Filling ranks one after another and carrying the rest over: McNaughton, Management Science 6,
    1959, "Scheduling with deadlines and loss functions".
"""

from equipoise.schedule.compiled import Numbers

_SWEEPS = 64
"""Most rounds of ``level``; each one halves what is left to even out, or more."""


def fill(
    sizes: Numbers,
    owners: Numbers,
    kept: Numbers,
    heights: Numbers,
    used: Numbers,
    copies: Numbers,
) -> int:
    """Lower every rank to a target.

    Args:
        sizes: Slots of a rank, fewest rows of a copy, the target; whether every copy takes all the
            room that it finds, and whether the rank that is least above the target gives first.
        owners: The rank of each expert [X].
        kept: Rows that each expert's owner computes [X]; changed.
        heights: Rows that each rank computes [ranks]; changed.
        used: Slots that each rank has used [ranks]; changed.
        copies: Filled with expert, rank and rows of each copy [3 x ranks x slots].

    Returns:
        The number of copies; -1 where a rank stays above the target.
    """
    slots, least, target, takes_all, least_first = sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]
    ranks, experts = len(heights), len(owners)
    lost = ranks * target
    for rank in range(ranks):
        lost -= heights[rank]
    made = 0
    while True:
        giver, others = -1, -1
        for rank in range(ranks):
            if heights[rank] > target:
                others += 1
                is_less = giver >= 0 and heights[rank] < heights[giver]
                is_more = giver >= 0 and heights[rank] > heights[giver]
                if giver < 0 or (is_less if least_first > 0 else is_more):
                    giver = rank
        if giver < 0:
            return made
        excess = heights[giver] - target
        largest = -1
        for expert in range(experts):
            if owners[expert] == giver and (largest < 0 or kept[expert] > kept[largest]):
                largest = expert
        wanted = min(excess, kept[largest])
        fits, widest = -1, -1
        for rank in range(ranks):
            room = target - heights[rank]
            if used[rank] < slots and room > 0:
                if room >= wanted and (fits < 0 or room < target - heights[fits]):
                    fits = rank
                if widest < 0 or room > target - heights[widest]:
                    widest = rank
        if widest < 0:
            return -1
        to, rows = widest, target - heights[widest]
        if fits >= 0:
            left = 0
            if used[fits] + 1 == slots:
                left = target - heights[fits] - wanted
            if others > 0 and used[giver] < slots and (left > lost or takes_all > 0):
                rows = min(kept[largest], rows)
            else:
                to, rows = fits, wanted
                lost -= left
        if rows < max(least, 1):
            return -1
        copies[3 * made] = largest
        copies[3 * made + 1] = to
        copies[3 * made + 2] = rows
        made += 1
        kept[largest] -= rows
        heights[giver] -= rows
        heights[to] += rows
        used[to] += 1


def level(firsts: Numbers, ranks_of: Numbers, rows: Numbers, heights: Numbers) -> int:
    """Even out the heights of ranks by moving rows between places of the same expert.

    Args:
        firsts: The first place of each expert, and the number of places [X + 1].
        ranks_of: The rank of each place.
        rows: Rows of each place; changed.
        heights: Rows of each rank; changed.

    Returns:
        How many rows moved.
    """
    moved = 0
    for _ in range(_SWEEPS):
        before = moved
        for expert in range(len(firsts) - 1):
            first, end = firsts[expert], firsts[expert + 1]
            for one in range(first, end - 1):
                for other in range(one + 1, end):
                    high, low = one, other
                    if heights[ranks_of[low]] > heights[ranks_of[high]]:
                        high, low = other, one
                    gap = heights[ranks_of[high]] - heights[ranks_of[low]]
                    step = min(rows[high], gap // 2)
                    rows[high] -= step
                    rows[low] += step
                    heights[ranks_of[high]] -= step
                    heights[ranks_of[low]] += step
                    moved += step
        if moved == before:
            break
    return moved


def share(
    firsts: Numbers, ranks_of: Numbers, place_rows: Numbers, rows: Numbers, quotas: Numbers
) -> int:
    """Divide what each place computes over the ranks that have rows of its expert.

    Args:
        firsts: The first place of each expert, and the number of places [X + 1].
        ranks_of: The rank of each place [places].
        place_rows: Rows that each place computes [places]; used up.
        rows: Rows of each expert on each rank [X x ranks]; used up.
        quotas: Filled with the rows of each rank for each place [places x ranks].

    Returns:
        Rows that stay on their rank.
    """
    experts = len(firsts) - 1
    ranks = len(rows) // experts
    stay = 0
    for expert in range(experts):
        base = expert * ranks
        for place in range(firsts[expert], firsts[expert + 1]):
            rank = ranks_of[place]
            own = min(rows[base + rank], place_rows[place])
            quotas[place * ranks + rank] = own
            rows[base + rank] -= own
            place_rows[place] -= own
            stay += own
        rank = 0
        for place in range(firsts[expert], firsts[expert + 1]):
            while place_rows[place] > 0:
                if rows[base + rank] == 0:
                    rank += 1
                    continue
                part = min(rows[base + rank], place_rows[place])
                quotas[place * ranks + rank] += part
                rows[base + rank] -= part
                place_rows[place] -= part
    return stay


def join_groups(
    gaps: Numbers,
    arcs: Numbers,
    adds_to: Numbers,
    adds: Numbers,
    costs: Numbers,
    fewest: Numbers,
) -> int:
    """The fewest copies of ranks in groups whose rooms hold their excess.

    Args:
        gaps: What each rank has too much, or below 0 can take [ranks]; together 0 or less.
        arcs: Copies that each rank gives at least [ranks].
        adds_to: The rank of each addition, the largest first [additions].
        adds: Rows of each addition [additions].
        costs: Filled with the copies of every set of ranks in one group, -1 for none [2^ranks].
        fewest: Filled with those of every set in the best groups, -1 for none [2^ranks].

    Returns:
        Of all ranks. ``O(3^ranks)``.
    """
    for mask in range(1, len(costs)):
        total, excess, given, size = 0, 0, 0, 0
        for rank in range(len(gaps)):
            if mask >> rank & 1:
                total += gaps[rank]
                excess += max(gaps[rank], 0)
                given += arcs[rank]
                size += 1
        taken = 0
        for at in range(len(adds)):
            if excess > 0 and mask >> adds_to[at] & 1:
                excess -= adds[at]
                taken += 1
        costs[mask] = -1 if total > 0 or excess > 0 else max(size - 1, given, taken)
    fewest[0] = 0
    for mask in range(1, len(costs)):
        first = mask & -mask
        rest = mask ^ first
        fewest[mask] = -1
        part = rest
        while True:  # every group that the first rank may be in
            cost, left = costs[part | first], fewest[rest ^ part]
            if cost >= 0 and left >= 0 and (fewest[mask] < 0 or cost + left < fewest[mask]):
                fewest[mask] = cost + left
            if part == 0:
                break
            part = (part - 1) & rest
    copies: int = fewest[len(costs) - 1]
    return copies
