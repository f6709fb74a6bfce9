"""Every legal layout of a number of ranks.

What it decides
    Degrees multiply to the ranks; experts fold over a stage's ranks in every way; every ZeRO
    stage, and every number of replicas if ZeRO shards at all. Axes are in default order.

Kept true (tests/unit/spec/test_layout_space.py)
    No layout is listed twice; each passes its own checks and those of the model.
"""

import itertools
from collections.abc import Iterator
from typing import Literal

from equipoise.base.errors import LayoutError
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec

_STAGES: tuple[Literal[0, 1, 2, 3], ...] = (0, 1, 2, 3)


def list_layouts(ranks: int) -> Iterator[Layout]:
    """Every layout whose degrees multiply to the ranks.

    >>> len(list(list_layouts(2)))
    58
    """
    degrees = [each for each in range(1, ranks + 1) if ranks % each == 0]
    for pp, cp, tp in itertools.product(degrees, repeat=3):
        if ranks % (pp * cp * tp):
            continue
        dp = ranks // (pp * cp * tp)
        for ep, etp, zero, replicas in itertools.product(degrees, degrees, _STAGES, degrees):
            is_whole = (dp * cp * tp) % (ep * etp) == 0 and (dp * cp) % replicas == 0
            if is_whole and (zero or replicas == 1):  # ZeRO 0 keeps as many copies as ranks
                yield Layout(
                    dp=dp, cp=cp, tp=tp, pp=pp, ep=ep, etp=etp, zero=zero, replicas=replicas
                )


def legal_layouts(ranks: int, model: ModelSpec) -> list[Layout]:
    """The layouts that fit a model's sizes.

    Without experts, ep and etp are 1.
    """
    layouts = []
    for layout in list_layouts(ranks):
        try:
            layout.require_model(model)
        except LayoutError:
            continue
        layouts.append(layout)
    return layouts
