"""In how many parts rows should travel while they are computed, and what that saves.

What it decides
    A product takes ``compute_s`` and its rows ``move_s``, half there and half back. In parts the
    rank starts the next part's messages, computes a part and starts its way back, while the link
    brings and takes others, one after another::

        link     gather 0 | gather 1 | sums 0 | gather 2 | sums 1 | ...
        rank     start 0, start 1 | f of 0, start | start 2 | f of 1, start | ...

    ``part_s`` is what the rank spends on the messages of one part more, half on each way; bytes
    that are on the link meanwhile hide it. ``shared`` is the share of a message's time that the
    rank's core spends on it too: with a copy engine 0; on processors that send by themselves 1,
    and then no part hides anything. With ``ways=1`` rows travel on one side of the product alone:
    they are gathered before it, or sums leave after it, which takes as long.

Kept true (tests/unit/cost/test_overlap.py)
    One part where more lose; never slower than one part; the best of all numbers of parts.

Sources
    Derived; the same form as T3's, arXiv:2401.16677, figure 3.
"""

from equipoise.spec.run.resolved import PartMachine

PARTS = (1, 2, 4, 8, 16)
"""What is chosen among."""


def parts_s(
    parts: int,
    *,
    compute_s: float,
    move_s: float,
    part_s: float,
    shared: float = 0.0,
    ways: int = 2,
) -> float:
    """Seconds in ``parts`` parts.

    >>> round(parts_s(4, compute_s=2.0, move_s=1.0, part_s=0.01), 6)
    2.2825
    >>> round(parts_s(4, compute_s=2.0, move_s=1.0, part_s=0.01, ways=1), 6)
    2.2875
    """
    start_s = min(part_s, move_s) / ways
    way_s = (move_s / ways - start_s) / parts
    rank_s = link_s = 0.0

    def send() -> float:
        nonlocal rank_s, link_s
        rank_s += start_s
        link_s = max(link_s, rank_s) + way_s
        rank_s += shared * way_s
        return link_s

    here_s = [send()] if ways > 1 else [0.0] * parts
    for part in range(parts):
        if len(here_s) < parts:
            here_s.append(send())
        rank_s = max(rank_s, here_s[part]) + compute_s / parts
        send()
    return max(rank_s, link_s)


def best_parts(
    *, compute_s: float, move_s: float, part_s: float, shared: float = 0.0, ways: int = 2
) -> int:
    """The number of parts that takes the least time, the fewest among equals.

    >>> best_parts(compute_s=2.0, move_s=1.0, part_s=0.01)
    8
    >>> best_parts(compute_s=2.0, move_s=1.0, part_s=0.9)
    1
    """

    def seconds(parts: int) -> float:
        return parts_s(
            parts, compute_s=compute_s, move_s=move_s, part_s=part_s, shared=shared, ways=ways
        )

    return min(PARTS, key=lambda parts: (seconds(parts), parts))


def parts_on(machine: PartMachine, *, flop: float, moved_bytes: float, ways: int = 2) -> int:
    """The number of parts that takes the least time on a machine.

    Args:
        machine: Its prices.
        flop: Of the rank's products.
        moved_bytes: What the rank sends, on all ways [bytes].
        ways: 2 where rows travel there and back, 1 where they are gathered or summed alone.

    >>> fast = PartMachine(flop_per_s=1e12, start_s=1e-5, bytes_per_s=1e9, shared=0.0)
    >>> parts_on(fast, flop=1e9, moved_bytes=1e6), parts_on(fast, flop=1e6, moved_bytes=1e4)
    (8, 1)
    """
    return best_parts(
        compute_s=flop / machine.flop_per_s,
        move_s=ways * machine.start_s + moved_bytes / machine.bytes_per_s,
        part_s=ways * machine.start_s,
        shared=machine.shared,
        ways=ways,
    )
