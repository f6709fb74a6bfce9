"""What the two ranks of ``bench.local.attention`` run: one core, both, and the peer, in turns.

Each rank is pinned to a core, its communication threads too. A round times every side once, in an
order that turns round from one round to the next; rank 0 alone runs the one-core side while
rank 1 waits.
"""

import dataclasses
import importlib
import importlib.metadata
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.lib.corpus import open_corpus
from equipoise.balance.context.plan import plan_context
from equipoise.comm.group import Ranks
from equipoise.comm.mail import Ledger, Mail, Parcel
from equipoise.cost.curve import LoadCurve
from equipoise.data.stream import DocumentStream
from equipoise.nn.attention import attend_documents
from equipoise.nn.measure import measure_curve
from equipoise.observe.machine import usable_cores
from equipoise.parallel.context.attention import attend_by_plan
from equipoise.schedule.attention.price import LinkPrice
from equipoise.spec.model.presets import ModelSpec
from equipoise.train.process import settle

HEADS, KV_HEADS, WIDTH = 8, 2, 64
SEED = 1  # of the packs; the executor was profiled on those of seed 0
ONE, COPIES = "one core", "two copies at once"
PEER = "axolotl-ringmaster"

Combo = tuple[str, str]
"""Strategy and sharding."""

Side = Callable[[], tuple[Tensor, ...]]
"""Runs forward and backward once: the output, and gradients of queries, keys and values."""


@dataclass(frozen=True)
class Case:
    """One pack, and what is timed on it."""

    tokens: int
    pack: int
    """Which pack of the stream."""
    rounds: int
    combos: tuple[Combo, ...]
    has_copies: bool = True
    """Whether both ranks also run the one-core side at once: what the machine itself loses."""
    has_peer: bool = False
    is_warmed: bool = True
    """Whether a round that is not counted comes first."""


@dataclass(frozen=True)
class Timed:
    """What one rank measured on one case."""

    seconds: dict[str | Combo, list[float]]
    """Seconds of each side, one figure a round."""
    cpu_s: dict[str | Combo, list[float]]
    """CPU seconds of all threads of this rank."""
    sent_bytes: dict[Combo, int]
    """Bytes that one forward and backward sends."""
    peer_error: dict[str, float]
    """The largest difference of a peer's output or gradient from one core's, over its scale."""


@dataclass(frozen=True)
class RankReport:
    """All that one rank measured."""

    cases: list[Timed]
    curve: LoadCurve | None
    """Attention on one core, measured by rank 0."""
    link: LinkPrice
    peer: str
    """The peer's version, or that it is missing."""
    cpu_s: float


def tell(text: str) -> None:
    """Show people the progress."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def pack_lengths(tokens: int, pack: int) -> list[int]:
    """Documents of a pack of Python sources; longer ones are cut."""
    stream = DocumentStream(open_corpus().doc_tokens, seed=SEED, context_tokens=tokens)
    pieces = stream.step(pack * tokens, tokens)
    return [int(stop - start) for _, start, stop in pieces.tolist()]


def draw(tokens: int) -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values that require gradients, and the gradient of the output."""
    source = torch.Generator().manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    *inputs, grad_o = (torch.randn(tokens, each, WIDTH, generator=source) for each in heads)
    return [x.requires_grad_() for x in inputs], grad_o


def side_of(attend: Callable[..., Tensor], inputs: Sequence[Tensor], grad_o: Tensor) -> Side:
    """Forward and backward of some attention."""

    def run() -> tuple[Tensor, ...]:
        out = attend(*inputs)
        return out.detach(), *torch.autograd.grad(out, inputs, grad_o)

    return run


def _pin(rank: int) -> None:
    """Every thread of this process on one core; ``settle`` pins the calling thread alone."""
    core = usable_cores()[rank]
    settle(rank, pin=False)
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})


def _measure_curve() -> LoadCurve:
    model = ModelSpec(
        layers=1, hidden=128, heads=HEADS, kv_heads=KV_HEADS, ffn=128, vocab=256, head_width=WIDTH
    )
    return measure_curve(
        model,
        context_tokens=8192,
        device=torch.device("cpu"),
        dtype=torch.float32,
        recompute="none",
    )


def _measure_link(ranks: Ranks) -> LinkPrice:
    """Latency and bandwidth of messages both ways at once, from a small and a large one."""
    times = {}
    for size_bytes in (4096, 4 << 20):
        data = [torch.zeros(size_bytes, dtype=torch.uint8) for _ in range(2)]
        mail, peer, rounds_s = Mail(), 1 - ranks.rank, []
        for _ in range(15):
            dist.barrier()
            began = time.perf_counter()
            mail.post([Parcel(peer, 0, data[0], 0)], [Parcel(peer, 0, data[1], 0)])
            mail.wait(0)
            rounds_s.append(time.perf_counter() - began)
        times[size_bytes] = statistics.median(rounds_s)
    (small, small_s), (large, large_s) = times.items()
    rate = (large - small) / max(large_s - small_s, 1e-9)
    return LinkPrice(max(small_s - small / rate, 0.0), rate)


def _peer_sides(
    ranks: Ranks, lengths: list[int], inputs: list[Tensor], grad_o: Tensor
) -> tuple[dict[str, Side], dict[str, Tensor]]:
    """The peer's two forms that train packs on CPU, and the rows of this rank under each."""
    distflash = importlib.import_module("ringmaster.ring.distflash").distflash_attention
    zigzag = importlib.import_module("ringmaster.ring.zigzag").zigzag_ring_attention
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    chunks = torch.arange(sum(lengths)).chunk(2 * ranks.world)
    last = 2 * ranks.world - 1 - ranks.rank
    shares = {
        f"{PEER} distflash": torch.arange(sum(lengths)).chunk(ranks.world)[ranks.rank],
        f"{PEER} zigzag": torch.cat((chunks[ranks.rank], chunks[last])),
    }
    sides = {}
    for (name, rows), attend in zip(shares.items(), (distflash, zigzag), strict=True):
        # The peer wants [1, heads, tokens, width] and returns [1, tokens, heads, width].
        mine = [x.detach()[rows].transpose(0, 1)[None].requires_grad_() for x in inputs]

        def call(*qkv: Tensor, attend: Any = attend) -> Tensor:
            out: Tensor = attend(*qkv, group=dist.group.WORLD, scaling=None, cu_seqlens=bounds)
            return out

        sides[name] = side_of(call, mine, grad_o[rows][None])
    return sides, shares


def _error(ours: tuple[Tensor, ...], wanted: tuple[Tensor, ...], rows: Tensor) -> float:
    """The largest difference over the scale of each tensor; gradients have heads first."""
    out, *grads = ours
    mine = [out[0], *(grad[0].transpose(0, 1) for grad in grads)]
    pairs = zip(mine, wanted, strict=True)
    return max(float((x - y[rows]).abs().max() / y.abs().max()) for x, y in pairs)


def _time_case(ranks: Ranks, case: Case, has_peer: bool) -> Timed:
    lengths = pack_lengths(case.tokens, case.pack)
    inputs, grad_o = draw(case.tokens)
    whole = side_of(lambda q, k, v: attend_documents(q, k, v, lengths), inputs, grad_o)
    sides: dict[str | Combo, Side] = {ONE: whole}
    if case.has_copies:
        sides[COPIES] = whole
    ledgers: dict[Combo, Ledger] = {}
    for strategy, sharding in case.combos:
        plan = plan_context(
            lengths, ranks.world, strategy, heads=HEADS, kv_heads=KV_HEADS, sharding=sharding
        )
        rows = torch.from_numpy(plan.shares.rows[ranks.rank])
        ledger = ledgers[strategy, sharding] = Ledger(ranks.world)
        mine = [x.detach()[rows].requires_grad_() for x in inputs]
        sides[strategy, sharding] = side_of(
            lambda q, k, v, plan=plan, ledger=ledger: attend_by_plan(q, k, v, plan, ledger=ledger),
            mine,
            grad_o[rows],
        )
    errors: dict[str, float] = {}
    if has_peer and case.has_peer:
        peers, shares = _peer_sides(ranks, lengths, inputs, grad_o)
        sides.update(peers.items())
        wanted = whole()
        errors = {name: _error(run(), wanted, shares[name]) for name, run in peers.items()}
    timed = Timed({side: [] for side in sides}, {side: [] for side in sides}, {}, errors)
    warm = 1 if case.is_warmed else 0
    for at in range(-warm, case.rounds):
        for name in list(sides)[:: -1 if at % 2 else 1]:
            dist.barrier()
            if name == ONE and ranks.rank:
                continue
            began, cpu_s = time.perf_counter(), time.process_time()
            sides[name]()
            if at >= 0:
                timed.seconds[name].append(time.perf_counter() - began)
                timed.cpu_s[name].append(time.process_time() - cpu_s)
        dist.barrier()
    for combo, ledger in ledgers.items():
        timed.sent_bytes[combo] = int(ledger.sent_bytes.sum()) // (warm + case.rounds)
    return timed


def measure_ranks(ranks: Ranks, cases: list[Case]) -> RankReport:
    """Time all cases on this rank."""
    _pin(ranks.rank)
    try:
        importlib.import_module("ringmaster.ring.zigzag")
        peer = importlib.metadata.version(PEER)
    except ImportError as error:
        peer = f"not installed ({error})"
    has_peer = not peer.startswith("not")
    link = _measure_link(ranks)
    if ranks.rank == 0:
        tell("measuring the curve of attention on one core")
    curve = _measure_curve() if ranks.rank == 0 else None
    timed = []
    for case in cases:
        if ranks.rank == 0:
            tell(f"pack {case.pack} of {case.tokens:,} tokens, {case.rounds} rounds")
        timed.append(_time_case(ranks, case, has_peer))
    if curve is not None:
        again = _measure_curve()  # what disturbed one of the two is left out
        fastest = map(min, curve.doc_ns, again.doc_ns)
        curve = dataclasses.replace(curve, doc_ns=tuple(fastest))
    return RankReport(timed, curve, link, peer, time.process_time())
