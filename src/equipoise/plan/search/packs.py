"""Documents of one step, packed for each layout that asks, once.

What it decides
    Of all data-parallel ranks the one with most work stands first: a choice is priced on it.

Kept true (tests/unit/plan/search/test_packs.py)
    What was asked twice is packed once; ranks come by their work.
"""

from collections.abc import Callable

import numpy as np

from equipoise.base.arrays import Ints
from equipoise.cost.work import useful_flop
from equipoise.plan.search.bins import Bins, sort_batches, sort_slices
from equipoise.plan.space.choice import Choice
from equipoise.sim.divided import DividedStep
from equipoise.sim.step import Documents
from equipoise.sim.turns import slowest_turns
from equipoise.spec.model.presets import ModelSpec

_GRAINS = 64
"""Of a full micro-batch: those that differ by less than one count as having as few tokens as the
least of them could have."""

Packer = Callable[[Choice], Documents | DividedStep]
"""Documents of one step, as the choice's policy packs them for its layout."""


PackKey = tuple[int, int, str, bool]
"""What a packer's answer depends on: ranks, windows of a micro-batch, policy, where ranks meet."""


def pack_key(choice: Choice) -> PackKey:
    """The key of a choice."""
    layout, options = choice.layout, choice.options
    return layout.dp, options.micro_batch, options.policy, layout.meets_each_turn


class Packs:
    """A step's documents; full windows where there is no packer."""

    def __init__(self, model: ModelSpec, packer: Packer | None) -> None:
        self._model, self._packer = model, packer
        self._packed: dict[PackKey, Documents | DividedStep] = {}
        self._paced: dict[PackKey, Documents] = {}
        self._bins: dict[PackKey, Bins] = {}

    @property
    def has_documents(self) -> bool:
        """Whether micro-batches differ."""
        return self._packer is not None

    def documents(self, choice: Choice) -> Documents | DividedStep:
        """Micro-batches of every data-parallel rank, those with most work first.

        Of full windows one rank stands for all; of documents divided over ranks, none does.
        """
        layout, options = choice.layout, choice.options
        if self._packer is None:
            batch = [options.context_tokens] * options.micro_batch
            return [[batch] * options.count_micro_batches(layout)]
        key = pack_key(choice)
        if key not in self._packed:
            packed = self._packer(choice)
            if isinstance(packed, DividedStep):
                self._packed[key] = packed.ranks(self._by_work(packed))
            else:
                self._packed[key] = [packed[at] for at in _by_work(self._model, packed)]
        return self._packed[key]

    def deciding(self, choice: Choice, count: int) -> Documents | DividedStep:
        """The pipelines with most work; all ranks where they wait for each other within a step.

        Args:
            choice: Whose documents.
            count: Pipelines, where each goes at its own pace.
        """
        documents = self.documents(choice)
        if isinstance(documents, DividedStep):
            return documents.ranks(range(min(count, len(documents.rows))))
        return documents if choice.layout.meets_each_turn else documents[:count]

    def heaviest(self, choice: Choice) -> Documents | DividedStep:
        """What a look is priced on: one pipeline, where documents lie on one."""
        documents = self.deciding(choice, 1)
        if isinstance(documents, DividedStep) or len(documents) == 1:
            return documents
        key = pack_key(choice)
        if key not in self._paced:
            self._paced[key] = slowest_turns(self._model, choice.layout, documents)[:1]
        return self._paced[key]

    def _by_work(self, step: DividedStep) -> list[int]:
        """Ranks by their work; where all run documents together, the one with most first."""
        one = useful_flop(self._model, 1, 0), useful_flop(self._model, 0, 1)
        work = [
            sum(one[0] * each.tokens + one[1] * each.all_pairs for each in row)
            for row in step.rank_slices
        ]
        return sorted(range(len(work)), key=lambda at: -work[at])

    def tokens(self, choice: Choice) -> Ints | None:
        """Of the micro-batches of the rank that has most work, in order; None of full windows."""
        if self._packer is None:
            return None
        documents = self.heaviest(choice)
        if isinstance(documents, DividedStep):
            sizes = [each.tokens for each in documents.rank_slices[self._by_work(documents)[0]]]
            return np.array(sizes, dtype=np.int64)
        return np.array([sum(batch) for batch in documents[0]], dtype=np.int64)

    def bins(self, choice: Choice) -> Bins:
        """Micro-batches of the rank that has most work, by their tokens."""
        options, key = choice.options, pack_key(choice)
        if key not in self._bins:
            grain = max(1, options.micro_batch * options.context_tokens // _GRAINS)
            documents = self.heaviest(choice)
            if isinstance(documents, DividedStep):
                row = documents.rank_slices[self._by_work(documents)[0]]
                self._bins[key] = sort_slices(row, grain)
            else:
                self._bins[key] = sort_batches(documents[0], grain)
        return self._bins[key]


def _by_work(model: ModelSpec, packed: Documents) -> list[int]:
    lengths = np.array([x for rank in packed for batch in rank for x in batch], np.float64)
    rank = np.repeat(np.arange(len(packed)), [sum(map(len, batches)) for batches in packed])
    each = useful_flop(model, 1, 0) * lengths
    each += useful_flop(model, 0, 1) * lengths * (lengths + 1.0) / 2.0
    work = np.bincount(rank, each, len(packed))
    order: list[int] = np.argsort(-work, kind="stable").tolist()
    return order
