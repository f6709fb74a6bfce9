"""Functions of ranks in ``test_context``; their first argument is their ``Ranks``."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from equipoise.balance.context.plan import plan_context, plan_pieces
from equipoise.comm.drive import drive
from equipoise.comm.group import Ranks
from equipoise.comm.mail import Ledger, Mail
from equipoise.nn.attention import attend_documents
from equipoise.parallel.context.attention import (
    attend_by_plan,
    attend_in_one_process,
    check_ranks_agree,
    context_attention,
    gather_tokens,
    shard_tokens,
    token_positions,
)
from equipoise.parallel.context.forward import Forward
from equipoise.parallel.context.program import compile_rank
from equipoise.schedule.attention.count import Wire, count_attention
from equipoise.schedule.attention.mask import masks_of
from equipoise.spec.mask import CAUSAL, Mask

WIDTH = 16


@dataclass(frozen=True)
class Case:
    """One attention layer over one pack."""

    lengths: tuple[int, ...]
    strategy: str
    sharding: str
    heads: int
    kv_heads: int
    dtype: str = "float64"
    mask: Mask | tuple[Mask, ...] = CAUSAL


@dataclass(frozen=True)
class Told:
    """One rank's results on one case."""

    output_error: float
    gradient_error: float
    is_bitwise: bool
    """All ranks in one process, where this one plays them, and a rerun, where there is one."""
    sent_bytes: list[int]
    sent_messages: list[int]
    received_bytes: list[int]
    scheduled_bytes: list[list[int]]
    scheduled_messages: list[list[int]]


def draw(case: Case) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output, of the whole pack."""
    source = torch.Generator().manual_seed(1)
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    return [
        torch.randn(sum(case.lengths), each, WIDTH, dtype=torch.float64, generator=source)
        for each in heads
    ]


def attend_densely(case: Case, q, k, v) -> torch.Tensor:
    """Softmax over scores in one process, those outside the mask minus infinity."""
    if case.mask == CAUSAL:
        return attend_documents(q, k, v, case.lengths)
    masks = masks_of(case.mask, np.array(case.lengths))
    outs = []
    for mask, *parts in zip(masks, *(x.split(case.lengths) for x in (q, k, v)), strict=True):
        query, key = torch.meshgrid(*[torch.arange(len(parts[0]))] * 2, indexing="ij")
        allowed = key <= query
        if mask.kind == "full":
            allowed = allowed | ~allowed
        elif mask.kind == "window":
            allowed &= query - key < mask.window_tokens
        elif mask.kind == "prefix":
            starts = np.cumsum([mask.prefix_tokens, *mask.branch_tokens])
            branch = torch.searchsorted(torch.from_numpy(starts), query[:, 0], side="right")
            allowed &= (key < mask.prefix_tokens) | (branch[key] == branch[query])
        q_HtE, k_HtE, v_HtE = (x.transpose(0, 1) for x in parts)
        out = scaled_dot_product_attention(
            q_HtE[None], k_HtE[None], v_HtE[None], allowed, enable_gqa=True
        )
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def attend_cases(ranks: Ranks, cases: list[Case]) -> list[Told]:
    """Each case on all ranks, every second one twice; one of them plays it in one process."""
    return [
        attend_case(ranks, case, plays=number % ranks.world == ranks.rank, runs=2 - number % 2)
        for number, case in enumerate(cases)
    ]


def attend_case(ranks: Ranks, case: Case, *, plays: bool, runs: int) -> Told:
    dtype = getattr(torch, case.dtype)
    *reference, grad_o = draw(case)
    for x in reference:
        x.requires_grad_()
    wanted = attend_densely(case, *reference)
    wanted_grads = torch.autograd.grad(wanted, reference, grad_o)

    per_node = 2 if ranks.world % 2 == 0 else 1
    keys = {"sharding": case.sharding, "ranks_per_node": per_node}
    reruns = []
    for _ in range(runs):
        ledger = Ledger(ranks.world)
        mine = [
            shard_tokens(x.detach().to(dtype), case.lengths, **keys).requires_grad_()
            for x in reference
        ]
        out = context_attention(
            *mine, case.lengths, case.strategy, mask=case.mask, ledger=ledger, **keys
        )
        grads = torch.autograd.grad(out, mine, shard_tokens(grad_o.to(dtype), case.lengths, **keys))
        reruns.append([out.detach(), *grads])
    plan = plan_context(
        case.lengths,
        ranks.world,
        case.strategy,
        heads=case.heads,
        kv_heads=case.kv_heads,
        mask=case.mask,
        **keys,
    )
    check_ranks_agree(plan)
    gathered = [gather_tokens(x, case.lengths, **keys) for x in reruns[0]]
    is_bitwise = all(map(torch.equal, reruns[0], reruns[-1]))
    if plays:  # a play is that of all ranks, and so is what was gathered
        together = [x.detach().to(dtype).requires_grad_() for x in reference]
        out = attend_in_one_process(*together, plan)
        played = [out.detach(), *torch.autograd.grad(out, together, grad_o.to(dtype))]
        is_bitwise = is_bitwise and all(map(torch.equal, gathered, played))

    whole = [x.double() for x in gathered]
    tokens = sum(case.lengths)
    errors = [
        float((x - y.detach()).abs().max()) if tokens else 0.0
        for x, y in zip(whole, (wanted, *wanted_grads), strict=True)
    ]
    scale = max((float(g.abs().max()) for g in wanted_grads), default=1.0) if tokens else 1.0
    counts = count_attention(
        plan.schedule, Wire(WIDTH, dtype.itemsize, 8 if dtype == torch.float64 else 4)
    )
    return Told(
        errors[0] / (float(wanted.detach().abs().max()) if tokens else 1.0),
        max(errors[1:]) / scale,
        is_bitwise,
        ledger.sent_bytes.tolist(),
        ledger.sent_messages.tolist(),
        ledger.received_bytes.tolist(),
        (counts.forward_bytes + counts.backward_bytes).tolist(),
        (counts.messages + counts.messages.T).tolist(),
    )


def round_trip(ranks: Ranks, lengths: list[int], sharding: str) -> tuple[bool, list[int], int]:
    """Shard and gather token numbers; positions; bytes sent."""
    tokens = torch.arange(sum(lengths))
    ledger = Ledger(ranks.world)
    mine = shard_tokens(tokens, lengths, sharding=sharding)
    back = gather_tokens(mine, lengths, sharding=sharding, ledger=ledger)
    positions = token_positions(lengths, sharding=sharding)
    starts = torch.repeat_interleave(
        torch.tensor([0, *np.cumsum(lengths)])[:-1], torch.tensor(lengths)
    )
    is_right = torch.equal(back, tokens) and torch.equal(mine, starts[mine] + positions)
    return is_right, ledger.sent_bytes.tolist(), len(mine)


def round_trips(
    ranks: Ranks, lengths: list[int], shardings: list[str]
) -> dict[str, tuple[bool, list[int], int]]:
    return {each: round_trip(ranks, lengths, each) for each in shardings}


def in_a_part_of_the_ranks(ranks: Ranks, case: Case) -> float:
    """The same over a group of all ranks but the first; the error on it."""
    group = dist.new_group(list(range(1, ranks.world)))
    dist.barrier()  # a rank that leaves while others still connect would fail them
    if ranks.rank == 0:
        return 0.0
    q, k, v, _ = draw(case)
    wanted = attend_documents(q, k, v, case.lengths)
    mine = [shard_tokens(x, case.lengths, group, sharding=case.sharding) for x in (q, k, v)]
    out = context_attention(*mine, case.lengths, case.strategy, group, sharding=case.sharding)
    gathered = gather_tokens(out, case.lengths, group, sharding=case.sharding)
    return float((gathered - wanted).abs().max())


def with_pieces_placed_by_hand(ranks: Ranks) -> tuple[float, list[int]]:
    """Documents on ranks {0, 1}, {1, 2} and {3}; the error, and the bytes sent to each rank."""
    case = Case((50, 20, 7), "needed-kv", "", heads=4, kv_heads=2)
    home = [
        np.array([[0, 0, 30]]),
        np.array([[0, 30, 50], [1, 0, 8]]),
        np.array([[1, 8, 20]]),
        np.array([[2, 0, 7]]),
    ]
    plan = plan_pieces(home, case.lengths, heads=case.heads, kv_heads=case.kv_heads)
    *reference, grad_o = draw(case)
    for x in reference:
        x.requires_grad_()
    wanted = attend_documents(*reference, case.lengths)
    wanted = [wanted.detach(), *torch.autograd.grad(wanted, reference, grad_o)]
    rows = torch.from_numpy(plan.shares.rows[ranks.rank])
    mine = [x.detach()[rows].requires_grad_() for x in reference]
    ledger = Ledger(ranks.world)
    out = attend_by_plan(*mine, plan, ledger=ledger)
    actual = [out.detach(), *torch.autograd.grad(out, mine, grad_o[rows])]
    error = max(float((x - y[rows]).abs().max()) for x, y in zip(actual, wanted, strict=True))
    return error, ledger.sent_bytes.tolist()


def with_plans_that_differ(ranks: Ranks) -> None:
    strategy = "ring" if ranks.rank == 0 else "all-gather"
    check_ranks_agree(plan_context([9, 4], ranks.world, strategy, heads=2, kv_heads=1))


def with_the_share_of_another_sharding(ranks: Ranks) -> None:
    x = torch.zeros(3 if ranks.rank else 9, 2, 4)
    context_attention(x, x, x, [9, 4], "ring", sharding="contiguous")


def with_rows_of_another_sharding(ranks: Ranks) -> None:
    gather_tokens(torch.zeros(3), [9, 4], sharding="contiguous")


def with_rows_of_another_pack(ranks: Ranks) -> None:
    shard_tokens(torch.zeros(12), [9, 4])


class SlowMail(Mail):
    """Mail whose messages arrive some time after they are posted."""

    def __init__(self, delay_s: float) -> None:
        super().__init__()
        self.delay_s = delay_s
        self.arrival_s: dict[int, float] = {}
        self.waited_s: list[float] = []

    def post(self, sends, receives) -> None:
        super().post(sends, receives)
        for parcel in (*sends, *receives):
            self.arrival_s[parcel.due] = time.perf_counter() + self.delay_s

    def wait(self, due: int) -> None:
        super().wait(due)
        if due in self.arrival_s:
            left_s = self.arrival_s.pop(due) - time.perf_counter()
            self.waited_s.append(max(0.0, left_s))
            time.sleep(self.waited_s[-1])


def wait_with_delay(ranks: Ranks, tokens: int, delay_s: float) -> list[float]:
    """The rest of each ring hop's delay when its tiles are done [s]."""
    plan = plan_context([tokens], ranks.world, "ring", heads=2, kv_heads=2, sharding="head-tail")
    x = torch.randn(len(plan.shares.rows[ranks.rank]), 2, 64)
    mail = SlowMail(delay_s)
    drive(Forward(compile_rank(plan.schedule, ranks.rank), x, x, x).steps(), mail)
    return mail.waited_s


def digests_of_fresh_interpreters(seeds: list[int]) -> set[str]:
    """Digests of all strategies' schedules, from interpreters with other hash seeds."""
    code = (
        "from equipoise.balance.context.plan import plan_context\n"
        "from equipoise.schedule.attention.strategies import STRATEGIES\n"
        "from equipoise.spec.mask import Mask\n"
        "masks = [Mask('window', 70), Mask('full'), Mask('prefix', 0, 10, (100, 200))]\n"
        "print([plan_context([900, 7, 310], 4, s, heads=9, kv_heads=3, mask=masks,"
        " ranks_per_node=2).schedule.digest for s in STRATEGIES])"
    )
    return {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in seeds
    }
