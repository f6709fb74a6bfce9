"""Why this choice and not the next: term by term, the nearest wall, and what would flip it.

What it decides
    *Loses by*: seconds of each term beyond the best's; they add up to the difference of the steps.
    *Flip*: among the terms on which the best spends more than the first runner-up, the one that has
    to grow least, for both, until they are equal. *Wall*: window, micro-batch and layers grow, each
    by itself, layout and the rest staying; the first of a few sizes that does not fit.

Kept true (tests/unit/plan/answer/test_explain.py)
    Differences add up; a flip makes the two equal; the size before a wall fits.
"""

import dataclasses
from collections.abc import Callable, Mapping

from equipoise.base.errors import EquipoiseError
from equipoise.base.units import GIB
from equipoise.plan.space.choice import Choice
from equipoise.sim.machine import Machine
from equipoise.sim.mixed.replay import run_sites
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.plan import Flip, Wall

_ROUNDED_S = 1e-9
"""Replays are in whole nanoseconds: anything less is rounding."""
_FACTORS = (1.125, 1.25, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0)


def loses_by(best: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each term beyond the best's, most first.

    >>> loses_by({"products": 2.0, "host": 1.0}, {"products": 2.5, "optimizer": 0.25})
    {'products': 0.5, 'optimizer': 0.25, 'host': -1.0}
    """
    names = dict.fromkeys([*best, *other])
    beyond = {name: other.get(name, 0.0) - best.get(name, 0.0) for name in names}
    return dict(sorted(beyond.items(), key=lambda each: -each[1]))


def find_flip(best: Mapping[str, float], other: Mapping[str, float], winner: str) -> Flip | None:
    """The term that has to grow least for the other to win; None if no term can do it.

    >>> find_flip({"products": 2.0, "tensor traffic": 1.0}, {"products": 3.5}, "tp=1")
    Flip(term='tensor traffic', times=1.5, winner='tp=1')
    """
    more = loses_by(best, other)
    behind = sum(more.values())
    flips = [(1.0 - behind / gain, name) for name, gain in more.items() if gain < -_ROUNDED_S]
    if not flips or behind < 0:
        return None
    times, term = min(flips)
    return Flip(term, times, winner)


def find_walls(model: ModelSpec, machine: Machine, choice: Choice) -> tuple[Wall, ...]:
    """Sizes that no longer fit when they grow, nearest first.

    Cost: about three prices for each of window, micro-batch and layers.
    """
    options, unit = choice.options, 2 * choice.layout.cp
    window, batch, layers = options.context_tokens, options.micro_batch, model.layers

    def with_window(size: int) -> tuple[ModelSpec, Choice]:
        grown = dataclasses.replace(options, context_tokens=size)
        return model, Choice(choice.layout, grown)

    def with_batch(size: int) -> tuple[ModelSpec, Choice]:
        sequences = options.step_sequences // batch * size
        grown = dataclasses.replace(options, micro_batch=size, step_sequences=sequences)
        return model, Choice(choice.layout, grown)

    def with_layers(size: int) -> tuple[ModelSpec, Choice]:
        return dataclasses.replace(model, layers=size), choice

    walls = [
        _wall(machine, "window", window, lambda x: -(-int(window * x) // unit) * unit, with_window),
        _wall(machine, "micro-batch", batch, lambda x: max(batch + 1, int(batch * x)), with_batch),
        _wall(machine, "layers", layers, lambda x: max(layers + 1, int(layers * x)), with_layers),
    ]
    known = [wall for wall in walls if wall is not None]
    return tuple(sorted(known, key=lambda wall: wall.after / wall.before))


def _wall(
    machine: Machine,
    grows: str,
    before: int,
    size_at: Callable[[float], int],
    grown: Callable[[int], tuple[ModelSpec, Choice]],
) -> Wall | None:
    """By bisection: memory grows with every size."""
    sizes = sorted({size_at(factor) for factor in _FACTORS})
    low, high, full = -1, len(sizes), (0.0, 0.0, False)
    while high - low > 1:
        middle = (low + high) // 2
        model, choice = grown(sizes[middle])
        try:
            price = run_sites(model, machine, choice.layout, choice.options).price
        except EquipoiseError:  # not of this layout at all
            return None
        if price.fits:
            low = middle
        else:
            held, room = float(price.memory_bytes[price.fullest]), price.fullest_capacity_bytes
            high, full = middle, (held / GIB, room / GIB, False)
            if not price.fits_host:
                host = float(price.host_bytes.max())
                full = host / GIB, price.host_capacity_bytes / GIB, True
    if high == len(sizes):
        return None
    return Wall(grows, before, sizes[high], *full)
