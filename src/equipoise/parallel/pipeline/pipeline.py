"""A rank of a pipeline: runs steps, and sums gradients over replicas and over tied tables.

Why
    A training rank has a part of a decoder, peers with the other parts, and perhaps others that
    share this part's tokens or weights. One object knows them all, and a step is one call.

What it decides
    ====  ================================  ===========================  =================
    zero  parameters                        gradients                    optimizer states
    ====  ================================  ===========================  =================
    0     whole                             summed once a step           whole
    1     whole during the step             summed and split at its end  split
    2     whole during the step             split in every backward      split
    3     gathered layer by layer, forward  split in every backward      split
          and backward of a micro-batch
    ====  ================================  ===========================  =================

    Under 0 and 1 replicas do not wait for each other within a step, and may have different numbers
    of micro-batches, even different schedules. Under 2 and 3, and wherever ranks share experts,
    replicas of a stage meet in its instructions: they must run the same ones in the same order,
    which is compared before each step (``schedule.pipeline.replicas``).

    If gradients are split in every backward, deferring the weight half would keep whole gradients
    until then. So under 2 and 3 both halves run at the schedule's first half, and the second does
    nothing.

    A tied table's gradient is then summed over the ranks of the first and last stage, shard by
    shard: each sends its own and adds the other's, so both have the same bits.

Kept true (tests/multi/parallel/test_pipeline.py)
    Loss and every gradient equal one rank's: alone, with replicas, with context and tensor
    parallelism, with experts, at every ZeRO stage, tied and untied, over several runs before a
    sum; ranks with different schedules raise an error before any of them waits.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from equipoise.base.digest import digest
from equipoise.base.errors import CheckError, LayoutError
from equipoise.comm.drive import drive, drive_together
from equipoise.comm.mail import Ledger, Mail, Parcel
from equipoise.comm.mesh import Peers
from equipoise.comm.steps import Await, Post, Steps
from equipoise.parallel.pipeline.executor import Executor, PipelineOutcome, StageBatch
from equipoise.parallel.pipeline.part import DecoderPart
from equipoise.parallel.pipeline.program import compile_rank
from equipoise.parallel.pipeline.replicas import Replicas
from equipoise.parallel.pipeline.slices import require_slices
from equipoise.parallel.zero.shard import ShardedDecoder
from equipoise.schedule.pipeline.check import check_pipeline
from equipoise.schedule.pipeline.orders import forwards_alone
from equipoise.schedule.pipeline.schedule import PipelineSchedule

_TIED = 1 << 24
"""Tag of a tied table's gradient, above the number of any message of a step."""


class Pipeline:
    """This rank's part of a decoder, and the ranks that hold the other parts."""

    def __init__(
        self,
        model: DecoderPart | ShardedDecoder,
        peers: Peers,
        *,
        dtype: torch.dtype | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        """Join the ranks of a pipeline; all of them must call this.

        Args:
            model: The stages of this rank; sharded if others hold the same stages.
            peers: Ranks of the pipeline, in its order: ``Mesh.peers("pp")``.
            dtype: Dtype of hidden states between stages; by default that of the weights.
            ledger: Counts what this rank sends to the others and receives.

        Raises:
            LayoutError: the model is not a ``DecoderPart``.
        """
        self._sharded = model if isinstance(model, ShardedDecoder) else None
        part = model.decoder if isinstance(model, ShardedDecoder) else model
        if not isinstance(part, DecoderPart):
            raise LayoutError(
                "A pipeline needs a part of a decoder, not a whole one. Cut it with DecoderPart, "
                "by the schedule's rank_of."
            )
        self.part, self._peers = part, peers
        self._mail = Mail(peers.group, ledger, peers.links)
        kept = next((p.dtype for p in part.parameters()), None)
        self._dtype = dtype or _join_dtype(kept, peers)
        self._is_narrow = self._sharded is not None and kept not in (None, self._dtype)
        self._replicas = None if self._sharded is None else Replicas.of(self._sharded, part)

    @property
    def ledger(self) -> Ledger:
        """What this rank has sent to its pipeline peers and received from them."""
        return self._mail.ledger

    def run(
        self,
        schedule: PipelineSchedule,
        batches: Sequence[StageBatch],
        *,
        divisor: float,
        allow_lossy: bool = False,
    ) -> PipelineOutcome:
        """Run a step's micro-batches; gradients are accumulated.

        Args:
            schedule: The same on every rank of the pipeline.
            batches: Every micro-batch by its number; of any lengths, even without tokens.
            divisor: The global count of labels, by which losses are divided.
            allow_lossy: Whether micro-batches may skip stages.

        Raises:
            LayoutError: the schedule does not match the ranks, the stages or the batches.
            CheckError: the schedule is wrong, or another rank has a different one.
        """
        self._require_agreement(schedule, batches)
        if self._replicas is not None:
            self._replicas.require_meetings(schedule)
        _require(schedule, self._peers.count, [self.part], batches)
        program = compile_rank(schedule, self._peers.rank, _empty(self.part, batches))
        check_pipeline(schedule, allow_lossy=allow_lossy)
        executor = Executor(
            self.part,
            program,
            batches,
            divisor=divisor,
            dtype=self._dtype,
            widen=self._widen if self._is_narrow else None,
            halves=self._halves,
        )
        if self._sharded is not None:
            self._sharded.prepare_micro_batch(last=False)
        drive(executor.steps(), self._mail)
        return executor.finish(schedule.ranks)

    def evaluate(
        self, rank_of: npt.NDArray[np.int64], batches: Sequence[StageBatch]
    ) -> PipelineOutcome:
        """Run the forwards of some micro-batches; nothing is kept for a backward.

        Replicas of a stage run equally many micro-batches where they meet in it.

        Args:
            rank_of: The rank of each stage; every micro-batch visits all of them.
            batches: Every micro-batch, as for ``run``.

        Raises:
            CheckError: another rank has other micro-batches.
        """
        schedule = forwards_alone(rank_of, len(batches))
        self._require_agreement(schedule, batches)
        program = compile_rank(schedule, self._peers.rank, _empty(self.part, batches))
        with torch.no_grad():
            executor = Executor(self.part, program, batches, divisor=1.0, dtype=self._dtype)
            drive(executor.steps(), self._mail)
        return executor.finish(schedule.ranks)

    @property
    def _halves(self) -> bool:
        """Whether the weight half of a backward may come later.

        Under bf16 it ends in a pass without tokens, in which ranks that share experts would meet.
        """
        if self._sharded is None or self._replicas is None:
            return True
        return self._sharded.sums_at_end and not (self._is_narrow and self._replicas.share_experts)

    def sum_gradients(self, rank_of: npt.NDArray[np.int64]) -> None:
        """Sum gradients over replicas and tied tables, once, after all runs of a step.

        Args:
            rank_of: The pipeline rank of each stage, from the schedules that were run.
        """
        if self._sharded is not None:
            self._sharded.sum_gradients()
        drive(_tied_steps(self.part, rank_of, self._peers.rank), self._mail)

    def _widen(self) -> None:
        """Let ``fully_shard`` accumulate gradients that it did not see in a backward.

        It accumulates in fp32 at the end of each backward. The weight half is not a backward, so
        this runs one without tokens.
        """
        none = torch.zeros(0, dtype=torch.int64, device=next(self.part.parameters()).device)
        self.part(none, (), labels_T=none).backward()

    def _require_agreement(self, schedule: PipelineSchedule, batches: Sequence[StageBatch]) -> None:
        """Refuse ranks that would wait for each other forever."""
        if self._peers.count == 1:
            return
        tokens = np.array([len(batch.tokens_t) for batch in batches], dtype=np.int64)
        name = int(digest([schedule.digest, tokens, self.part.edges])[:15], 16)
        device = batches[0].tokens_t.device if batches else torch.device("cpu")
        mine = torch.tensor([name], device=device)
        names = mine.new_empty(self._peers.count)
        dist.all_gather_single(names, mine, group=self._peers.group)
        others = torch.nonzero(names != name).flatten().tolist()
        if others:
            raise CheckError(
                f"Ranks {others} of the pipeline differ from rank {self._peers.rank} in their "
                f"schedule, stage edges or micro-batches. Give every rank the same pack, prices "
                f"and version of equipoise."
            )


def _join_dtype(kept: torch.dtype | None, peers: Peers) -> torch.dtype:
    """The dtype of the pipeline's weights, even on a rank whose stages have none."""
    names: list[torch.dtype | None] = [kept] * peers.count
    if peers.count > 1:
        dist.all_gather_object(names, kept, group=peers.group)
    return next((name for name in names if name is not None), torch.float32)


def play_pipeline(
    parts: Sequence[DecoderPart],
    schedule: PipelineSchedule,
    batches: Sequence[StageBatch],
    *,
    divisor: float,
    sent_bytes: npt.NDArray[np.int64] | None = None,
    allow_lossy: bool = False,
) -> list[PipelineOutcome]:
    """Run a step with all its ranks in this process, by the executor of real ranks.

    Args:
        parts: The part of each rank, with its own weights; a tied table is in two of them.
        schedule: A schedule for as many ranks.
        batches: Every micro-batch by its number.
        divisor: The count of labels, by which losses are divided.
        sent_bytes: Bytes that each rank sends to each, int64 [ranks, ranks]; added to in place.
        allow_lossy: Whether micro-batches may skip stages.

    Returns:
        The results of each rank; gradients are in the parts, tied ones summed. Accumulate only
        one step at a time: a tied table's sum covers everything in its ``grad``.

    Raises:
        LayoutError: schedule, parts and batches do not match.
        CheckError: the schedule is wrong.
    """
    _require(schedule, len(parts), parts, batches)
    programs = [
        compile_rank(schedule, rank, _empty(part, batches)) for rank, part in enumerate(parts)
    ]
    check_pipeline(schedule, allow_lossy=allow_lossy)
    dtype = next(p.dtype for part in parts for p in part.parameters())
    executors = [
        Executor(part, program, batches, divisor=divisor, dtype=dtype)
        for part, program in zip(parts, programs, strict=True)
    ]
    sent = np.zeros((len(parts), len(parts)), dtype=np.int64) if sent_bytes is None else sent_bytes
    drive_together([executor.steps() for executor in executors], sent)
    tied = [_tied_steps(part, schedule.rank_of, rank) for rank, part in enumerate(parts)]
    drive_together(tied, sent)
    return [executor.finish(schedule.ranks) for executor in executors]


def _empty(part: DecoderPart, batches: Sequence[StageBatch]) -> frozenset[int]:
    """Micro-batches for which this rank has no hidden states."""
    return frozenset(
        at for at, batch in enumerate(batches) if not part.count_rows(len(batch.tokens_t))
    )


def _require(
    schedule: PipelineSchedule,
    ranks: int,
    parts: Sequence[DecoderPart],
    batches: Sequence[StageBatch],
) -> None:
    if schedule.ranks != ranks:
        raise LayoutError(
            f"The schedule is for {schedule.ranks} ranks, but the pipeline has {ranks}. Write it "
            f"for the ranks of the pipeline."
        )
    if schedule.stages != parts[0].stages:
        raise LayoutError(
            f"The schedule has {schedule.stages} stages, but the decoder is cut into "
            f"{parts[0].stages}. Price and schedule the stages of the decoder."
        )
    if schedule.micro_batches != len(batches):
        raise LayoutError(
            f"The schedule has {schedule.micro_batches} micro-batches, but {len(batches)} were "
            f"given. Give every rank all of them, in the order in which they are priced."
        )
    require_slices([batch.pack for batch in batches], schedule.units.tolist())


def _tied_steps(part: DecoderPart, rank_of: npt.NDArray[np.int64], rank: int) -> Steps:
    """Add to a tied table's gradient that of its copy at the other end of the pipeline."""
    first, last = int(rank_of[0]), int(rank_of[-1])
    if not part.model.tied or first == last or rank not in (first, last):
        return
    peer = last if rank == first else first
    table = part.embed.weight
    if not table.requires_grad:
        return
    if table.grad is None:
        table.grad = torch.zeros_like(table)
    mine = table.grad.to_local() if isinstance(table.grad, DTensor) else table.grad
    theirs = torch.empty_like(mine)
    if mine.numel():
        # Send a copy: the sum is in place, and the peer may still be reading.
        yield Post([_parcel(peer, mine.clone())], [_parcel(peer, theirs)])
        yield Await(0)
    mine += theirs


def _parcel(peer: int, tensor: torch.Tensor) -> Parcel:
    return Parcel(peer, _TIED, tensor.view(-1).view(torch.uint8), due=0)
