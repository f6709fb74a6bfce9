"""Score a packing policy over many steps of real lengths, next to the bound no policy beats."""

import dataclasses
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.balance.bound import divisible_bound, largest_bin_bound
from equipoise.balance.context.share import share_micro_batch
from equipoise.balance.packing.divided_price import MESSAGE_TOKENS, missing_tokens, travel_ns_of
from equipoise.balance.packing.pack import batch_ns, make_packer, skew
from equipoise.balance.packing.turns import align_turns
from equipoise.balance.packing.windows import cut_at_windows
from equipoise.base.arrays import Ints
from equipoise.base.errors import LayoutError
from equipoise.cost.curve import LoadCurve
from equipoise.spec.catalog import POLICIES, Policy
from equipoise.spec.pack import MicroBatch, PackedStep, Pieces
from equipoise.spec.run.spec import PackSpec


@dataclass(frozen=True, slots=True)
class Setting:
    """What a policy is scored on."""

    steps: Sequence[Pieces]
    """Pieces of each step, cut by the stream."""
    pack: PackSpec
    """Windows and caps; its policy is ignored."""
    bins: int
    """Number of loads to compare: data-parallel ranks, or micro-batches of one step."""
    curve: LoadCurve
    """Price of a document."""
    is_pipeline: bool = False
    """Whether bins are the micro-batches of one pipeline, which can hold slices in time, and
    not data-parallel ranks."""
    context_ranks: int = 1
    """Ranks that share each micro-batch."""
    kv_bytes_per_token: int = 0
    """Keys and values of one token over all layers [bytes]."""
    meets_each_turn: bool = False
    """Whether data-parallel ranks wait for each other in every micro-batch."""


@dataclass(frozen=True, slots=True)
class PackScore:
    """One policy over some steps; means over steps unless said otherwise."""

    policy: Policy
    skew: float
    """Skew of the predicted loads of bins, or of their context ranks."""
    p95_skew: float
    """95th percentile of ``skew`` over steps."""
    turn_skew: float
    """Sum of each turn's heaviest bin, over the mean: what counts where bins meet in every
    micro-batch. Equal to ``skew`` if each bin has one micro-batch."""
    gap: float
    """Heaviest bin over its lower bound for the same pieces (over the mean for a policy that
    divides documents), minus 1."""
    max_tokens_ratio: float
    """Largest micro-batch over its cap; the maximum over steps."""
    delay_mean: float
    """Steps that a token waits."""
    delay_max: int
    """Most steps that any document waits."""
    plan_s: float
    """Seconds to pack a step."""
    documents: int
    """Documents packed, over all steps."""
    fragments: int
    """Pieces beyond one per document that this policy made, over all steps."""
    travel_bytes: float
    """Keys and values sent to other ranks in the forward of one step [bytes]."""
    step_s: float
    """Compute of the slowest context rank, or the sum over turns where bins meet in each, with
    what travels to it (``balance.packing.divided_price``); mean over steps [s]."""
    whole_step_s: float | None
    """The same under ``by-work``, if this policy divides documents; None otherwise, and if
    documents cannot stay whole [s]."""
    bin_seconds: tuple[float, ...]
    """Predicted seconds of each bin, heaviest first."""


Bins = tuple[tuple[tuple[MicroBatch, ...], ...], ...]
"""Bins, their micro-batches, and each context rank's part of one."""


@dataclass(frozen=True, slots=True)
class PackedRecord:
    """One packed step."""

    step: int
    policy: Policy
    bins: Bins
    """Every context rank's part of every micro-batch of every bin."""
    is_flush: bool
    """Whether it was packed after the last step, from waiting documents; skips the skew."""
    turns: Bins | None = None
    """The same with all parts of a document in one turn, if several bins have parts."""

    @property
    def shares(self) -> list[MicroBatch]:
        """Each context rank's parts of all micro-batches."""
        return [share for micro_batches in self.bins for batch in micro_batches for share in batch]

    @property
    def micro_batches(self) -> list[tuple[MicroBatch, ...]]:
        """Each micro-batch as its context ranks' parts, in order."""
        return [batch for micro_batches in self.bins for batch in micro_batches]

    def bin_ns(self, curve: LoadCurve) -> list[int]:
        """Predicted load of each bin, over all its context ranks [ns]."""
        return [
            sum(batch_ns(share, curve) for batch in micro_batches for share in batch)
            for micro_batches in self.bins
        ]

    def cell_ns(self, curve: LoadCurve) -> Ints:
        """Predicted load of each context rank of each bin, int64 [cells]; idle ones are 0 [ns]."""
        loads: Ints = _turn_ns(self.bins, curve).sum(0)
        return loads

    def turn_ns(self, curve: LoadCurve) -> Ints:
        """The same per turn, int64 [turns, cells] [ns]."""
        return _turn_ns(self.turns or self.bins, curve)


def _turn_ns(bins: Bins, curve: LoadCurve) -> Ints:
    return _of_cells(bins, lambda share: batch_ns(share, curve))


def _of_cells(bins: Bins, measure: Callable[[MicroBatch], int]) -> Ints:
    """Measure each context rank of each bin in each turn, int64 [turns, cells]."""
    width = max(len(batch) for micro_batches in bins for batch in micro_batches)
    table = np.zeros((max(map(len, bins)), len(bins), width), dtype=np.int64)
    for place, micro_batches in enumerate(bins):
        for turn, batch in enumerate(micro_batches):
            table[turn, place] = [measure(share) for share in batch]
    return table.reshape(len(table), -1)


def run_policy(policy: Policy, setting: Setting) -> tuple[list[PackedRecord], list[float]]:
    """Pack every step, and at the end what still waits.

    Returns:
        The packed steps, and the seconds to pack each.
    """
    pack = dataclasses.replace(setting.pack, policy=policy, cut="documents")
    traits = POLICIES[policy]
    ranks = 1 if traits.needs_pipeline and setting.is_pipeline else setting.bins
    meets = setting.meets_each_turn
    packer = make_packer(pack, ranks, setting.curve, meets_each_turn=meets)
    records, plan_s = [], []
    for step, pieces in enumerate(given_pieces(setting)):
        began = time.perf_counter()
        packed = packer.step(pieces)
        bins = _bins(packed.ranks, setting)
        plan_s.append(time.perf_counter() - began)
        turns = _aligned(packed, setting) if traits.runs_together else None
        records.append(PackedRecord(step, policy, bins, is_flush=False, turns=turns))
    for packed in packer.flush():
        bins = _bins(packed.ranks, setting)
        records.append(PackedRecord(len(records), policy, bins, is_flush=True))
    return records, plan_s


def given_pieces(setting: Setting) -> list[Pieces]:
    """Pieces of each step as the packer receives them."""
    if setting.pack.cut == "documents":
        return list(setting.steps)
    return [cut_at_windows(pieces, setting.pack.context_tokens) for pieces in setting.steps]


def _aligned(packed: PackedStep, setting: Setting) -> Bins | None:
    """Bins as ranks run them; None if the corpus is so short that a step repeats a document."""
    try:
        return _bins(align_turns(packed).ranks, setting)
    except LayoutError:  # the parts of the two copies share a name
        return None


def _bins(ranks: tuple[tuple[MicroBatch, ...], ...], setting: Setting) -> Bins:
    width = setting.context_ranks
    if setting.is_pipeline and len(ranks) == 1:
        ranks = tuple((batch,) for rank in ranks for batch in rank)
    return tuple(
        tuple(share_micro_batch(batch, width, setting.curve) for batch in rank) for rank in ranks
    )


def score_policy(policy: Policy, setting: Setting) -> tuple[PackScore, list[PackedRecord]]:
    """Pack every step by one policy; return its score and the packs."""
    records, plan_s = run_policy(policy, setting)
    cap = dataclasses.replace(setting.pack, policy=policy).most_tokens
    scored = [record for record in records if not record.is_flush]
    skews = [skew(record.cell_ns(setting.curve).astype(float).tolist()) for record in scored]
    turns = [record.turn_ns(setting.curve) for record in scored]
    loads = [record.bin_ns(setting.curve) for record in scored]
    gaps = [
        max(ns) / bound_ns(record, setting) - 1 for ns, record in zip(loads, scored, strict=True)
    ]
    fullest = max(
        sum(share.tokens for share in batch) for record in records for batch in record.micro_batches
    )
    waited, tokens = _delays(records, setting)
    travel = 0
    if not POLICIES[policy].needs_pipeline or setting.context_ranks > 1:
        travel = sum(_missing(share)[0] for record in records for share in record.shares)
    score = PackScore(
        policy=policy,
        skew=float(np.mean(skews)),
        p95_skew=float(np.percentile(skews, 95)),
        turn_skew=float(np.mean([ns.max(1).sum() / ns.sum(0).mean() for ns in turns])),
        gap=float(np.mean(gaps)),
        max_tokens_ratio=fullest / cap,
        delay_mean=float((waited * tokens).sum() / tokens.sum()),
        delay_max=int(waited.max()),
        plan_s=float(np.mean(plan_s)),
        documents=sum(len(pieces) for pieces in setting.steps),
        fragments=sum(len(share.pieces) for record in records for share in record.shares)
        - sum(len(pieces) for pieces in given_pieces(setting)),
        travel_bytes=travel * setting.kv_bytes_per_token / len(setting.steps),
        step_s=_step_seconds(scored, setting),
        whole_step_s=_whole_seconds(policy, setting),
        bin_seconds=_mean_seconds(loads),
    )
    return score, records


def _step_seconds(records: list[PackedRecord], setting: Setting) -> float:
    """Time of a step, travel included; mean over steps [s]."""
    curve, travels = setting.curve, not POLICIES[records[0].policy].needs_pipeline
    each_ns = travel_ns_of(curve, None) * (travels or setting.context_ranks > 1)

    def priced(share: MicroBatch) -> int:
        tokens, documents = _missing(share)
        return batch_ns(share, curve) + round(each_ns * (tokens + MESSAGE_TOKENS * documents))

    tables = [_of_cells(record.turns or record.bins, priced) for record in records]
    fixed = round(curve.fixed_ns)
    if setting.meets_each_turn:
        return 1e-9 * float(np.mean([(table.max(1) + fixed).sum() for table in tables]))
    return 1e-9 * float(np.mean([(table + fixed).sum(0).max() for table in tables]))


def _whole_seconds(policy: Policy, setting: Setting) -> float | None:
    if not POLICIES[policy].divides:
        return None
    try:
        records, _ = run_policy("by-work", setting)
    except LayoutError:  # the longest fits on no rank, or documents are fewer than ranks
        return None
    return _step_seconds(records, setting)


def _mean_seconds(loads: list[list[int]]) -> tuple[float, ...]:
    """Mean over steps of the heaviest bin, the second heaviest, and so on [s]."""
    table = np.zeros((len(loads), max(map(len, loads))))
    for row, ns in zip(table, loads, strict=True):
        row[: len(ns)] = sorted(ns, reverse=True)
    return tuple((1e-9 * table.mean(0)).tolist())


def bound_ns(record: PackedRecord, setting: Setting) -> int:
    """Lower bound on the heaviest bin for the same pieces."""
    bins = len(record.bins)
    if POLICIES[record.policy].divides:
        return divisible_bound(np.array(record.bin_ns(setting.curve)), bins)
    if setting.context_ranks == 1:
        pieces = np.concatenate([share.doc_tokens for share in record.shares])
        return largest_bin_bound(setting.curve.document_ns(pieces), bins)
    whole = [
        sum(batch_ns(share, setting.curve) for share in batch) for batch in record.micro_batches
    ]
    return largest_bin_bound(np.array(whole), bins)


def _missing(share: MicroBatch) -> tuple[int, int]:
    """Tokens that a rank's pieces read but it does not hold, and their documents."""
    rows = np.column_stack((share.pieces, share.begins))
    tokens, documents = missing_tokens(np.zeros(len(rows), dtype=np.int64), rows, 1)
    return int(tokens[0]), int(documents[0])


def _delays(records: list[PackedRecord], setting: Setting) -> tuple[Ints, Ints]:
    """Steps that each packed piece waited, and its tokens."""
    if not POLICIES[records[0].policy].lets_wait:
        return np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64)
    arrived: dict[tuple[int, int], deque[int]] = defaultdict(deque)
    for step, pieces in enumerate(given_pieces(setting)):
        for document, start, _ in pieces.tolist():
            arrived[document, start].append(step)
    waited, tokens = [], []
    for record in records:
        for batch in record.micro_batches:
            rows = np.concatenate([share.pieces for share in batch])
            froms = np.concatenate([share.begins for share in batch])
            for document, begin in {*zip(rows[:, 0].tolist(), froms.tolist(), strict=True)}:
                mine = rows[(rows[:, 0] == document) & (froms == begin)]
                waited.append(record.step - arrived[document, begin].popleft())
                tokens.append(int((mine[:, 2] - mine[:, 1]).sum()))
    return np.array(waited), np.array(tokens)
