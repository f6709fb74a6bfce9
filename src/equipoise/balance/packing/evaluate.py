"""Score a packing policy over many steps of real lengths, beside what no policy could beat."""

import dataclasses
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.balance.bound import divisible_bound, largest_bin_bound
from equipoise.balance.context.share import share_micro_batch
from equipoise.balance.packing.divided_price import MESSAGE_TOKENS, missing_tokens, travel_ns_of
from equipoise.balance.packing.pack import DIVIDES, batch_ns, make_packer, skew
from equipoise.balance.packing.turns import TOGETHER, align_turns
from equipoise.balance.packing.windows import cut_at_windows
from equipoise.base.arrays import Ints
from equipoise.base.errors import LayoutError
from equipoise.cost.curve import LoadCurve
from equipoise.spec.pack import MicroBatch, PackedStep, Pieces
from equipoise.spec.run.spec import PackSpec, Policy


@dataclass(frozen=True, slots=True)
class Setting:
    """What a policy is scored on."""

    steps: Sequence[Pieces]
    """Pieces of each step, as the stream cuts them."""
    pack: PackSpec
    """Windows and caps; its policy is not looked at."""
    bins: int
    """Whose loads are compared: data-parallel ranks, or micro-batches of one step."""
    curve: LoadCurve
    """Price of a document."""
    is_pipeline: bool = False
    """Whether the bins are the micro-batches of one pipeline, which can hold slices in time;
    else each is a data-parallel rank."""
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
    """Heaviest over mean, predicted load of each bin, or of each bin's context ranks."""
    p95_skew: float
    """95th percentile over steps of the same."""
    turn_skew: float
    """The heaviest bin of each turn, added up, over the mean: what counts where bins meet in every
    micro-batch. Of bins of one micro-batch each it is ``skew``."""
    gap: float
    """Heaviest bin over the least that any other deal of the same pieces could reach, minus 1;
    for a policy that divides documents, over the mean."""
    max_tokens_ratio: float
    """Largest micro-batch over its cap, the most over all steps."""
    delay_mean: float
    """Steps that a token waited."""
    delay_max: int
    """Steps that any document waited at most."""
    plan_s: float
    """Seconds to pack a step."""
    documents: int
    """Documents packed, over all steps."""
    fragments: int
    """Pieces beyond one a document, made by this policy, over all steps."""
    travel_bytes: float
    """Keys and values that go to other ranks in the forward of one step [bytes]."""
    step_s: float
    """Until the slowest context rank of a bin has computed, or those of all turns where bins meet
    in each, with what travels to it (``balance.packing.divided_price``), mean over steps [s]."""
    whole_step_s: float | None
    """The same under ``by-work``, of a policy that divides documents; None of others, and where
    documents cannot stay whole [s]."""
    bin_seconds: tuple[float, ...]
    """Predicted seconds of each bin, heaviest first."""


Bins = tuple[tuple[tuple[MicroBatch, ...], ...], ...]
"""Bins, their micro-batches, and what each context rank holds of one."""


@dataclass(frozen=True, slots=True)
class PackedRecord:
    """One step as it was packed."""

    step: int
    policy: Policy
    bins: Bins
    """What every context rank holds of every micro-batch of every bin."""
    is_flush: bool
    """Packed after the last step, from what was left waiting; not scored for skew."""
    turns: Bins | None = None
    """The same with all parts of a document in one turn, where several bins have parts."""

    @property
    def shares(self) -> list[MicroBatch]:
        """What each context rank holds, of all micro-batches."""
        return [share for micro_batches in self.bins for batch in micro_batches for share in batch]

    @property
    def micro_batches(self) -> list[tuple[MicroBatch, ...]]:
        """Each micro-batch as its context ranks hold it, in order."""
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
        """Likewise of each turn, int64 [turns, cells] [ns]."""
        return _turn_ns(self.turns or self.bins, curve)


def _turn_ns(bins: Bins, curve: LoadCurve) -> Ints:
    return _of_cells(bins, lambda share: batch_ns(share, curve))


def _of_cells(bins: Bins, measure: Callable[[MicroBatch], int]) -> Ints:
    """A number of each context rank of each bin in each turn, int64 [turns, cells]."""
    width = max(len(batch) for micro_batches in bins for batch in micro_batches)
    table = np.zeros((max(map(len, bins)), len(bins), width), dtype=np.int64)
    for place, micro_batches in enumerate(bins):
        for turn, batch in enumerate(micro_batches):
            table[turn, place] = [measure(share) for share in batch]
    return table.reshape(len(table), -1)


def run_policy(policy: Policy, setting: Setting) -> tuple[list[PackedRecord], list[float]]:
    """Pack every step, and at the end what was left waiting.

    Returns:
        The packed steps and the seconds that planning each took.
    """
    pack = dataclasses.replace(setting.pack, policy=policy, cut="documents")
    ranks = 1 if policy == "divided-in-time" and setting.is_pipeline else setting.bins
    meets = setting.meets_each_turn
    packer = make_packer(pack, ranks, setting.curve, meets_each_turn=meets)
    records, plan_s = [], []
    for step, pieces in enumerate(given_pieces(setting)):
        began = time.perf_counter()
        packed = packer.step(pieces)
        bins = _bins(packed.ranks, setting)
        plan_s.append(time.perf_counter() - began)
        turns = _aligned(packed, setting) if policy in TOGETHER else None
        records.append(PackedRecord(step, policy, bins, is_flush=False, turns=turns))
    for packed in packer.flush():
        bins = _bins(packed.ranks, setting)
        records.append(PackedRecord(len(records), policy, bins, is_flush=True))
    return records, plan_s


def given_pieces(setting: Setting) -> list[Pieces]:
    """Pieces of each step as the packer gets them."""
    if setting.pack.cut == "documents":
        return list(setting.steps)
    return [cut_at_windows(pieces, setting.pack.context_tokens) for pieces in setting.steps]


def _aligned(packed: PackedStep, setting: Setting) -> Bins | None:
    """Bins as ranks run them; None of a corpus so short that a document comes twice in a step."""
    try:
        return _bins(align_turns(packed).ranks, setting)
    except LayoutError:  # parts of the two copies have one name
        return None


def _bins(ranks: tuple[tuple[MicroBatch, ...], ...], setting: Setting) -> Bins:
    width = setting.context_ranks
    if setting.is_pipeline and len(ranks) == 1:
        ranks = tuple((batch,) for rank in ranks for batch in rank)
    return tuple(
        tuple(share_micro_batch(batch, width, setting.curve) for batch in rank) for rank in ranks
    )


def score_policy(policy: Policy, setting: Setting) -> tuple[PackScore, list[PackedRecord]]:
    """Pack every step by one policy and score it; the packs, too."""
    records, plan_s = run_policy(policy, setting)
    cap = dataclasses.replace(setting.pack, policy=policy).most_tokens
    scored = [record for record in records if not record.is_flush]
    skews = [skew(record.cell_ns(setting.curve).astype(float).tolist()) for record in scored]
    turns = [record.turn_ns(setting.curve) for record in scored]
    loads = [record.bin_ns(setting.curve) for record in scored]
    gaps = [max(ns) / _bound(record, setting) - 1 for ns, record in zip(loads, scored, strict=True)]
    fullest = max(
        sum(share.tokens for share in batch) for record in records for batch in record.micro_batches
    )
    waited, tokens = _delays(records, setting)
    travel = 0
    if policy != "divided-in-time" or setting.context_ranks > 1:
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
    """Time of a step with what travels, mean over steps [s]."""
    curve, travels = setting.curve, records[0].policy != "divided-in-time"
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
    if policy not in DIVIDES:
        return None
    try:
        records, _ = run_policy("by-work", setting)
    except LayoutError:  # no rank holds the longest, or there are fewer documents than ranks
        return None
    return _step_seconds(records, setting)


def _mean_seconds(loads: list[list[int]]) -> tuple[float, ...]:
    """Mean over steps of the heaviest bin, of the second, and so on [s]."""
    table = np.zeros((len(loads), max(map(len, loads))))
    for row, ns in zip(table, loads, strict=True):
        row[: len(ns)] = sorted(ns, reverse=True)
    return tuple((1e-9 * table.mean(0)).tolist())


def _bound(record: PackedRecord, setting: Setting) -> int:
    """Least load of the heaviest bin for these very pieces, dealt any other way."""
    bins = len(record.bins)
    if record.policy in DIVIDES:
        return divisible_bound(np.array(record.bin_ns(setting.curve)), bins)
    if setting.context_ranks == 1:
        pieces = np.concatenate([share.doc_tokens for share in record.shares])
        return largest_bin_bound(setting.curve.document_ns(pieces), bins)
    whole = [
        sum(batch_ns(share, setting.curve) for share in batch) for batch in record.micro_batches
    ]
    return largest_bin_bound(np.array(whole), bins)


def _missing(share: MicroBatch) -> tuple[int, int]:
    """Tokens that a rank's pieces read and that it does not hold, and their documents."""
    rows = np.column_stack((share.pieces, share.begins))
    tokens, documents = missing_tokens(np.zeros(len(rows), dtype=np.int64), rows, 1)
    return int(tokens[0]), int(documents[0])


def _delays(records: list[PackedRecord], setting: Setting) -> tuple[Ints, Ints]:
    """Steps that each packed token waited: of each piece, and its tokens."""
    if records[0].policy != "delayed":
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
