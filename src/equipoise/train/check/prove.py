"""Prove that a layout equals one rank: loss, logits and every gradient, on uneven documents.

What it decides
    A case on real ranks is built as a run is (``train.build``), and ``StepRunner.gradients``, which
    training calls too, computes its step: nothing here packs, shares, schedules or reduces. Every
    rank compares what it holds itself: copies of a gradient that ZeRO 0 keeps may differ.

    Cases run one after another on the same ranks: processes over gloo, or *played* in one process,
    where ranks take turns and messages are copied (``comm.turns``).

Kept true (tests/multi/check/test_check.py, tests/multi/check/test_layout.py)
    A gradient that is wrong on one rank alone, in one parameter alone, or on a second run, fails
    the case and names the parameter; so does a byte that no schedule has.
"""

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from equipoise.balance.packing.pack import skew
from equipoise.balance.packing.turns import align_turns
from equipoise.base.errors import LayoutError
from equipoise.comm.group import Ranks
from equipoise.comm.local import run_ranks
from equipoise.comm.turns import play_ranks
from equipoise.cost.curve import LoadCurve, counted_curve
from equipoise.data.batch import make_batch
from equipoise.data.progress import Progress, SilentProgress
from equipoise.data.stream import DocumentStream
from equipoise.nn.decoder import Decoder
from equipoise.nn.packed import PackedModel
from equipoise.observe.journal import EventSink
from equipoise.parallel.expert.loads import remember_loads
from equipoise.schedule.pipeline.instruction import Op
from equipoise.spec.catalog import POLICIES
from equipoise.spec.pack import PackedStep
from equipoise.train.build import build_packer, build_runner, join_sharing
from equipoise.train.check.balanced import drawn_routes, earlier_loads
from equipoise.train.check.case import Case, Verdict
from equipoise.train.check.progress import growing_file, tell
from equipoise.train.check.sample import (
    Reference,
    References,
    Sample,
    loss_error,
    relative_error,
)
from equipoise.train.check.traffic import scheduled_traffic, with_encoders
from equipoise.train.context import ContextGroup
from equipoise.train.step import StepRunner
from equipoise.train.together import Partners

Sharing = ContextGroup | Partners

Build = Callable[..., StepRunner]
"""As ``train.build.build_runner``."""

_LONGEST_S = 3600.0
"""For all cases of a number of ranks."""


def prove_case(
    ranks: Ranks, case: Case, references: References, build: Build = build_runner
) -> Verdict:
    """One rank's part of a case; every rank has the verdict, which is of the worst of them.

    Args:
        ranks: As many as the case says; each calls this.
        case: A run.
        references: What cases share.
        build: Makes what runs the step.
    """
    resolved, sample, curve = case.resolved, references.sample(case), counted_curve(case.model)
    lengths, window = sample.pieces[:, 2], case.pack.context_tokens
    stream = DocumentStream(lengths, seed=case.train.seed, context_tokens=window)
    sharing = join_sharing(resolved, ranks, curve, stream)
    whole = references.decoder(case)
    routes = drawn_routes(case)
    extra = {} if routes is None else {"routes": routes}
    runner = build(
        resolved, ranks, sample.store, EventSink(), sharing, whole=whole, small_bytes=0, **extra
    )
    decoder, packed = runner.model.decoder, _pack(case, sample, curve)
    if isinstance(decoder, Decoder) and (earlier := earlier_loads(case)) is not None:
        remember_loads(decoder, earlier, step=1)
    reference = references.of(case, packed)
    logits = _LogitsWatch(decoder, _expect_logits(sharing, sample, packed, reference))
    made = runner.gradients(packed, step=1)
    ledgers = [sharing.ledger, *([runner.pipeline.pipeline.ledger] if runner.pipeline else [])]
    stages = sharing.stages if isinstance(sharing, ContextGroup) else None
    scheduled = (
        (None, None) if case.theirs else scheduled_traffic(case, packed, sharing.planner, stages)
    )
    if runner.modality is not None:
        ledgers.append(runner.modality.modality.sharded.ledger)
    scheduled = with_encoders(scheduled, made.encoders)
    gradient_error, worst = reference.gradient_error(decoder)
    mine = Verdict(
        case=case,
        micro_batches=packed.micro_batches,
        loss_error=loss_error(made.loss, reference.loss),
        forward_error=logits.finish() / reference.largest_logit,
        gradient_error=gradient_error,
        worst_parameter=worst,
        bytes=sum(int(ledger.sent_bytes.sum()) for ledger in ledgers),
        messages=sum(int(ledger.sent_messages.sum()) for ledger in ledgers),
        scheduled_bytes=scheduled[0],
        scheduled_messages=scheduled[1],
        skew=skew(sharing.loads(packed, curve).predicted_s),
        is_repeated=not case.repeats or _is_repeated(runner, packed, made.loss),
    )
    return _join(ranks.gather_objects(mine))


def _join(verdicts: list[Verdict]) -> Verdict:
    """The worst verdict of all ranks, and the bytes that they sent together."""
    worst = max(verdicts, key=lambda each: each.gradient_error)
    return dataclasses.replace(
        worst,
        forward_error=max(each.forward_error for each in verdicts),
        bytes=sum(each.bytes for each in verdicts),
        messages=sum(each.messages for each in verdicts),
        is_repeated=all(each.is_repeated for each in verdicts),
    )


def _pack(case: Case, sample: Sample, curve: LoadCurve) -> PackedStep:
    """The step that a run would pack of all documents."""
    packed = build_packer(case.resolved.spec, case.ranks, curve).step(sample.pieces)
    return align_turns(packed) if POLICIES[packed.policy].runs_together else packed


class _LogitsWatch:
    """How far off a decoder's logits are in the forward passes that are expected.

    They are taken while it runs, when the weights of its head are whole on every rank.
    """

    def __init__(self, decoder: PackedModel, expected: Iterator[Tensor]) -> None:
        self._decoder, self._expected, self._error = decoder, expected, 0.0
        self._norm = getattr(decoder, "norm", None)  # None where others have the last stage
        if self._norm is not None:
            self._norm.register_forward_hook(self._take)

    def finish(self) -> float:
        """The largest error; infinite where a pass that is expected did not come."""
        is_short = self._norm is not None and next(self._expected, None) is not None
        return float("inf") if is_short else self._error

    def _take(self, module: nn.Module, args: object, x_tD: Tensor) -> None:
        del module, args
        expected = next(self._expected, None)
        if expected is not None:  # else the pass without tokens that sums gradients
            with torch.no_grad():
                logits = self._decoder.logits(x_tD)
            self._error = max(self._error, relative_error(logits, expected, 1.0))


def _expect_logits(
    sharing: Sharing, sample: Sample, packed: PackedStep, reference: Reference
) -> Iterator[Tensor]:
    """Logits of this rank's rows of each micro-batch, in the order of forward passes."""
    turns = sharing.turns(packed)
    order: Iterable[int] = range(len(turns))
    if isinstance(sharing, ContextGroup) and sharing.stages is not None:
        schedule = sharing.stages.plan_rank(packed, sharing.data_rank).schedule
        instructions = schedule.instructions(sharing.mesh.coordinates["pp"])
        last = Op.FORWARD, schedule.stages - 1
        order = [each.micro_batch for each in instructions if (each.op, each.stage) == last]
    for turn in order:
        batch = make_batch(sample.store, turns[turn], torch.device("cpu"))
        yield reference.logits_of(turns[turn])[sharing.share(packed, turn, batch).rows]


def _is_repeated(runner: StepRunner, packed: PackedStep, loss: float) -> bool:
    """Whether the step, run anew, has the same loss and the same bits in every gradient."""
    weights = list(runner.model.decoder.parameters())
    first = [_local(weight.grad) for weight in weights]
    runner.optimizer.zero_grad(set_to_none=True)
    again = runner.gradients(packed, step=2).loss
    second = [_local(weight.grad) for weight in weights]
    return again == loss and all(map(_is_same, first, second))


def _local(grad: Tensor | None) -> Tensor | None:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def check_cases(
    ranks: Ranks,
    cases: Sequence[Case],
    done: Path | None = None,
    build: Build = build_runner,
    references: References | None = None,
) -> list[Verdict]:
    """Run cases on these ranks, one after another; every rank has the same verdicts.

    Args:
        ranks: As many as each case says.
        cases: All on as many ranks.
        done: File that grows by a byte with each case, for whoever shows progress.
        build: As for ``prove_case``.
        references: Likewise; of these cases alone unless given.
    """
    references, verdicts = references or References(), []
    for case in cases:
        try:
            verdicts.append(prove_case(ranks, case, references, build))
        except LayoutError as error:
            raise LayoutError(f"{case}: {error}") from error
        tell(ranks, done)
    return verdicts


def _take_turns(hosts: Ranks, cases: Sequence[Case], done: Path) -> list[Verdict]:
    """Some of the cases in this process, whose ranks take turns."""
    mine = cases[hosts.rank :: hosts.world]
    return play_ranks(mine[0].ranks, check_cases, mine, done, build_runner, References())[0]


def run_cases(
    cases: Sequence[Case], progress: Progress | None = None, *, over_gloo: bool = True
) -> list[Verdict]:
    """Run cases, those of each number of ranks together.

    Args:
        cases: In any order; verdicts are in the order of ranks, and then in this one.
        progress: Shows how many are done.
        over_gloo: Every rank is a process, and collectives are gloo's; else ranks take turns in
            one process, and as many processes as there are cores have some of the cases each.
    """
    progress, verdicts = progress or SilentProgress(), list[Verdict]()
    for world in sorted({case.ranks for case in cases}):
        these = [case for case in cases if case.ranks == world]
        kind = "real rank" if over_gloo else "played rank"
        progress.start(f"{world} {kind}{'s' if world > 1 else ''}", len(these))
        try:
            with growing_file(progress.advance) as done:
                if over_gloo:
                    verdicts += run_ranks(world, check_cases, these, done, timeout_s=_LONGEST_S)[0]
                    continue
                hosts = min(len(os.sched_getaffinity(0)), len(these))
                parts = run_ranks(hosts, _take_turns, these, done, timeout_s=_LONGEST_S)
                columns = itertools.zip_longest(*parts)
                verdicts += [each for column in columns for each in column if each is not None]
        finally:
            progress.finish()
    return verdicts
