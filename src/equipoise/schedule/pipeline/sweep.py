"""Two loops over all ranks' instructions: when each runs, and where weight gradients go.

What it decides
    Nothing: ``replay`` and ``fill`` say what the numbers mean. Each rank moves until it needs
    something absent and then waits at that place; whoever completes the place lets it move
    again. The order in which ranks move changes nothing. The loops suit ``compiled.run_loop``:
    they call nothing and read and write only numbers.

Kept true (tests/unit/schedule/pipeline/test_compiled.py)
    As for ``compiled``.
"""

from equipoise.schedule.compiled import Numbers


def sweep(
    starts: Numbers,
    needs: Numbers,
    takes: Numbers,
    hops: Numbers,
    waiting: Numbers,
    following: Numbers,
    moving: Numbers,
    now: Numbers,
    begin: Numbers,
    end: Numbers,
) -> int:
    """Run every rank to its end, or until it waits for ever.

    Args:
        starts: First place of each rank, and one past the last of all, [ranks + 1].
        needs: The place that each waits for; -1 if none, -2 if no rank does it, [n].
        takes: Time of each, [n].
        hops: Time from the end of what it needs to its arrival, [n].
        waiting: -1 everywhere, [n]: a rank that waits for this place.
        following: Per rank, another one that waits for the same place, [ranks].
        moving: Ranks that can move, [ranks].
        now: Filled: the place of each rank, [ranks].
        begin: Filled, [n].
        end: -1 everywhere, and filled, [n].

    Returns:
        The number of instructions that ran.
    """
    ranks = len(starts) - 1
    left, done = ranks, 0
    for rank in range(ranks):
        now[rank] = starts[rank]
        moving[rank] = ranks - 1 - rank
    while left:
        left -= 1
        rank = moving[left]
        at, stop = now[rank], starts[rank + 1]
        time = 0
        if at > starts[rank]:
            time = end[at - 1]
        while at < stop:
            need = needs[at]
            if need >= 0:
                if end[need] < 0:
                    following[rank] = waiting[need]
                    waiting[need] = rank
                    break
                time = max(time, end[need] + hops[at])
            elif need == -2:
                break
            begin[at] = time
            time += takes[at]
            end[at] = time
            done += 1
            woken = waiting[at]
            while woken >= 0:
                moving[left] = woken
                left += 1
                woken = following[woken]
            at += 1
        now[rank] = at
    return done


def fill(
    starts: Numbers,
    begins_with: Numbers,
    is_forward: Numbers,
    needs: Numbers,
    takes: Numbers,
    hops: Numbers,
    weight_takes: Numbers,
    sizes: Numbers,
    most_held: Numbers,
    waiting: Numbers,
    following: Numbers,
    moving: Numbers,
    now: Numbers,
    time: Numbers,
    held: Numbers,
    queue: Numbers,
    first: Numbers,
    last: Numbers,
    end: Numbers,
    written: Numbers,
    stands: Numbers,
) -> int:
    """Run forwards and input gradients in order, and weight gradients where they cost nothing.

    Args:
        starts: As in ``sweep``, for forwards and input gradients, [ranks + 1].
        begins_with: Where each rank's part of ``written`` begins, [ranks].
        is_forward: 1 for a forward, 0 for an input gradient, [n].
        needs: As in ``sweep``.
        takes: As in ``sweep``.
        hops: As in ``sweep``.
        weight_takes: Time of the weight gradient of the same stage and micro-batch, [n].
        sizes: What that stage and micro-batch's forward leaves behind, [n].
        most_held: The most that each rank may hold, [ranks].
        waiting: As in ``sweep``.
        following: As in ``sweep``.
        moving: As in ``sweep``.
        now: As in ``sweep``.
        time: 0 everywhere: the time of each rank, [ranks].
        held: 0 everywhere: what each rank holds, [ranks].
        queue: Input gradients whose weight gradients are pending, rank by rank, [n].
        first: Filled: where each rank's queue begins, [ranks].
        last: Filled: where it ends, [ranks].
        end: -1 everywhere, and filled, [n].
        written: Filled: places in the order in which they run, [n + input gradients]; a weight
            gradient is -1 - the place of its input gradient.
        stands: Filled: how many each rank has written, [ranks].

    Returns:
        -1; or the rank that holds too much, with the amount in ``held``.
    """
    ranks = len(starts) - 1
    left = ranks
    for rank in range(ranks):
        now[rank] = first[rank] = last[rank] = starts[rank]
        moving[rank] = rank
        stands[rank] = 0
    while left:
        left -= 1
        rank = moving[left]
        at, stop = now[rank], starts[rank + 1]
        while at < stop:
            need = needs[at]
            arrives = 0
            if need >= 0:
                if end[need] < 0:
                    following[rank] = waiting[need]
                    waiting[need] = rank
                    break
                arrives = end[need] + hops[at]
            elif need == -2:
                break
            if is_forward[at]:
                held[rank] += sizes[at]
            while first[rank] < last[rank]:
                oldest = queue[first[rank]]
                is_full = is_forward[at] and held[rank] > most_held[rank]
                if not is_full and time[rank] + weight_takes[oldest] > arrives:
                    break
                time[rank] += weight_takes[oldest]
                held[rank] -= sizes[oldest]
                written[begins_with[rank] + stands[rank]] = -1 - oldest
                stands[rank] += 1
                first[rank] += 1
            if is_forward[at] and held[rank] > most_held[rank]:
                return int(rank)
            time[rank] = max(time[rank], arrives) + takes[at]
            end[at] = time[rank]
            written[begins_with[rank] + stands[rank]] = at
            stands[rank] += 1
            if not is_forward[at]:
                queue[last[rank]] = at
                last[rank] += 1
            woken = waiting[at]
            while woken >= 0:
                moving[left] = woken
                left += 1
                woken = following[woken]
            at += 1
        now[rank] = at
    for rank in range(ranks):
        while first[rank] < last[rank]:
            written[begins_with[rank] + stands[rank]] = -1 - queue[first[rank]]
            stands[rank] += 1
            first[rank] += 1
    return -1
