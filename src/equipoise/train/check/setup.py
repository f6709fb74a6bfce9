"""What follows from a case before anything is computed, and how far a rank's figures are off.

What it decides
    The error of a parameter is ``max |g - reference| / max |reference|`` over its elements, that
    of the logits over the largest logit of the sample.

Kept true (tests/multi/check/test_check.py)
    A gradient that is wrong in one parameter alone names it; bytes that were sent are those of
    the schedules.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.balance.context.plan import ContextPlan
from equipoise.balance.packing.pack import pack_step, skew
from equipoise.balance.packing.turns import TOGETHER, align_turns
from equipoise.cost.curve import counted_curve
from equipoise.nn.decoder import Decoder
from equipoise.schedule.attention.count import Wire, count_attention
from equipoise.sim.rank_loads import ContextPlanner
from equipoise.spec.pack import MicroBatch, PackedStep
from equipoise.spec.recompute import attention_repeats
from equipoise.spec.run.spec import PackSpec
from equipoise.train.check import pipeline as check_pipeline
from equipoise.train.check.case import Case, Verdict
from equipoise.train.check.sample import Reference, References, held_error, relative_error
from equipoise.train.context import Share
from equipoise.train.together import plan_turn


@dataclass(frozen=True, slots=True, eq=False)
class Setup:
    """What follows from a case before anything is computed."""

    case: Case
    planner: ContextPlanner
    packed: PackedStep
    labels: int
    expected: Reference

    @classmethod
    def of(cls, case: Case, references: References) -> "Setup":
        """Pack the sample as the case says, and compute on one rank what it must come to."""
        model, sample = references.model, references.sample
        pack = PackSpec(policy=case.policy, context_tokens=case.context_tokens)
        data_ranks = case.ranks // (case.layout.sharing * case.pp)
        packed = pack_step(
            sample.pieces,
            pack,
            data_ranks,
            counted_curve(model),
            meets_each_turn=case.layout.of_ranks(case.ranks // case.pp).meets_each_turn,
        )
        if case.policy in TOGETHER:
            packed = align_turns(packed)
        planner = ContextPlanner(model, case.layout)
        return cls(case, planner, packed, sample.count_labels(packed), references.of(packed))

    def plans(self) -> list[ContextPlan]:
        """Of the attention of every micro-batch, or of every turn of all ranks."""
        if self.case.policy in TOGETHER:
            model, tensor = self.planner.model, self.case.tp
            return [
                plan_turn(self.packed, turn, model, tensor=tensor, tensor_rank=rank)
                for turn in range(self.packed.micro_batches)
                for rank in range(tensor)
            ]
        if self.case.cp == 1:
            return []
        return [
            self.planner.plan(batch.doc_tokens.tolist(), tensor_rank=rank)
            for batch in self.packed
            for rank in range(self.case.tp)
        ]

    def scheduled(self) -> tuple[int, int]:
        """Bytes and messages of all attention layers of the step."""
        model = self.planner.model
        forwards = model.layers + attention_repeats(self.case.recompute, model.layers)
        width = 8 if model.experts else 4  # see ``check_sample``
        sent_bytes = messages = 0
        for plan in self.plans():
            counts = count_attention(plan.schedule, Wire(model.head_width, width, width))
            sent_bytes += forwards * int(counts.forward_bytes.sum())
            sent_bytes += model.layers * int(counts.backward_bytes.sum())
            messages += (forwards + model.layers) * int(counts.messages.sum())
        stages = (0, 0)
        if self.case.pp > 1:
            stages = check_pipeline.scheduled(self.case, model, self.packed)
        return sent_bytes + stages[0], messages + stages[1]

    def logits_error(self, logits: Tensor, share: Share, batch: MicroBatch) -> float:
        """Of this rank's rows, over the largest logit."""
        expected = self.expected.logits_of(batch)[share.rows]
        return relative_error(logits, expected, self.expected.largest_logit)

    def gradient_error(self, decoder: Decoder) -> tuple[float, str]:
        """Of the worst parameter, and its name."""
        errors = {
            name: held_error(parameter.grad, self.expected.gradients[name])
            for name, parameter in decoder.named_parameters()
        }
        worst = max(errors, key=lambda name: errors[name])
        return errors[worst], worst

    def verdict(
        self,
        loss: float,
        forward_error: float,
        gradient: tuple[float, str],
        sent_bytes: int,
        sent_messages: int,
    ) -> Verdict:
        """Figures of all ranks together, beside what is expected.

        Args:
            loss: Sum over ranks.
            forward_error: Of the logits, the largest.
            gradient: Error of the worst parameter, and its name.
            sent_bytes: Sum over ranks [bytes].
            sent_messages: Sum over ranks.
        """
        scheduled_bytes, scheduled_messages = self.scheduled()
        loads = self.planner.loads(self.packed, counted_curve(self.planner.model))
        return Verdict(
            case=self.case,
            micro_batches=self.packed.micro_batches,
            loss_error=relative_error(torch.tensor([loss]), torch.tensor([self.expected.loss])),
            forward_error=forward_error,
            gradient_error=gradient[0],
            worst_parameter=gradient[1],
            bytes=sent_bytes,
            messages=sent_messages,
            scheduled_bytes=scheduled_bytes,
            scheduled_messages=scheduled_messages,
            skew=skew(loads.predicted_s),
        )
