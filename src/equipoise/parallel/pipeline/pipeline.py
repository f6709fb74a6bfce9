"""A rank of a pipeline: runs steps, and sums gradients over replicas and over tied tables.

Why
    Whoever trains has a part of a decoder, the ranks that hold the other parts, and perhaps
    others that share this part's tokens or weights. One object knows them, and steps are one
    call.

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

    Under 0 and 1 nobody waits for a replica within a step, and replicas may have other numbers
    of micro-batches, other schedules even. Under 2 and 3, and wherever ranks share experts,
    replicas of a stage meet in its instructions: they must run the same ones in the same order,
    which is compared before each step (``schedule.pipeline.replicas``).

    A gradient that is split at once is whole no longer when the second half of its backward
    comes, and what waits for a second half would be kept whole until then. So under 2 and 3 both
    halves run at once, where the schedule has the first, and the second is nothing.

    A tied table's gradient is then summed over the first and the last stage's rank, shard by
    shard: each sends its own and adds the other's, and both have the same bits.

Kept true (tests/multi/parallel/test_pipeline.py)
    Loss and every gradient equal one rank's: alone, with replicas, with context and tensor
    parallelism, with experts, at every ZeRO stage, tied and untied, over several runs before a
    sum; ranks that would run different schedules are refused before one waits.
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
from equipoise.parallel.pipeline.executor import Executor, PipelineRun, StageBatch
from equipoise.parallel.pipeline.part import DecoderPart
from equipoise.parallel.pipeline.program import compile_rank
from equipoise.parallel.pipeline.replicas import Replicas
from equipoise.parallel.pipeline.slices import require_slices
from equipoise.parallel.zero.shard import ShardedDecoder
from equipoise.schedule.pipeline.check import check_pipeline
from equipoise.schedule.pipeline.schedule import PipelineSchedule

_TIED = 1 << 24
"""Tag of a tied table's gradient, above the number of any message of a step."""


class Pipeline:
    """This rank's part of a decoder among the ranks that hold the others."""

    def __init__(
        self,
        model: DecoderPart | ShardedDecoder,
        peers: Peers,
        *,
        dtype: torch.dtype | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        """Join the ranks of a pipeline; every rank of them does.

        Args:
            model: The stages of this rank; sharded where others hold the same stages.
            peers: Ranks of the pipeline, in its order: ``Mesh.peers("pp")``.
            dtype: Of hidden states between stages; that of the weights unless given.
            ledger: Counts what this rank sends to the others and receives.

        Raises:
            LayoutError: the model is a whole decoder.
        """
        self._sharded = model if isinstance(model, ShardedDecoder) else None
        part = model.decoder if isinstance(model, ShardedDecoder) else model
        if not isinstance(part, DecoderPart):
            raise LayoutError(
                "A pipeline runs parts, and this is a whole decoder. Cut it with DecoderPart, as "
                "the schedule's rank_of says."
            )
        self.part, self._peers = part, peers
        self._mail = Mail(peers.group, ledger)
        kept = next((p.dtype for p in part.parameters()), None)
        self._dtype = dtype or _join_dtype(kept, peers)
        self._is_narrow = self._sharded is not None and kept not in (None, self._dtype)
        self._replicas = None if self._sharded is None else Replicas.of(self._sharded, part)

    @property
    def ledger(self) -> Ledger:
        """What this rank has sent to the others of its pipeline, and received."""
        return self._mail.ledger

    def run(
        self,
        schedule: PipelineSchedule,
        batches: Sequence[StageBatch],
        *,
        divisor: float,
        allow_lossy: bool = False,
    ) -> PipelineRun:
        """Run a step's micro-batches; gradients are added to what is there.

        Args:
            schedule: The same on every rank of the pipeline.
            batches: Every micro-batch by its number; of any lengths, also without tokens.
            divisor: What losses are divided by before their backward: the global count of labels.
            allow_lossy: Whether micro-batches may skip stages.

        Raises:
            LayoutError: the schedule is for other ranks or stages, or not for these batches.
            CheckError: the schedule is not right, or another rank has another one.
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

    @property
    def _halves(self) -> bool:
        """Whether the weights' half of a backward may come later.

        Under bf16 it ends in a pass without tokens, in which ranks that share experts would meet.
        """
        if self._sharded is None or self._replicas is None:
            return True
        return self._sharded.sums_at_end and not (self._is_narrow and self._replicas.share_experts)

    def sum_gradients(self, rank_of: npt.NDArray[np.int64]) -> None:
        """Sum gradients over replicas and tied tables, once, after all runs of a step.

        Args:
            rank_of: The pipeline rank of each stage, as of the schedules that were run.
        """
        if self._sharded is not None:
            self._sharded.sum_gradients()
        drive(_tied_steps(self.part, rank_of, self._peers.rank), self._mail)

    def _widen(self) -> None:
        """Let ``fully_shard`` take over gradients that came without a backward of its own.

        It adds up in fp32 at the end of each backward, and a weight's half is none: a pass
        without tokens is.
        """
        none = torch.zeros(0, dtype=torch.int64, device=next(self.part.parameters()).device)
        self.part(none, (), labels_T=none).backward()

    def _require_agreement(self, schedule: PipelineSchedule, batches: Sequence[StageBatch]) -> None:
        """Refuse ranks that would wait for each other for ever."""
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
                f"Ranks {others} of the pipeline have another schedule, other stage edges or "
                f"other micro-batches than rank {self._peers.rank}. Give every rank the same pack, "
                f"prices and version of equipoise."
            )


def _join_dtype(kept: torch.dtype | None, peers: Peers) -> torch.dtype:
    """The dtype of the pipeline's weights, also on a rank whose stages have none."""
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
) -> list[PipelineRun]:
    """Run a step with all its ranks in this process, by the executor of real ranks.

    Args:
        parts: Of each rank, with weights of its own: a tied table is in two of them.
        schedule: For as many ranks.
        batches: Every micro-batch by its number.
        divisor: What losses are divided by before their backward.
        sent_bytes: What each rank sends to each, int64 [ranks, ranks]; added to [bytes].
        allow_lossy: Whether micro-batches may skip stages.

    Returns:
        Of each rank, what it gave; gradients are in the parts, tied ones summed. Add up one
        step at a time: the sum of a tied table is of all that its ``grad`` holds.

    Raises:
        LayoutError: schedule, parts and batches do not go together.
        CheckError: the schedule is not right.
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
    """Micro-batches of which this rank has no hidden states."""
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
            f"The schedule is for {schedule.ranks} ranks, the pipeline has {ranks}. Write it for "
            f"the ranks of the pipeline."
        )
    if schedule.stages != parts[0].stages:
        raise LayoutError(
            f"The schedule has {schedule.stages} stages, the decoder is cut into "
            f"{parts[0].stages}. Price and schedule the stages that it is cut into."
        )
    if schedule.micro_batches != len(batches):
        raise LayoutError(
            f"The schedule has {schedule.micro_batches} micro-batches, {len(batches)} are given. "
            f"Give every rank all of them, in the order in which they are priced."
        )
    require_slices([batch.pack for batch in batches], schedule.units.tolist())


def _tied_steps(part: DecoderPart, rank_of: npt.NDArray[np.int64], rank: int) -> Steps:
    """Add to a tied table's gradient that of the copy on the other end of the pipeline."""
    first, last = int(rank_of[0]), int(rank_of[-1])
    if not part.model.tied or first == last or rank not in (first, last):
        return
    peer = last if rank == first else first
    table = part.embed.weight
    if table.grad is None:
        table.grad = torch.zeros_like(table)
    mine = table.grad.to_local() if isinstance(table.grad, DTensor) else table.grad
    theirs = torch.empty_like(mine)
    if mine.numel():
        # A copy travels: the sum is made in place while the peer may still be reading.
        yield Post([_parcel(peer, mine.clone())], [_parcel(peer, theirs)])
        yield Await(0)
    mine += theirs


def _parcel(peer: int, tensor: torch.Tensor) -> Parcel:
    return Parcel(peer, _TIED, tensor.view(-1).view(torch.uint8), due=0)
