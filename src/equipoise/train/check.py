"""Prove that a layout equals one rank: loss, logits and every gradient, on uneven documents.

What it decides
    Cases on real ranks run over gloo, one after another on the same processes; played ones in
    this process, with the code that real ranks run and messages that are copied. Every rank
    compares what it holds itself: copies of a gradient that ZeRO 0 keeps may differ.

    The error of a parameter is ``max |g - reference| / max |reference|`` over its elements, that
    of the logits over the largest logit of the sample.

Kept true (tests/multi/test_check.py)
    A gradient that is wrong on one rank alone, or in one parameter alone, fails the case and
    names the parameter; so does a byte that no schedule speaks of.
"""

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.balance.pack import pack_step, skew
from equipoise.balance.turns import TOGETHER, align_turns
from equipoise.comm.group import Ranks
from equipoise.comm.local import run_ranks
from equipoise.comm.mail import Ledger
from equipoise.cost.curve import counted_curve
from equipoise.data.progress import Progress, SilentProgress
from equipoise.nn.decoder import Decoder, set_recompute
from equipoise.parallel.context.plan import ContextPlan
from equipoise.parallel.zero import ShardedDecoder
from equipoise.schedule.attention_count import Wire, count_attention
from equipoise.spec.model import ModelSpec
from equipoise.spec.pack import MicroBatch, PackedStep
from equipoise.spec.recompute import attention_repeats
from equipoise.spec.run import LayoutSpec, PackSpec
from equipoise.train import check_pipeline
from equipoise.train.check_case import Case, Verdict
from equipoise.train.check_progress import growing_file, tell
from equipoise.train.check_sample import (
    Reference,
    References,
    held_error,
    make_decoder,
    relative_error,
)
from equipoise.train.context import ContextGroup, Share, play_share
from equipoise.train.shares import ContextPlanner
from equipoise.train.together import Partners, plan_turn


@dataclass(frozen=True, slots=True, eq=False)
class _Setup:
    """What follows from a case before anything is computed."""

    case: Case
    planner: ContextPlanner
    packed: PackedStep
    labels: int
    expected: Reference

    @classmethod
    def of(cls, case: Case, references: References) -> "_Setup":
        model, sample = references.model, references.sample
        pack = PackSpec(policy=case.policy, context_tokens=case.context_tokens)
        data_ranks = case.ranks // (case.layout.sharing * case.pipeline)
        packed = pack_step(sample.pieces, pack, data_ranks, counted_curve(model))
        if case.policy in TOGETHER:
            packed = align_turns(packed)
        planner = ContextPlanner(model, case.layout)
        return cls(case, planner, packed, sample.count_labels(packed), references.of(packed))

    def plans(self) -> list[ContextPlan]:
        """Of the attention of every micro-batch, or of every turn of all ranks."""
        if self.case.policy in TOGETHER:
            turns = range(self.packed.micro_batches)
            return [plan_turn(self.packed, turn, self.planner.model) for turn in turns]
        if self.case.context == 1:
            return []
        return [
            self.planner.plan(batch.doc_tokens.tolist(), tensor_rank=rank)
            for batch in self.packed
            for rank in range(self.case.tensor)
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
        if self.case.pipeline > 1:
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


class _Logits:
    """The logits of a decoder's newest forward pass.

    They are taken while it runs, when the weights of its head are whole on every rank.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.newest: Tensor
        decoder.norm.register_forward_hook(self._take)

    def _take(self, module: nn.Module, args: object, x_tD: Tensor) -> None:
        del module, args
        with torch.no_grad():
            self.newest = self.decoder.logits(x_tD)


def _run_case(ranks: Ranks, case: Case, references: References, joined: ContextGroup) -> Verdict:
    """One rank's part of a case; the verdict is of the rank that is furthest off."""
    setup, sample = _Setup.of(case, references), references.sample
    sharing: ContextGroup | Partners
    if case.policy in TOGETHER:
        ledger = Ledger(ranks.world)
        sharing = dataclasses.replace(Partners.join(ranks, references.model), ledger=ledger)
    else:
        ledger = Ledger(case.context)
        sharing = dataclasses.replace(joined, planner=setup.planner, ledger=ledger)
    decoder = make_decoder(references.model, setup.labels)
    set_recompute(decoder, case.recompute)
    mesh = joined.mesh if case.shares_weights else None
    sharded = ShardedDecoder(
        decoder, ranks, zero=case.zero, precision="fp32", mesh=mesh, small_bytes=0
    )
    logits = _Logits(decoder)
    loss_sum, forward_error = 0.0, 0.0
    turns = sharing.turns(setup.packed)
    for index, turn in enumerate(turns):
        share = sharing.share(setup.packed, index, sample.batch(turn))
        last = index == len(turns) - 1 and not sharded.sums_at_end
        sharded.prepare_micro_batch(last=last)
        loss = decoder(share.tokens_t, share.pack, labels_T=share.labels_t) / setup.labels
        forward_error = max(forward_error, setup.logits_error(logits.newest, share, turn))
        loss.backward()
        loss_sum += float(loss.detach()) if sharing.counts_loss else 0.0
    if sharded.sums_at_end:
        sharded.sum_gradients()
    mine = (*setup.gradient_error(decoder), forward_error, loss_sum)
    sent = int(ledger.sent_bytes.sum()), int(ledger.sent_messages.sum())
    return _join_verdict(ranks, setup, (*mine, *sent))


def _run_pipeline(ranks: Ranks, case: Case, references: References) -> Verdict:
    """Likewise, of a case whose ranks share the layers."""
    setup, sample = _Setup.of(case, references), references.sample
    decoder = make_decoder(references.model, setup.labels)
    done = check_pipeline.compute(
        ranks, case, decoder, setup.packed, setup.labels, sample.batch, setup.logits_error
    )
    has_weights = any(True for _ in done.part.parameters())
    gradient = setup.gradient_error(done.part) if has_weights else (0.0, "")
    mine = (*gradient, done.forward_error, done.loss)
    return _join_verdict(ranks, setup, (*mine, done.sent_bytes, done.sent_messages))


def _join_verdict(
    ranks: Ranks, setup: _Setup, mine: tuple[float, str, float, float, int, int]
) -> Verdict:
    """Of what every rank found: gradient error and its parameter, logits, loss, bytes, messages."""
    errors, worst, forward_errors, losses, sent_bytes, messages = zip(
        *ranks.gather_objects(mine), strict=True
    )
    return setup.verdict(
        sum(losses),
        max(forward_errors),
        max(zip(errors, worst, strict=True)),
        sum(sent_bytes),
        sum(messages),
    )


def check_cases(
    ranks: Ranks, cases: list[Case], model: ModelSpec, done: Path | None = None
) -> list[Verdict]:
    """Run cases on these ranks, one after another; every rank has the same verdicts.

    Args:
        ranks: As many as each case says.
        cases: Not played.
        model: Whose layers, heads and widths are proven.
        done: File that grows by a byte with each case, for whoever shows progress.
    """
    references = References(model)

    @functools.cache
    def join(layout: LayoutSpec) -> ContextGroup:
        return ContextGroup.join(ranks, ContextPlanner(model, layout))

    found = []
    for case in cases:
        if case.pipeline > 1:
            found.append(_run_pipeline(ranks, case, references))
            tell(ranks, done)
            continue
        grouping = LayoutSpec(
            context=case.context,
            tensor=case.tensor,
            expert=case.expert,
            expert_tensor=case.expert_tensor,
            zero=case.zero if case.shares_weights else 0,  # whose mesh is used
        )
        found.append(_run_case(ranks, case, references, join(grouping)))
        tell(ranks, done)
    return found


def play_case(case: Case, references: References) -> Verdict:
    """Run a case with all its ranks in this process."""
    setup, sample = _Setup.of(case, references), references.sample
    decoder = make_decoder(references.model, setup.labels)
    set_recompute(decoder, case.recompute)
    logits = _Logits(decoder)
    sent = np.zeros((case.context, case.context), dtype=np.int64)
    loss_sum, forward_error = 0.0, 0.0
    for turn in setup.packed.ranks[0]:
        batch = sample.batch(turn)
        plan = setup.planner.plan(batch.doc_tokens)
        share = play_share(batch, plan, sent)
        loss = decoder(share.tokens_t, share.pack, labels_T=share.labels_t) / setup.labels
        forward_error = max(forward_error, setup.logits_error(logits.newest, share, turn))
        loss.backward()
        loss_sum += float(loss.detach())
    messages = setup.scheduled()[1]  # a message that nobody awaits would have ended the case
    gradient = setup.gradient_error(decoder)
    return setup.verdict(loss_sum, forward_error, gradient, int(sent.sum()), messages)


def play_cases(
    cases: list[Case], model: ModelSpec, progress: Progress | None = None
) -> list[Verdict]:
    """Run cases with all their ranks in this process."""
    progress = progress or SilentProgress()
    references, found = References(model), []
    progress.start("ranks played in one process", len(cases))
    try:
        for case in cases:
            found.append(play_case(case, references))
            progress.advance(1)
    finally:
        progress.finish()
    return found


def run_cases(
    cases: list[Case], model: ModelSpec, progress: Progress | None = None
) -> list[Verdict]:
    """Run cases on real gloo ranks, those of each number of ranks together."""
    progress, found = progress or SilentProgress(), list[Verdict]()
    for world in sorted({case.ranks for case in cases}):
        these = [case for case in cases if case.ranks == world]
        progress.start(f"{world} real rank{'s' if world > 1 else ''}", len(these))
        try:
            with growing_file(progress.advance) as done:
                found += run_ranks(world, check_cases, these, model, done)[0]
        finally:
            progress.finish()
    return found
