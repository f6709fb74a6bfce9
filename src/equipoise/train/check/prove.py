"""Prove that a layout equals one rank: loss, logits and every gradient, on uneven documents.

What it decides
    Cases on real ranks run over gloo, one after another on the same processes; played ones in
    this process, with the code that real ranks run and messages that are copied. Every rank
    compares what it holds itself: copies of a gradient that ZeRO 0 keeps may differ.

    What a case expects, and how errors are measured, is ``train.check.setup``'s.

Kept true (tests/multi/check/test_check.py)
    A gradient that is wrong on one rank alone, or in one parameter alone, fails the case and
    names the parameter; so does a byte that no schedule speaks of.
"""

import dataclasses
import functools
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.balance.packing.turns import TOGETHER
from equipoise.comm.group import Ranks
from equipoise.comm.local import run_ranks
from equipoise.comm.mail import Ledger
from equipoise.data.progress import Progress, SilentProgress
from equipoise.nn.decoder import Decoder, set_recompute
from equipoise.parallel.zero.shard import ShardedDecoder
from equipoise.sim.rank_loads import ContextPlanner
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.run.spec import LayoutSpec
from equipoise.train.check import pipeline as check_pipeline
from equipoise.train.check.case import Case, Verdict
from equipoise.train.check.progress import growing_file, tell
from equipoise.train.check.sample import References, make_decoder
from equipoise.train.check.setup import Setup
from equipoise.train.context import ContextGroup, play_share
from equipoise.train.together import Partners


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
    setup, sample = Setup.of(case, references), references.sample
    sharing: ContextGroup | Partners
    if case.policy in TOGETHER:
        sharing = Partners.on_mesh(setup.planner, joined.mesh)
    else:
        sharing = dataclasses.replace(joined, planner=setup.planner, ledger=Ledger(case.cp))
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
    ledger = sharing.ledger
    sent = int(ledger.sent_bytes.sum()), int(ledger.sent_messages.sum())
    return _join_verdict(ranks, setup, (*mine, *sent))


def _run_pipeline(ranks: Ranks, case: Case, references: References) -> Verdict:
    """Likewise, of a case whose ranks share the layers."""
    setup, sample = Setup.of(case, references), references.sample
    decoder = make_decoder(references.model, setup.labels)
    done = check_pipeline.compute(
        ranks, case, decoder, setup.packed, setup.labels, sample.batch, setup.logits_error
    )
    has_weights = any(True for _ in done.part.parameters())
    gradient = setup.gradient_error(done.part) if has_weights else (0.0, "")
    mine = (*gradient, done.forward_error, done.loss)
    return _join_verdict(ranks, setup, (*mine, done.sent_bytes, done.sent_messages))


def _join_verdict(
    ranks: Ranks, setup: Setup, mine: tuple[float, str, float, float, int, int]
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
        if case.pp > 1:
            found.append(_run_pipeline(ranks, case, references))
            tell(ranks, done)
            continue
        grouping = LayoutSpec(
            cp=case.cp,
            tp=case.tp,
            ep=case.ep,
            etp=case.etp,
            zero=case.zero if case.shares_weights else 0,  # whose mesh is used
        )
        found.append(_run_case(ranks, case, references, join(grouping)))
        tell(ranks, done)
    return found


def play_case(case: Case, references: References) -> Verdict:
    """Run a case with all its ranks in this process."""
    setup, sample = Setup.of(case, references), references.sample
    decoder = make_decoder(references.model, setup.labels)
    set_recompute(decoder, case.recompute)
    logits = _Logits(decoder)
    sent = np.zeros((case.cp, case.cp), dtype=np.int64)
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
