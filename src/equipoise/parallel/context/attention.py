"""Packed attention over a process group: shard, attend, gather.

Why
    Your own model needs three functions and no framework: one that takes this rank's share of the
    inputs, one that attends over all ranks' shares, and one that gathers outputs again. Documents
    have any lengths, and nothing is padded.

What it decides
    All ranks of the group call each function with the same lengths and names; shares and
    schedule follow from those alone, so nothing is negotiated.

Kept true (tests/multi/parallel/test_context.py)
    Output and gradients equal one rank's for every strategy and sharding at 1 to 4 ranks.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.balance.context.continued import ContinuedPlan
from equipoise.balance.context.plan import ContextPlan, plan_context, share_tokens
from equipoise.base.errors import CheckError, LayoutError
from equipoise.comm.mail import Ledger, LinkGroups, Mail, Parcel
from equipoise.comm.steps import allocate, pack, unpack
from equipoise.nn.attention import cast_as_autocast, require_alike
from equipoise.nn.device.send import send
from equipoise.parallel.context.function import AttendInOneProcess, AttendOverRanks
from equipoise.parallel.context.program import compile_rank
from equipoise.spec.mask import CAUSAL, Mask
from equipoise.spec.pack import lengths_of


def context_attention(
    q_tHE: Tensor,
    k_tGE: Tensor,
    v_tGE: Tensor,
    doc_tokens: Sequence[int],
    strategy: str = "needed-kv",
    group: dist.ProcessGroup | None = None,
    *,
    mask: Mask | Sequence[Mask] = CAUSAL,
    sharding: str = "mixed",
    ranks_per_node: int | None = None,
    ledger: Ledger | None = None,
    softcap: float = 0.0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attention inside each document of a pack whose tokens lie on several ranks.

    Args:
        q_tHE: Queries of this rank's tokens [tokens, query heads, head width], RoPE applied; of
            any strides. Under ``torch.autocast`` all three are cast as torch's attention casts.
        k_tGE: Keys of the same tokens; the number of key/value heads divides the query heads.
        v_tGE: Values, shaped as the keys.
        doc_tokens: Length of each document of the whole pack, in order [tokens].
        strategy: What moves between ranks; ``schedule.attention.strategies.STRATEGIES``.
        group: The ranks that share the pack; all ranks unless given.
        mask: Which keys of its document a query reads: one mask for all documents, or one for
            each.
        sharding: Who holds which tokens, as in ``shard_tokens``.
        ranks_per_node: Ranks that share a node; for ``double-ring`` and ``usp``.
        ledger: Counts what this rank sends and receives, in both passes.
        softcap: Scores are ``softcap * tanh(score / softcap)``; 0 leaves them as they are.
        sinks_H: For each query head, a score in the softmax's denominator that belongs to no key;
            its gradient is this rank's part, to be summed over ranks.

    Returns:
        ``o_tHE`` of this rank's tokens, differentiable in queries, keys, values and sinks.

    Raises:
        LayoutError: the tensors do not go together, or not with this rank's share.
        SpecError: no strategy or sharding has that name, or masks do not go with documents.
    """
    q_tHE, k_tGE, v_tGE = cast_as_autocast(q_tHE, k_tGE, v_tGE)
    require_alike(q_tHE, k_tGE, v_tGE)
    plan = plan_context(
        doc_tokens,
        dist.get_world_size(group),
        strategy,
        heads=q_tHE.shape[1],
        kv_heads=k_tGE.shape[1],
        mask=mask,
        sharding=sharding,
        ranks_per_node=ranks_per_node,
    )
    return attend_by_plan(
        q_tHE, k_tGE, v_tGE, plan, group, ledger=ledger, softcap=softcap, sinks_H=sinks_H
    )


def attend_by_plan(
    q_tHE: Tensor,
    k_tGE: Tensor,
    v_tGE: Tensor,
    plan: ContextPlan | ContinuedPlan,
    group: dist.ProcessGroup | None = None,
    *,
    ledger: Ledger | None = None,
    links: LinkGroups | None = None,
    softcap: float = 0.0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """``context_attention`` with an existing plan, so that all layers of a model share one.

    Args:
        q_tHE: Queries of this rank's tokens: ``plan.shares.rows`` of the pack, or ``plan.rows`` of
            the new tokens of continued texts.
        k_tGE: Keys of the same tokens; of continued texts, text by text, the cached ones first.
        v_tGE: Values of the same tokens.
        plan: Of ``plan_context``, ``plan_pieces`` or ``plan_continued``; the same on every rank.
        group: As many ranks as the plan is for; all ranks unless given.
        ledger: Counts what this rank sends and receives, in both passes.
        links: ``Peers.links`` of the group, where messages have no tags.
        softcap: As for ``context_attention``.
        sinks_H: Likewise.

    Returns:
        ``o_tHE`` of this rank's tokens, differentiable in queries, keys, values and sinks.

    Raises:
        LayoutError: the tensors do not go together, or not with this rank's part of the plan.
    """
    q_tHE, k_tGE, v_tGE = cast_as_autocast(q_tHE, k_tGE, v_tGE)
    mail, schedule = Mail(group, ledger, links), plan.schedule
    if mail.ranks != schedule.ranks:
        raise LayoutError(
            f"The plan is for {schedule.ranks} ranks, but the group has {mail.ranks}. Plan for the "
            f"ranks of the group."
        )
    cached = int(lengths_of(schedule.cached[mail.rank]).sum()) if schedule.cached else 0
    require_alike(q_tHE, k_tGE, v_tGE, cached=cached)
    program = compile_rank(schedule, mail.rank, q_tHE.device)
    tokens, heads, kv_heads = len(q_tHE), q_tHE.shape[1], k_tGE.shape[1]
    if (tokens, heads, kv_heads) != (program.home_tokens, schedule.heads, schedule.kv_heads):
        raise LayoutError(
            f"Rank {mail.rank} of {mail.ranks} holds {program.home_tokens:,} tokens of this pack "
            f"in {schedule.heads} query heads and {schedule.kv_heads} key/value heads, but its "
            f"tensors have {tokens:,}, {heads} and {kv_heads}. Take its share with shard_tokens, "
            f"with the same lengths and the same sharding."
        )
    _require_sinks(sinks_H, heads)
    out: Tensor = AttendOverRanks.apply(  # type: ignore[no-untyped-call]
        q_tHE, k_tGE, v_tGE, sinks_H, softcap, program, mail
    )
    return out


def shard_tokens(
    x_T: Tensor,
    doc_tokens: Sequence[int],
    group: dist.ProcessGroup | None = None,
    *,
    sharding: str = "mixed",
    ranks_per_node: int | None = None,
) -> Tensor:
    """This rank's tokens of a pack that every rank has.

    Args:
        x_T: Anything with one row per token: token ids, labels, hidden states; [tokens, ...].
        doc_tokens: Length of each document of the pack, in order [tokens].
        group: The ranks that share the pack; all ranks unless given.
        sharding: Who holds which tokens: a strategy of ``balance.context.sharding``, or ``auto``.
        ranks_per_node: Ranks that share a node; for ``hierarchical``.

    Returns:
        Rows of this rank, in its order; differentiable.

    Raises:
        LayoutError: the rows are not as many as the documents' tokens.
        SpecError: no sharding has that name.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    shares = share_tokens(doc_tokens, ranks, sharding, ranks_per_node=ranks_per_node)
    if len(x_T) != shares.tokens:
        raise LayoutError(
            f"The pack has {len(x_T):,} rows, but its {len(doc_tokens)} documents have "
            f"{shares.tokens:,} tokens. Give one row per token."
        )
    return x_T[torch.from_numpy(shares.rows[rank]).to(x_T.device)]


def token_positions(
    doc_tokens: Sequence[int],
    group: dist.ProcessGroup | None = None,
    *,
    sharding: str = "mixed",
    ranks_per_node: int | None = None,
) -> Tensor:
    """Position of each of this rank's tokens in its document, int64 [tokens]; for RoPE."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    shares = share_tokens(doc_tokens, ranks, sharding, ranks_per_node=ranks_per_node)
    return torch.from_numpy(shares.positions[rank])


def gather_tokens(
    x_t: Tensor,
    doc_tokens: Sequence[int],
    group: dist.ProcessGroup | None = None,
    *,
    sharding: str = "mixed",
    ranks_per_node: int | None = None,
    ledger: Ledger | None = None,
) -> Tensor:
    """The whole pack on every rank, in the order of its documents; the reverse of sharding.

    It is for looking at results and has no gradient. To train, use this rank's tokens and sum
    the loss over ranks.

    Args:
        x_t: Rows of this rank's tokens [tokens, ...]; of the same shape and dtype elsewhere.
        doc_tokens: Length of each document of the pack, in order [tokens].
        group: The ranks that share the pack; all ranks unless given.
        sharding: As in ``shard_tokens``.
        ranks_per_node: Ranks that share a node; for ``hierarchical``.
        ledger: Counts what this rank sends and receives.

    Raises:
        LayoutError: the rows are not as many as this rank's tokens.
        SpecError: no sharding has that name.
    """
    mail = Mail(group, ledger)
    shares = share_tokens(doc_tokens, mail.ranks, sharding, ranks_per_node=ranks_per_node)
    rows = [torch.from_numpy(each).to(x_t.device) for each in shares.rows]
    if len(x_t) != len(rows[mail.rank]):
        raise LayoutError(
            f"Rank {mail.rank} of {mail.ranks} holds {len(rows[mail.rank]):,} tokens of this pack "
            f"under {sharding} sharding, not {len(x_t):,}. Give one row per token, and the "
            f"sharding they were taken with."
        )
    shape = x_t.shape[1:]
    peers = [peer for peer in range(mail.ranks) if peer != mail.rank]
    filled = [peer for peer in peers if len(rows[peer])]
    sections = {peer: [((len(rows[peer]), *shape), x_t.dtype)] for peer in filled}
    arriving = {peer: allocate(sections[peer], x_t.device) for peer in filled}
    mine = pack([x_t.detach()])
    sends = [Parcel(peer, 0, mine, 0) for peer in peers if len(x_t)]
    mail.post(sends, [Parcel(peer, 0, arriving[peer], 0) for peer in filled])
    gathered = x_t.new_empty((shares.tokens, *shape))
    gathered[rows[mail.rank]] = x_t.detach()
    mail.wait(0)
    for peer in filled:
        (gathered[rows[peer]],) = unpack(arriving[peer], sections[peer])
    return gathered


def attend_in_one_process(
    q_THE: Tensor,
    k_TGE: Tensor,
    v_TGE: Tensor,
    plan: ContextPlan,
    sent_bytes: npt.NDArray[np.int64] | None = None,
    *,
    softcap: float = 0.0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Run all ranks of a plan in this process, for checks and for study.

    Args:
        q_THE: Queries of the whole pack, in the order of its documents.
        k_TGE: Keys of the whole pack.
        v_TGE: Values of the whole pack.
        plan: Of ``plan_context``, for as many ranks as are to be played.
        sent_bytes: Bytes from each rank to each, int64 [ranks, ranks]; added to, in both passes.
        softcap: As for ``context_attention``.
        sinks_H: Likewise; their gradient is the whole.

    Returns:
        ``o_THE`` of the whole pack, differentiable in queries, keys, values and sinks.

    Raises:
        LayoutError: the tensors do not go together, or not with the plan.
    """
    q_THE, k_TGE, v_TGE = cast_as_autocast(q_THE, k_TGE, v_TGE)
    require_alike(q_THE, k_TGE, v_TGE)
    schedule = plan.schedule
    tokens, heads, kv_heads = len(q_THE), q_THE.shape[1], k_TGE.shape[1]
    if (tokens, heads, kv_heads) != (schedule.tokens, schedule.heads, schedule.kv_heads):
        raise LayoutError(
            f"The plan is for {schedule.tokens:,} tokens, {schedule.heads} query heads and "
            f"{schedule.kv_heads} key/value heads, but the tensors have {tokens:,}, {heads} and "
            f"{kv_heads}. Plan for these tensors."
        )
    if sent_bytes is None:
        sent_bytes = np.zeros((schedule.ranks, schedule.ranks), dtype=np.int64)
    device = q_THE.device
    order = send(torch.from_numpy(np.concatenate(plan.shares.rows)), device)
    programs = tuple(compile_rank(schedule, rank, device) for rank in range(schedule.ranks))
    parts = (x[order] for x in (q_THE, k_TGE, v_TGE))
    _require_sinks(sinks_H, heads)
    out: Tensor = AttendInOneProcess.apply(  # type: ignore[no-untyped-call]
        *parts, sinks_H, softcap, programs, sent_bytes
    )
    return out[torch.argsort(order)]


def _require_sinks(sinks_H: Tensor | None, heads: int) -> None:
    if sinks_H is not None and sinks_H.shape != (heads,):
        raise LayoutError(
            f"The sinks have shape {list(sinks_H.shape)}, but there are {heads} query heads. Give "
            f"one number for each."
        )


def check_ranks_agree(plan: ContextPlan, group: dist.ProcessGroup | None = None) -> None:
    """Refuse ranks that have planned differently.

    Raises:
        CheckError: names the first rank that differs from rank 0.
    """
    digests: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(digests, plan.schedule.digest, group=group)
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise CheckError(
                f"Rank {rank} has planned schedule {digest[:8]} and rank 0 {digests[0][:8]}. Give "
                f"all ranks the same lengths, masks, strategy and sharding."
            )
