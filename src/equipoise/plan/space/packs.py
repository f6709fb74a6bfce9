"""Documents of one step, packed for each layout that asks, and sorted into bins of like size.

Why
    A rank has up to thousands of micro-batches, no two alike, and a layer's kernels take as long as
    their tokens ask. A few dozen numbers of tokens serve every layout.

What it decides
    The data-parallel rank with most work stands first: a choice is priced on it. Micro-batches
    whose tokens round down to the same number are one bin, which relaxes each to the fewest tokens
    of the bin. Each document keeps its own length, because attention depends on it.

Kept true (tests/unit/plan/space/test_packs.py, tests/unit/plan/bounds/test_bounds.py)
    What was asked twice is packed once; ranks come by their work. Each document is in one bin; no
    micro-batch has fewer tokens than its bin says.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from equipoise.base.arrays import Floats, Ints
from equipoise.cost.work import token_weights, useful_flop, windowed_pairs
from equipoise.plan.space.choice import Choice
from equipoise.sim.divided import DividedStep, SlicedBatch, typical_slices
from equipoise.sim.step import Documents, typical
from equipoise.sim.turns import slowest_turns
from equipoise.spec.model.presets import ModelSpec

Batches = Sequence[Sequence[int]]
"""One data-parallel rank's micro-batches: documents' lengths [tokens]."""


@dataclass(frozen=True, slots=True, eq=False)
class BinCores:
    """Forward and backward of the attention core on one context rank, float64 [2, bins] [s]."""

    mean: Floats
    below: Floats
    """How much less than its bin's mean a micro-batch may take."""
    above: Floats
    """How much more."""


@dataclass(frozen=True, slots=True, eq=False)
class Bins:
    """One data-parallel rank's micro-batches, by their tokens."""

    documents: Ints
    """Lengths in all micro-batches, or in one where all are alike, int64 [documents]."""
    batch_of: Ints
    """Micro-batch of each document, int64 [documents]."""
    bin_of: Ints
    """Bin of each micro-batch, int64 [micro-batches]."""
    tokens: tuple[int, ...]
    """Tokens of each bin, no more than any of its micro-batches has."""
    counts: Floats
    """Micro-batches of each bin, float64 [bins]."""
    typical: Ints
    """Documents of the micro-batch that layers are split for."""
    is_alike: bool
    """Whether all micro-batches have the same documents."""
    is_divided: bool = False
    """Whether documents are tiles, in place of each a document of as many pairs."""
    cores: dict[tuple[int, bool], BinCores] = field(default_factory=dict)
    """As they were priced: by tensor ranks, and whether there are context ranks."""

    def sum_cores(self, each: Sequence[Floats]) -> BinCores:
        """Cores of bins, of forward and backward of each document [s]."""
        batches, bins = len(self.bin_of), len(self.tokens)
        spreads = []
        for one in each:
            whole = np.bincount(self.batch_of, one, batches)
            mean = np.bincount(self.bin_of, whole, bins) / np.bincount(self.bin_of)
            below, above = np.zeros((2, bins))
            np.maximum.at(below, self.bin_of, mean[self.bin_of] - whole)
            np.maximum.at(above, self.bin_of, whole - mean[self.bin_of])
            spreads.append((mean, below, above))
        return BinCores(*np.array(spreads).swapaxes(0, 1))


def sort_batches(batches: Batches, grain: int = 1) -> Bins:
    """Put a rank's micro-batches into bins.

    Args:
        batches: Documents of each micro-batch.
        grain: Tokens that micro-batches of one bin differ by, at most.

    >>> bins = sort_batches([[3], [9], [1, 1], [4]], grain=2)
    >>> bins.tokens, bins.counts.tolist(), bins.typical.tolist()
    ((2, 4, 8), [2.0, 1.0, 1.0], [4])
    """
    median = np.sort(typical([batches]).astype(np.int64))
    if all(batch == batches[0] for batch in batches):
        documents, count = np.array(batches[0], dtype=np.int64), np.array([float(len(batches))])
        first, alike = np.zeros(1, dtype=np.int64), np.zeros(len(documents), dtype=np.int64)
        return Bins(documents, alike, first, (int(documents.sum()),), count, median, is_alike=True)
    documents = np.array([length for batch in batches for length in batch], dtype=np.int64)
    batch_of = np.repeat(np.arange(len(batches)), [len(batch) for batch in batches])
    sums = np.bincount(batch_of, documents, len(batches)).astype(np.int64)
    return Bins(documents, batch_of, *_round(sums, grain), median, is_alike=False)


def sort_slices(batches: Sequence[SlicedBatch], grain: int = 1) -> Bins:
    """Put a rank's micro-batches of divided documents into bins.

    Args:
        batches: Micro-batches of one data-parallel rank.
        grain: Tokens that micro-batches of one bin differ by, at most.
    """
    alike = [np.sqrt(2.0 * each.pairs).astype(np.int64) for each in batches]
    tiles = [
        np.concatenate((batch.doc_tokens, more)) for batch, more in zip(batches, alike, strict=True)
    ]
    batch_of = np.repeat(np.arange(len(batches)), list(map(len, tiles)))
    sums = np.array([each.tokens for each in batches], dtype=np.int64)
    median = np.sort(typical_slices(batches).doc_tokens)
    documents = np.concatenate(tiles)
    rest = _round(sums, grain)
    return Bins(documents, batch_of, *rest, median, is_alike=False, is_divided=True)


def _round(sums: Ints, grain: int) -> tuple[Ints, tuple[int, ...], Floats]:
    """Bin of each micro-batch, tokens of each bin, and how many it has."""
    # Kernels of no tokens have no price.
    rounded = np.where(sums < grain, sums, sums // grain * grain)
    tokens, bin_of, counts = np.unique(rounded, return_inverse=True, return_counts=True)
    return bin_of.reshape(-1), tuple(tokens.tolist()), counts.astype(np.float64)


_GRAINS = 64
"""Grains of a full micro-batch: micro-batches that differ by less than one are one bin, of as few
tokens as the smallest of them could have."""

Packer = Callable[[Choice], Documents | DividedStep]
"""Documents of one step, as the choice's policy packs them for its layout."""


PackKey = tuple[int, int, str, bool, float]
"""What a packer's answer depends on: ranks, windows of a micro-batch, policy, where ranks meet, and
the skew of experts."""


def pack_key(choice: Choice) -> PackKey:
    """The key of a choice."""
    layout, options = choice.layout, choice.options
    apart = layout.dp, options.micro_batch, options.policy, layout.meets_each_turn
    return *apart, expert_skew(choice)


def expert_skew(choice: Choice) -> float:
    """Rows of the fullest of the ranks that share experts over the mean, as packs price them."""
    return choice.options.skew_of(choice.layout) if choice.layout.ep > 1 else 1.0


class Packs:
    """A step's documents; full windows without a packer."""

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

        With full windows one rank stands for all; with documents divided over ranks, none does.
        """
        layout, options = choice.layout, choice.options
        if self._packer is None:
            batch = [options.context_tokens] * options.micro_batch
            return [[batch] * options.count_micro_batches(layout)]
        key = pack_key(choice)
        if key not in self._packed:
            packed = self._packer(choice)
            if isinstance(packed, DividedStep):
                self._packed[key] = packed.ranks(self._by_work(packed, expert_skew(choice)))
            else:
                order = _by_work(self._model, packed, expert_skew(choice))
                self._packed[key] = [packed[at] for at in order]
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

    def _by_work(self, step: DividedStep, skew: float) -> list[int]:
        """Ranks by their work; where all run documents together, the one with most first."""
        token = 6 * token_weights(self._model, expert_skew=skew)
        one = token, useful_flop(self._model, 0, 1)
        work = [
            sum(one[0] * each.tokens + one[1] * each.all_pairs for each in row)
            for row in step.rank_slices
        ]
        return sorted(range(len(work)), key=lambda at: -work[at])

    def tokens(self, choice: Choice) -> Ints | None:
        """Tokens of the fullest rank's micro-batches, in order; None for full windows."""
        if self._packer is None:
            return None
        documents = self.heaviest(choice)
        if isinstance(documents, DividedStep):
            fullest = self._by_work(documents, expert_skew(choice))[0]
            sizes = [each.tokens for each in documents.rank_slices[fullest]]
            return np.array(sizes, dtype=np.int64)
        return np.array([sum(batch) for batch in documents[0]], dtype=np.int64)

    def bins(self, choice: Choice) -> Bins:
        """Micro-batches of the rank that has most work, by their tokens."""
        options, key = choice.options, pack_key(choice)
        if key not in self._bins:
            grain = max(1, options.micro_batch * options.context_tokens // _GRAINS)
            documents = self.heaviest(choice)
            if isinstance(documents, DividedStep):
                fullest = self._by_work(documents, expert_skew(choice))[0]
                row = documents.rank_slices[fullest]
                self._bins[key] = sort_slices(row, grain)
            else:
                self._bins[key] = sort_batches(documents[0], grain)
        return self._bins[key]


def _by_work(model: ModelSpec, packed: Documents, skew: float) -> list[int]:
    lengths = np.array([x for rank in packed for batch in rank for x in batch], np.float64)
    rank = np.repeat(np.arange(len(packed)), [sum(map(len, batches)) for batches in packed])
    each = 6 * token_weights(model, expert_skew=skew) * lengths
    pairs = lengths * (lengths + 1.0) / 2.0
    if model.window is not None:
        pairs += model.window.share * (windowed_pairs(model.window, lengths) - pairs)
    each += useful_flop(model, 0, 1) * pairs
    work = np.bincount(rank, each, len(packed))
    order: list[int] = np.argsort(-work, kind="stable").tolist()
    return order
