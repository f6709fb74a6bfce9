"""In how many parts rows should travel while they are computed, and what that saves.

What it decides
    A product takes ``compute_s`` and its rows ``move_s`` on the link, half there and half back. The
    link brings a part while the one before it is computed, and takes the outputs of the part before
    that away. With c = C / d and m = M / 2d, the first part is computed beside one way, each of
    the others beside two, and the last beside one::

        T(d) = 2 m + 2 max(c, m) + (d - 2) max(c, 2 m) + (d - 1) * part_s        d > 1

    ``part_s`` is what one part more costs: the start of its messages, and what products lose that
    have fewer rows. ``shared`` is the share of the cores that moving takes from computing: on a
    device with a copy engine 0; on processors that send by themselves, 1, and then no part hides
    anything. A rank sends a part twice, there and back.

Kept true (tests/unit/cost/test_overlap.py)
    One part where more lose; never slower than one part; the best of all numbers of parts.

Sources
    Derived; the same form as T3's, arXiv:2401.16677, figure 3.
"""

from equipoise.spec.run.resolved import PartMachine

PARTS = (1, 2, 4, 8, 16)
"""What is chosen among."""


def parts_s(
    parts: int, *, compute_s: float, move_s: float, part_s: float, shared: float = 0.0
) -> float:
    """Seconds in ``parts`` parts.

    >>> parts_s(4, compute_s=2.0, move_s=1.0, part_s=0.01)
    2.28
    """
    if parts == 1:
        return compute_s + move_s
    each_s, way_s = compute_s / parts, move_s / (2 * parts)
    beside_s = 2 * way_s + 2 * max(each_s, way_s) + (parts - 2) * max(each_s, 2 * way_s)
    hidden_s = (compute_s + move_s - beside_s) * (1.0 - shared)
    return compute_s + move_s - hidden_s + (parts - 1) * part_s


def best_parts(*, compute_s: float, move_s: float, part_s: float, shared: float = 0.0) -> int:
    """The number of parts that takes the least time, the fewest among equals.

    >>> best_parts(compute_s=2.0, move_s=1.0, part_s=0.01)
    8
    >>> best_parts(compute_s=2.0, move_s=1.0, part_s=0.9)
    1
    """

    def seconds(parts: int) -> float:
        return parts_s(parts, compute_s=compute_s, move_s=move_s, part_s=part_s, shared=shared)

    return min(PARTS, key=lambda parts: (seconds(parts), parts))


def parts_on(machine: PartMachine, *, flop: float, moved_bytes: float) -> int:
    """The number of parts that takes the least time on a machine.

    Args:
        machine: Its prices.
        flop: Of the rank's products.
        moved_bytes: What the rank sends, there and back [bytes].

    >>> fast = PartMachine(flop_per_s=1e12, start_s=1e-5, bytes_per_s=1e9, shared=0.0)
    >>> parts_on(fast, flop=1e9, moved_bytes=1e6), parts_on(fast, flop=1e6, moved_bytes=1e6)
    (8, 1)
    """
    return best_parts(
        compute_s=flop / machine.flop_per_s,
        move_s=2 * machine.start_s + moved_bytes / machine.bytes_per_s,
        part_s=2 * machine.start_s,
        shared=machine.shared,
    )
