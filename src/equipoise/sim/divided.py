"""A step whose documents are divided over ranks or over time, as the simulator takes it.

Why
    The lengths of a divided document's pieces do not show what they read in each other. As
    documents of their own they would have a fraction of the work, and no keys would travel.

What it decides
    *Over ranks* (``balance.packing.turns``): all parts of a document run in one turn. Ranks that
    documents join are a gang, which goes at one pace (``sim.gangs``); the others of the turn go
    at their own. A turn of a rank begins when the turns before it of all its gang have ended, so
    the step is the longest chain of gangs, which is replayed as one rank's. Under ZeRO 2 and 3,
    and where ranks share experts, all ranks meet in every turn.

    *Over time*: a rank's micro-batches read keys that earlier ones left behind. Nothing travels;
    the pipeline runs the units of micro-batches that share documents.

Kept true (tests/unit/sim/test_divided.py)
    Useful FLOP are those of the documents; no step is faster than an even share of its work.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.balance.packing.divided import macro_units
from equipoise.balance.packing.turns import align_turns, place_turn, require_policy
from equipoise.balance.stage import StageSplit
from equipoise.base.arrays import Floats, Ints
from equipoise.base.errors import LayoutError
from equipoise.cost.step.request import StepOptions, element_bytes
from equipoise.sim.gangs import TurnGang
from equipoise.sim.parts import BatchParts, PipelineRun, StepParts, run_pipeline, split_layers
from equipoise.spec.catalog import POLICIES
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.pack import MicroBatch, PackedStep, lengths_of
from equipoise.spec.recompute import layer_recompute, repeats_core

_SUM_BYTES = 4
"""Bytes of a key's gradient while it is summed."""


Documents = Sequence[Sequence[Sequence[int]]]
"""Documents' lengths in each micro-batch of each data-parallel rank [tokens]."""


@dataclass(frozen=True, slots=True, eq=False)
class SlicedBatch:
    """A micro-batch whose pieces read earlier micro-batches of the same rank."""

    doc_tokens: Ints
    """Length of each piece, int64 [pieces]."""
    pairs: Ints
    """Pairs of each piece with each earlier one of its document, int64 [tiles]."""

    @property
    def tokens(self) -> int:
        """Tokens of all pieces."""
        return int(self.doc_tokens.sum())

    @property
    def all_pairs(self) -> int:
        """Query-key pairs that its queries read."""
        return int((self.doc_tokens * (self.doc_tokens + 1) // 2).sum() + self.pairs.sum())


@dataclass(frozen=True, slots=True, eq=False)
class DividedStep:
    """A packed step of a policy that divides documents."""

    policy: str
    doc_tokens: Ints
    """Length of each whole document, int64 [documents]."""
    turns: tuple[tuple[TurnGang, ...], ...] = ()
    """Gangs of each turn, ranks that share nothing among them; of documents divided over ranks."""
    rows: tuple[tuple[SlicedBatch, ...], ...] = ()
    """Micro-batches of each data-parallel rank; of documents divided over time."""
    units: tuple[tuple[tuple[int, int], ...], ...] = ()
    """Runs of micro-batches that share documents, by rank; likewise."""

    @classmethod
    def of(cls, packed: PackedStep) -> "DividedStep":
        """Read a packer's answer.

        Raises:
            LayoutError: ranks would wait for each other in a circle.
        """
        if POLICIES[packed.policy].runs_together:
            aligned = align_turns(packed)
            turns = tuple(gangs_of(aligned, turn) for turn in range(aligned.micro_batches))
            each = [gang.doc_tokens for gangs in turns for gang in gangs]
            return cls(packed.policy, np.concatenate(each), turns)
        rows = tuple(tuple(_slices_of(rank)) for rank in packed.ranks)
        units = tuple(tuple(macro_units(rank)) for rank in packed.ranks)
        return cls(packed.policy, whole_tokens(packed), (), rows, units)

    def ranks(self, chosen: Sequence[int]) -> "DividedStep":
        """The pipelines of some ranks, or of all if ranks run documents together."""
        if self.turns:
            return self
        rows, units = tuple(self.rows[at] for at in chosen), tuple(self.units[at] for at in chosen)
        return DividedStep(self.policy, self.doc_tokens, (), rows, units)

    @property
    def rank_slices(self) -> list[list[SlicedBatch]]:
        """Micro-batches of each rank, with what each piece reads in others."""
        if not self.turns:
            return [list(row) for row in self.rows]
        slices: dict[int, list[SlicedBatch]] = defaultdict(list)
        for gangs in self.turns:
            for gang in gangs:
                for rank, pieces, pairs in zip(gang.ranks, gang.home, gang.pairs, strict=True):
                    size = lengths_of(pieces)
                    others = pairs - size * (size + 1) // 2
                    slices[rank].append(SlicedBatch(size, others[others > 0]))
        return [slices[rank] for rank in sorted(slices)]


def require_whole(documents: Documents | DividedStep) -> Documents:
    """Refuse documents that are divided.

    Raises:
        LayoutError: names the policy.
    """
    if isinstance(documents, DividedStep):
        raise LayoutError(
            f'pack.policy = "{documents.policy}" divides documents, and layers of their own, or '
            f"stages on several classes of nodes, are priced with whole documents. Take "
            f'pack.policy = "by-work", or one layout of all layers on one class of nodes.'
        )
    return documents


def keys_bytes(
    model: ModelSpec,
    layout: Layout,
    options: StepOptions,
    step: DividedStep,
    held: Sequence[Sequence[int]],
) -> Floats:
    """What each pipeline rank keeps of other pieces for its backward, float64 [pp] [bytes].

    Of documents divided over ranks the keys that it receives, until its backward has used them:
    of all layers that do not receive them again. Of those divided over time the sums of gradients
    that later micro-batches leave to earlier ones, and keys where layers keep none.

    Args:
        model: Sizes.
        layout: Degrees.
        options: Precision and recomputation.
        step: Its documents.
        held: Numbers of the layers of each rank.
    """
    width = element_bytes(options.precision)
    values = max(1, model.kv_heads // layout.tp) * (model.score_width + model.head_width)
    most = max((int(g.received_tokens.max()) for gangs in step.turns for g in gangs), default=0)
    later = 0
    for row, units in zip(step.rows, step.units, strict=True):
        sizes = [batch.tokens for batch in row]
        later = max(later, *(sum(sizes[first : stop - 1]) for first, stop in units))
    kept = np.zeros(len(held))
    for rank, mine in enumerate(held):
        again = [layer_recompute(options.recompute, layer) for layer in mine]
        receives = sum(not repeats_core(how) for how in again)
        alone = later * values * (_SUM_BYTES * len(mine) + width * again.count("full"))
        kept[rank] = most * values * width * max(1, receives) + alone
    return kept


def gangs_of(packed: PackedStep, turn: int) -> tuple[TurnGang, ...]:
    """Ranks that documents join in one turn; a rank without tokens is in none.

    Args:
        packed: As ``align_turns`` returns it.
        turn: Which micro-batch of each rank.

    >>> half, other = (MicroBatch(np.array([[7, *run]]), np.array([0])) for run in ((0, 5), (5, 9)))
    >>> short = MicroBatch(np.array([[8, 0, 3]]))
    >>> step = PackedStep("gangs", ((half,), (short,), (other,)))
    >>> [(gang.ranks, gang.doc_tokens.tolist()) for gang in gangs_of(step, 0)]
    [((0, 2), [9]), ((1,), [3])]
    """
    home, doc_tokens = place_turn(packed, turn)
    first = list(range(len(home)))  # lowest rank that each is joined to

    def root(rank: int) -> int:
        while first[rank] != rank:
            rank = first[rank]
        return rank

    holder: dict[int, int] = {}
    for rank, pieces in enumerate(home):
        for document in np.unique(pieces[:, 0]).tolist():
            low, high = sorted((root(holder.setdefault(document, rank)), root(rank)))
            first[high] = low
    joined: dict[int, list[int]] = defaultdict(list)
    for rank, pieces in enumerate(home):
        if len(pieces):
            joined[root(rank)].append(rank)
    gangs = []
    for ranks in joined.values():
        names = np.unique(np.concatenate([home[rank][:, 0] for rank in ranks]))
        mine = []
        for rank in ranks:
            pieces = home[rank].copy()
            pieces[:, 0] = np.searchsorted(names, pieces[:, 0])
            mine.append(pieces)
        gangs.append(TurnGang(tuple(ranks), tuple(mine), doc_tokens[names]))
    return tuple(gangs)


def _slices_of(rank: Sequence[MicroBatch]) -> Iterator[SlicedBatch]:
    earlier: dict[tuple[int, int], list[int]] = defaultdict(list)
    for batch in rank:
        pairs = []
        for (document, start, stop), begin in zip(
            batch.pieces.tolist(), batch.begins.tolist(), strict=True
        ):
            before = earlier[document, begin]
            pairs += [(stop - start) * tokens for tokens in before]
            before.append(stop - start)
        # A micro-batch of nothing has no price: it runs kernels of next to none.
        sizes = batch.doc_tokens if batch.tokens else np.ones(1, dtype=np.int64)
        yield SlicedBatch(sizes, np.array(pairs, dtype=np.int64))


def whole_tokens(packed: PackedStep) -> Ints:
    """Length of each document of a step, its parts together, int64 [documents]."""
    stops: dict[tuple[int, int], int] = {}
    for batch in packed:
        rows = zip(batch.pieces.tolist(), batch.begins.tolist(), strict=True)
        for (document, _, stop), begin in rows:
            stops[document, begin] = max(stops.get((document, begin), 0), stop)
    return np.array([stop - begin for (_, begin), stop in stops.items()], dtype=np.int64)


def typical_slices(row: Sequence[SlicedBatch]) -> SlicedBatch:
    """The micro-batch of median pairs: layers are split for it."""
    order = np.argsort([batch.all_pairs for batch in row], kind="stable")
    return row[int(order[len(order) // 2])]


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """Micro-batches that follow each other without a pause, from a step's begin to its end."""

    batches: tuple[BatchParts, ...]
    tokens: tuple[int, ...]
    """Tokens of the rank that has most in the same turn."""


def longest_chain(parts: StepParts, step: DividedStep, layout: Layout) -> Chain:
    """The gangs whose turns decide when a step ends.

    Args:
        parts: Prices of the setting's micro-batches.
        step: Of documents divided over ranks.
        layout: Says whether all ranks meet in every turn.
    """
    ends: dict[int, float] = defaultdict(float)
    last: dict[int, tuple[int, ...]] = defaultdict(tuple)
    priced: list[BatchParts] = []
    tokens: list[int] = []
    most = max(int(gang.tokens.max()) for gangs in step.turns for gang in gangs)
    for gangs in step.turns:
        each = [(parts.price_gang(gang), gang.ranks) for gang in gangs]
        widest = max(int(gang.tokens.max()) for gang in gangs)
        if layout.meets_each_turn:
            each = [(max((batch for batch, _ in each), key=batch_s), (0,))]
        for batch, ranks in each:
            latest = max(ranks, key=lambda rank: ends[rank])
            end, chain = ends[latest] + batch_s(batch), (*last[latest], len(priced))
            priced.append(batch)
            tokens.append(widest)
            for rank in ranks:
                ends[rank], last[rank] = end, chain
    longest = last[max(ends, key=lambda rank: ends[rank])]
    sizes = [tokens[at] for at in longest]
    sizes[int(np.argmax(sizes))] = most  # the fullest rank need not be part of the chain
    return Chain(tuple(priced[at] for at in longest), tuple(sizes))


def batch_s(batch: BatchParts) -> float:
    """Seconds of all layers and both ends [s]."""
    layers = {id(layer): layer for layer in batch.layers}
    counts = {key: sum(id(layer) == key for layer in batch.layers) for key in layers}
    in_layers = sum(counts[key] * float(layer.sum()) for key, layer in layers.items())
    return in_layers + float(batch.first.sum()) + float(batch.last.sum())


def run_divided(
    parts: StepParts, step: DividedStep, layout: Layout, options: StepOptions
) -> tuple[StageSplit, list[PipelineRun]]:
    """Layers to stages, and the pipelines that decide a step.

    Args:
        parts: Prices of the setting's micro-batches.
        step: Its documents.
        layout: Degrees.
        options: Schedule.

    Raises:
        LayoutError: ranks of this layout cannot run the policy.
    """
    require_policy(step.policy, context=layout.cp, pipeline=layout.pp)
    if step.turns:
        chain = longest_chain(parts, step, layout)
        split = split_layers(chain.batches[0], options, layout.pp * options.virtual)
        return split, [run_pipeline(chain.batches, split, layout, options, tokens=chain.tokens)]
    middle = typical_slices([batch for row in step.rows for batch in row])
    median = parts.price_slices(middle.doc_tokens, middle.pairs)
    split = split_layers(median, options, layout.pp * options.virtual)
    runs = []
    for row, units in zip(step.rows, step.units, strict=True):
        batches = [parts.price_slices(each.doc_tokens, each.pairs) for each in row]
        tokens = [each.tokens for each in row]
        runs.append(run_pipeline(batches, split, layout, options, tokens=tokens, units=units))
    return split, runs
