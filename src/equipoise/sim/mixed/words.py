"""Strategies of all layers as words: runs of layers that are alike.

What it decides
    The form, run after run: how many layers, their degrees, what they make again, and where they
    have context ranks what travels between those::

        12:tp=2,dp=4,zero=1:full  20:tp=2,cp=2,dp=2,zero=1:none:ring

Kept true (tests/unit/sim/mixed/test_words.py)
    Written strategies are read back; each faulty run is refused by its text.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, cast

from equipoise.base.errors import SpecError
from equipoise.base.nearest import nearest
from equipoise.base.whole import whole_number
from equipoise.sim.mixed.layers import LayerStrategy
from equipoise.spec.layout import Layout
from equipoise.spec.recompute import LayerRecompute
from equipoise.spec.words import read_words

_WORDS = ("tp", "cp", "dp", "zero", "replicas")
_RECOMPUTES = ("none", "attention", "selective", "full")
CONTEXT_STRATEGIES = ("needed-kv", "all-gather", "ring", "ulysses")


def say_layers(layers: Sequence[LayerStrategy]) -> str:
    """Runs of layers that are alike.

    >>> same = [LayerStrategy(Layout(tp=2, dp=4))] * 3
    >>> say_layers([*same, LayerStrategy(Layout(cp=2, dp=4), "full", "ring")])
    '3:tp=2,dp=4,zero=1:none 1:cp=2,dp=4,zero=1:full:ring'
    """
    return " ".join(f"{len(list(run))}:{_say(each)}" for each, run in itertools.groupby(layers))


def _say(strategy: LayerStrategy) -> str:
    layout = strategy.layout
    degrees = {axis: layout.size(axis) for axis in ("tp", "cp", "dp")}
    said = [f"{axis}={size}" for axis, size in degrees.items() if size > 1 or axis == "dp"]
    said.append(f"zero={layout.zero}")
    if layout.replicas > 1:
        said.append(f"replicas={layout.replicas}")
    text = f"{','.join(said)}:{strategy.recompute}"
    return f"{text}:{strategy.context_strategy}" if layout.cp > 1 else text


def read_layers(text: str, base: Layout) -> tuple[LayerStrategy, ...]:
    """Strategies of all layers; stages, experts and the order of ranks are the base's.

    Raises:
        SpecError: a run is not ``LAYERS:DEGREES:RECOMPUTE``, or one of them is unknown.
        LayoutError: degrees do not go together.

    >>> [each.recompute for each in read_layers("2:dp=8:full 1:tp=2,dp=4:none", Layout(dp=8))]
    ['full', 'full', 'none']
    """
    strategies: list[LayerStrategy] = []
    for run in text.split():
        parts = run.split(":")
        if len(parts) not in (3, 4) or not whole_number(parts[0]):
            raise SpecError(
                f'layers: "{run}" is not a run of layers. Give how many, their degrees and what '
                f"they make again, as 12:tp=2,dp=4,zero=1:full."
            )
        _require("recompute", parts[2], _RECOMPUTES)
        strategy = parts[3] if len(parts) == 4 else CONTEXT_STRATEGIES[0]
        _require("context strategy", strategy, CONTEXT_STRATEGIES)
        words = read_words("layers", parts[1], _WORDS)
        degrees = {"tp": 1, "cp": 1, "dp": 1, "zero": 1, "replicas": 1} | words
        layout = dataclasses.replace(base, **cast(Any, degrees))
        each = LayerStrategy(layout, cast(LayerRecompute, parts[2]), strategy)
        strategies += [each] * int(parts[0])
    return tuple(strategies)


def _require(kind: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise SpecError(
            f'layers: no such {kind}: "{value}". Nearest: {nearest(value, known)}. '
            f"Known: {', '.join(known)}."
        )
