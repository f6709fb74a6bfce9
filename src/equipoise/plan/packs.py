"""Documents of one step, packed for each layout that asks, once.

What it decides
    Of all data-parallel ranks the one with most work stands first: a choice is priced on it.

Kept true (tests/unit/plan/test_packs.py)
    What was asked twice is packed once; ranks come by their work.
"""

from collections.abc import Callable

import numpy as np

from equipoise.cost.work import useful_flop
from equipoise.plan.bins import Bins, sort_batches
from equipoise.plan.choice import Choice
from equipoise.schedule.instruction import Ints
from equipoise.sim.step import Documents
from equipoise.spec.model import ModelSpec

_GRAINS = 64
"""Of a full micro-batch: those that differ by less than one count as having as few tokens as the
least of them could have."""

Packer = Callable[[Choice], Documents]
"""Documents of one step, as the choice's policy packs them for its layout."""


class Packs:
    """A step's documents; full windows where there is no packer."""

    def __init__(self, model: ModelSpec, packer: Packer | None) -> None:
        self._model, self._packer = model, packer
        self._packed: dict[tuple[int, int, str], Documents] = {}
        self._bins: dict[tuple[int, int, str], Bins] = {}

    @property
    def has_documents(self) -> bool:
        """Whether micro-batches differ."""
        return self._packer is not None

    def documents(self, choice: Choice) -> Documents:
        """Micro-batches of every data-parallel rank, those with most work first.

        Of full windows one rank stands for all.
        """
        layout, options = choice.layout, choice.options
        if self._packer is None:
            batch = [options.context_tokens] * options.micro_batch
            return [[batch] * options.count_micro_batches(layout)]
        key = layout.dp, options.micro_batch, options.policy
        if key not in self._packed:
            packed = self._packer(choice)
            self._packed[key] = [packed[at] for at in _by_work(self._model, packed)]
        return self._packed[key]

    def tokens(self, choice: Choice) -> Ints | None:
        """Of the micro-batches of the rank that has most work, in order; None of full windows."""
        if self._packer is None:
            return None
        return np.array([sum(batch) for batch in self.documents(choice)[0]], dtype=np.int64)

    def bins(self, choice: Choice) -> Bins:
        """Micro-batches of the rank that has most work, by their tokens."""
        options = choice.options
        key = choice.layout.dp, options.micro_batch, options.policy
        if key not in self._bins:
            grain = max(1, options.micro_batch * options.context_tokens // _GRAINS)
            self._bins[key] = sort_batches(self.documents(choice)[0], grain)
        return self._bins[key]


def _by_work(model: ModelSpec, packed: Documents) -> list[int]:
    lengths = np.array([x for rank in packed for batch in rank for x in batch], np.float64)
    rank = np.repeat(np.arange(len(packed)), [sum(map(len, batches)) for batches in packed])
    each = useful_flop(model, 1, 0) * lengths
    each += useful_flop(model, 0, 1) * lengths * (lengths + 1.0) / 2.0
    work = np.bincount(rank, each, len(packed))
    order: list[int] = np.argsort(-work, kind="stable").tolist()
    return order
