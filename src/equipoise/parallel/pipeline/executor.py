"""Run one rank's part of a pipeline step: forwards, whole or split backwards, messages.

Why
    A step of any schedule is the same loop over instructions. Only the data differs.

What it decides
    Shapes follow from the pack: every rank knows how many tokens each micro-batch has, so each
    activation is received into a buffer of its size, and micro-batches of different lengths need
    no negotiation. An input or gradient from this rank's own stage is passed on without a copy.

    The executor is a coroutine, like that of context parallelism: it yields what to post and what
    to wait for, and a process group or a loop over ranks in one process moves the messages.

Kept true (tests/multi/parallel/test_pipeline.py, tests/unit/parallel/test_pipeline_executor.py)
    Loss and every gradient equal one rank's for every strategy; a rerun is equal bit for bit;
    a split backward leaves weights without a gradient until its second half; at the end nothing
    is kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equipoise.base.errors import LayoutError
from equipoise.comm.mail import Parcel
from equipoise.comm.steps import Await, Post, Steps, allocate, unpack
from equipoise.nn.attention import PackAttention
from equipoise.nn.defer import Deferred, defer_weights
from equipoise.nn.device.clock import make_marks
from equipoise.nn.modality.insert import Inserted
from equipoise.parallel.pipeline.part import DecoderPart
from equipoise.parallel.pipeline.program import PipelineProgram, Slot
from equipoise.parallel.pipeline.slices import LayerAttention, Resident, Slices
from equipoise.schedule.pipeline.instruction import Op
from equipoise.schedule.pipeline.messages import PipelineMessage
from equipoise.schedule.pipeline.replay import PipelineTimeline

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class StageBatch:
    """A micro-batch, as every stage of a pipeline takes it."""

    tokens_t: Tensor
    """Token ids of this rank's share, int64 [t]; the first stage reads them, the others only
    their number."""
    labels_t: Tensor
    """Next token of each, int64 [t]; the last stage reads them."""
    pack: Sequence[int] | PackAttention | Slices
    """Length of each document [tokens]; under context parallelism, how these tokens attend; or
    pieces, some of which read earlier micro-batches of their unit."""
    inserted: Inserted | None = None
    """Rows of images and sound among the tokens; the first stage reads them."""

    @property
    def counted(self) -> int:
        """Tokens according to the documents."""
        if isinstance(self.pack, PackAttention):
            return len(self.pack.positions_T)
        return self.pack.tokens if isinstance(self.pack, Slices) else int(sum(self.pack))


@dataclass(frozen=True, slots=True, eq=False)
class PipelineOutcome:
    """The results of one rank's part of a step."""

    losses: dict[int, Tensor]
    """Summed loss of each micro-batch, on the rank with the last stage; empty elsewhere."""
    timeline: PipelineTimeline
    """When this rank began and ended each instruction; it waits for messages in between."""

    @property
    def loss(self) -> float:
        """Sum over this rank's losses."""
        return float(sum(float(loss) for loss in self.losses.values()))


class Executor:
    """One rank in one step."""

    def __init__(
        self,
        part: DecoderPart,
        program: PipelineProgram,
        batches: Sequence[StageBatch],
        *,
        divisor: float,
        dtype: torch.dtype,
        widen: Callable[[], None] | None = None,
        halves: bool = True,
    ) -> None:
        """Prepare a step.

        Args:
            part: The stages that the program's rank holds.
            program: This rank's part of the schedule.
            batches: Every micro-batch of the step, by its number.
            divisor: The count of labels, by which the sum of losses is divided.
            dtype: Dtype of hidden states between stages.
            widen: Called after each weight gradient, to accumulate it in a wider dtype.
            halves: Whether weight gradients wait for their own instruction. If not, they are
                computed with the input's gradient, and that instruction does nothing.

        Raises:
            LayoutError: the part has other stages than the program, or the documents of a
                micro-batch are not as long as its tokens.
        """
        if part.held != program.held:
            raise LayoutError(
                f"Rank {program.rank} of the schedule holds stages "
                f"{', '.join(map(str, program.held))}, but its part has "
                f"{', '.join(map(str, part.held))}. Cut the decoder by the schedule's rank_of."
            )
        for at, batch in enumerate(batches):
            _require_batch(at, batch)
        self._part, self._program, self._batches = part, program, batches
        self._divisor, self._dtype, self._widen = divisor, dtype, widen
        self._halves = halves
        self._resident = Resident.of([batch.pack for batch in batches])
        self._inputs: dict[tuple[bool, int, int], Tensor] = {}
        """By (is it a gradient, stage, micro-batch): tensors that are here or on their way."""
        self._kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._later: dict[tuple[int, int], Deferred] = {}
        self._marks = make_marks(next((p.device for p in part.parameters()), _CPU))
        self.losses: dict[int, Tensor] = {}

    def steps(self) -> Steps:
        """Run the step; yields what to post and what to wait for."""
        for place, slot in enumerate(self._program.slots):
            if slot.receives:
                yield Post([], [self._expect(message) for message in slot.receives])
            yield Await(place)
            self._marks.mark()
            made = self._run(slot)
            self._marks.mark()
            if slot.send is not None and made is not None:
                sent = slot.send.message
                data = made.contiguous().view(-1).view(torch.uint8)
                yield Post([Parcel(sent.target, sent.number, data, slot.send.due)], [])
            elif slot.next_stage >= 0 and made is not None:
                is_gradient = slot.op != Op.FORWARD
                self._inputs[is_gradient, slot.next_stage, slot.micro_batch] = made
        yield Await(self._program.end)

    def finish(self, ranks: int) -> PipelineOutcome:
        """The step's results, once ``steps`` has ended."""
        slots = self._program.slots
        begins, ends = self._marks.read().at_ns.reshape(-1, 2).T
        table = np.array([(s.op, s.stage, s.micro_batch) for s in slots], dtype=np.int64)
        rank = np.full(len(slots), self._program.rank)
        op, stage, micro_batch = table.reshape(-1, 3).T
        timeline = PipelineTimeline("measured", ranks, rank, op, stage, micro_batch, begins, ends)
        return PipelineOutcome(self.losses, timeline)

    def _expect(self, message: PipelineMessage) -> Parcel:
        """A buffer for a message; the arriving tensor is a view of it."""
        tokens = len(self._batches[message.micro_batch].tokens_t)
        shape = (self._part.count_rows(tokens), self._part.model.hidden)
        sections = [(shape, self._dtype)]
        data = allocate(sections, self._batches[message.micro_batch].tokens_t.device)
        is_gradient = message.carries == "gradient"
        (arrives,) = unpack(data, sections)
        self._inputs[is_gradient, message.to_stage, message.micro_batch] = arrives
        return Parcel(message.source, message.number, data, message.needed_at)

    def _take(self, slot: Slot, *, is_gradient: bool) -> Tensor:
        batch = self._batches[slot.micro_batch]
        arrived = self._inputs.pop((is_gradient, slot.stage, slot.micro_batch), None)
        if arrived is None:  # a micro-batch without tokens does not travel
            width = self._part.model.hidden
            arrived = torch.zeros(0, width, dtype=self._dtype, device=batch.tokens_t.device)
        return arrived

    def _run(self, slot: Slot) -> Tensor | None:
        """Compute, and return what the next stage on the path needs, if anything."""
        at = slot.stage, slot.micro_batch
        if slot.op == Op.FORWARD:
            return self._forward(slot)
        if slot.op == Op.BACKWARD_WEIGHT and not self._halves:
            return None
        if slot.op == Op.BACKWARD_WEIGHT:
            self._later.pop(at).finish()
            if self._widen is not None:
                self._widen()
            return None
        given, out = self._kept.pop(at)
        grad = None if out.dim() == 0 else self._take(slot, is_gradient=True)
        if slot.op == Op.BACKWARD_INPUT and self._halves:
            self._later[at] = defer_weights(out)
        out.backward(grad)
        return given.grad

    def _forward(self, slot: Slot) -> Tensor | None:
        batch = self._batches[slot.micro_batch]
        is_last = slot.stage == self._part.stages - 1
        given = batch.tokens_t
        if slot.stage:
            given = self._take(slot, is_gradient=False).requires_grad_()
        labels = batch.labels_t if is_last else None
        pack: Sequence[int] | PackAttention | LayerAttention
        if isinstance(batch.pack, Slices):
            pack = self._resident.attention(batch.pack, batch.tokens_t.device)
        else:
            pack = batch.pack
        inserted = None if slot.stage else batch.inserted
        out: Tensor = self._part(given, pack, labels_T=labels, inserted=inserted, stage=slot.stage)
        if is_last:
            self.losses[slot.micro_batch] = out.detach()
            out = out / self._divisor
        if torch.is_grad_enabled():
            self._kept[slot.stage, slot.micro_batch] = given, out
        return None if is_last else out.detach()


def _require_batch(at: int, batch: StageBatch) -> None:
    tokens, labels = len(batch.tokens_t), len(batch.labels_t)
    if not tokens == labels == batch.counted:
        raise LayoutError(
            f"Micro-batch {at} has {tokens:,} tokens and {labels:,} labels, but its documents "
            f"have {batch.counted:,} tokens. All three must be equal."
        )
