"""Score a packing policy over many steps of real lengths, beside what no policy could beat."""

import dataclasses
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.balance.bound import divisible_bound, largest_bin_bound
from equipoise.balance.context import split_context
from equipoise.balance.pack import DIVIDES, batch_ns, make_packer, skew
from equipoise.balance.windows import cut_at_windows
from equipoise.cost.curve import LoadCurve
from equipoise.cost.work import Ints
from equipoise.spec.pack import MicroBatch, PackedStep, Pieces
from equipoise.spec.run import PackSpec, Policy


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
    context_ranks: int = 1
    """Ranks that share each micro-batch."""
    kv_bytes_per_token: int = 0
    """Keys and values of one token over all layers [bytes]."""


@dataclass(frozen=True, slots=True)
class PackScore:
    """One policy over some steps; means over steps unless said otherwise."""

    policy: Policy
    skew: float
    """Heaviest over mean, predicted load of each bin, or of each bin's context ranks."""
    p95_skew: float
    """95th percentile over steps of the same."""
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
    bin_seconds: tuple[float, ...]
    """Predicted seconds of each bin, heaviest first."""


@dataclass(frozen=True, slots=True)
class PackedRecord:
    """One step as it was packed."""

    step: int
    packed: PackedStep
    is_flush: bool
    """Packed after the last step, from what was left waiting; not scored for skew."""

    @property
    def batches(self) -> list[MicroBatch]:
        """Micro-batches in order, all bins."""
        return [batch for batch in self.packed if len(batch.pieces)]


def bins_of(packed: PackedStep, bins: int) -> list[tuple[MicroBatch, ...]]:
    """Micro-batches of each bin: of each rank, or of each turn of a single rank."""
    if len(packed.ranks) == bins:
        return list(packed.ranks)
    return [(batch,) for batch in packed]


def split_batch(batch: MicroBatch, setting: Setting) -> list[Pieces]:
    """The pieces of a micro-batch that each context rank holds, as (document, start, stop)."""
    if not len(batch.pieces):
        return [batch.pieces] * setting.context_ranks
    split = split_context(batch.doc_tokens, setting.context_ranks, curve=setting.curve)
    shared = []
    for part in split.pieces:
        rows = batch.pieces[part[:, 0]]
        offset = rows[:, 1]
        shared.append(np.stack((rows[:, 0], offset + part[:, 1], offset + part[:, 2]), axis=1))
    return shared


def run_policy(policy: Policy, setting: Setting) -> tuple[list[PackedRecord], list[float]]:
    """Pack every step, and at the end what was left waiting.

    Returns:
        The packed steps and the seconds that planning each took.
    """
    # Slices in time stand in one pipeline; over ranks every bin is a rank.
    ranks = 1 if policy == "divided-in-time" else setting.bins
    packer = make_packer(dataclasses.replace(setting.pack, policy=policy), ranks, setting.curve)
    records, plan_s = [], []
    for step, pieces in enumerate(setting.steps):
        began = time.perf_counter()
        packed = packer.step(pieces)
        plan_s.append(time.perf_counter() - began)
        records.append(PackedRecord(step, packed, is_flush=False))
    for packed in packer.flush():
        records.append(PackedRecord(len(records), packed, is_flush=True))
    return records, plan_s


def score_policy(policy: Policy, setting: Setting) -> tuple[PackScore, list[PackedRecord]]:
    """Pack every step by one policy and score it; the packs, too."""
    records, plan_s = run_policy(policy, setting)
    cap = dataclasses.replace(setting.pack, policy=policy).most_tokens
    skews, gaps, loads, ratio, travel = [], [], [], 0.0, 0
    for record in records:
        ratio = max([ratio, *(batch.tokens / cap for batch in record.batches)])
        travel += _travel_tokens(record, setting)
        if record.is_flush:
            continue
        bins = bins_of(record.packed, setting.bins)
        seconds = [sum(batch_ns(batch, setting.curve) for batch in one) * 1e-9 for one in bins]
        skews.append(_skew(bins, seconds, setting))
        gaps.append(max(seconds) * 1e9 / _bound(record, setting, policy) - 1)
        loads.append(sorted(seconds, reverse=True))
    waited, tokens = _delays(records, setting)
    given = sum(len(pieces) for pieces in setting.steps)
    if setting.pack.cut == "windows":
        given = sum(
            len(cut_at_windows(pieces, setting.pack.context_tokens)) for pieces in setting.steps
        )
    score = PackScore(
        policy=policy,
        skew=float(np.mean(skews)),
        p95_skew=float(np.percentile(skews, 95)),
        gap=float(np.mean(gaps)),
        max_tokens_ratio=ratio,
        delay_mean=float((waited * tokens).sum() / tokens.sum()),
        delay_max=int(waited.max()),
        plan_s=float(np.mean(plan_s)),
        documents=sum(len(pieces) for pieces in setting.steps),
        fragments=sum(len(b.pieces) for record in records for b in record.batches) - given,
        travel_bytes=travel * setting.kv_bytes_per_token / len(setting.steps),
        bin_seconds=tuple(np.mean(loads, axis=0).tolist()),
    )
    return score, records


def _skew(bins: list[tuple[MicroBatch, ...]], seconds: list[float], setting: Setting) -> float:
    if setting.context_ranks == 1:
        return skew(seconds)
    cells = []
    for one in bins:
        shares = np.zeros(setting.context_ranks)
        for batch in one:
            if len(batch.pieces):
                split = split_context(batch.doc_tokens, setting.context_ranks, curve=setting.curve)
                shares += split.load_ns
        cells += shares.tolist()
    return skew(cells)


def _bound(record: PackedRecord, setting: Setting, policy: Policy) -> int:
    """Least load of the heaviest bin for these very pieces, dealt any other way."""
    if policy in DIVIDES:
        total = sum(batch_ns(batch, setting.curve) for batch in record.batches)
        return divisible_bound(np.array([total]), setting.bins)
    whole = np.concatenate([setting.curve.document_ns(b.doc_tokens) for b in record.batches])
    return largest_bin_bound(whole, setting.bins)


def _travel_tokens(record: PackedRecord, setting: Setting) -> int:
    """Tokens whose keys and values another rank must receive in the forward of this step."""
    travel = 0
    if record.packed.policy == "divided":
        for batch in record.batches:
            travel += _missing_tokens(batch)
    if setting.context_ranks > 1:
        for batch in record.batches:
            split = split_context(batch.doc_tokens, setting.context_ranks, curve=setting.curve)
            travel += int(np.sum(split.travel_tokens))
    return travel


def _missing_tokens(batch: MicroBatch) -> int:
    """Tokens that a micro-batch's pieces read and that it does not hold."""
    froms = batch.pieces[:, 1] - batch.history_tokens
    keys = np.stack((batch.pieces[:, 0], froms), axis=1)
    _, owner = np.unique(keys, axis=0, return_inverse=True)
    reach = np.zeros(owner.max() + 1, dtype=np.int64)
    np.maximum.at(reach, owner, batch.pieces[:, 2] - froms)
    held = np.bincount(owner, batch.doc_tokens).astype(np.int64)
    return int((reach - held).sum())


def _delays(records: list[PackedRecord], setting: Setting) -> tuple[Ints, Ints]:
    """Steps that each packed piece waited, and its tokens."""
    if not any(record.packed.policy == "delayed" for record in records):
        return np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64)
    arrived: dict[tuple[int, ...], deque[int]] = defaultdict(deque)
    for step, given in enumerate(setting.steps):
        pieces = given
        if setting.pack.cut == "windows":
            pieces = cut_at_windows(given, setting.pack.context_tokens)
        for row in pieces.tolist():
            arrived[tuple(row)].append(step)
    waited, tokens = [], []
    for record in records:
        for batch in record.batches:
            for row in batch.pieces.tolist():
                waited.append(record.step - arrived[tuple(row)].popleft())
                tokens.append(row[2] - row[1])
    return np.array(waited), np.array(tokens)
