"""Prove every legal layout: loss and all gradients against one rank, twice, to the bit.

Why
    Each axis is proven alone and beside some others by ``train.check.prove``. What goes wrong
    between three of them, at one ZeRO stage, with an odd number of replicas, nobody thinks of.
    There are some two thousand legal layouts of up to 8 ranks: few enough to run them all.

What it decides
    Each layout runs a step of uneven documents, some micro-batches without tokens, by the code
    that trains. It is held against the plain model in one process in fp64, one document after
    another; each rank compares what it holds, so nothing is gathered, and copies are compared
    each. Then the same step runs again, and every gradient must have the same bits.

Kept true (tests/multi/check/test_layout.py)
    A gradient that is wrong on one rank, or another one on a second run, fails the layout and is
    named.
"""

import itertools
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from equipoise.balance.packing.pack import pack_step
from equipoise.base.errors import LayoutError
from equipoise.comm.group import Ranks
from equipoise.comm.local import run_ranks
from equipoise.comm.mail import Ledger
from equipoise.comm.mesh import Mesh
from equipoise.comm.turns import play_ranks
from equipoise.cost.curve import counted_curve
from equipoise.data.progress import Progress, SilentProgress
from equipoise.nn.decoder import Decoder
from equipoise.nn.moe.balance import balances, set_loss_scale
from equipoise.parallel.pipeline.executor import StageBatch
from equipoise.parallel.pipeline.part import DecoderPart
from equipoise.parallel.pipeline.pipeline import Pipeline
from equipoise.parallel.zero.shard import ShardedDecoder
from equipoise.schedule.pipeline.prices import make_prices
from equipoise.schedule.pipeline.schedule import PipelineSchedule
from equipoise.schedule.pipeline.strategies import write_pipeline
from equipoise.sim.rank_loads import ContextPlanner
from equipoise.spec.layout import Layout
from equipoise.spec.model.presets import ModelSpec
from equipoise.spec.pack import PackedStep
from equipoise.spec.run.spec import TWO_STAGES, LayoutSpec, PackSpec
from equipoise.train.check.all_legal_case import LayoutCase, LayoutVerdict, Precision
from equipoise.train.check.pipeline import even_edges
from equipoise.train.check.progress import growing_file, tell
from equipoise.train.check.sample import Sample, compute_reference, held_error, make_decoder
from equipoise.train.context import ContextGroup

DOCUMENT_TOKENS = (17, 3, 1, 9, 12, 2, 6, 4)
_WINDOW_TOKENS = 27
"""Of a micro-batch: no document is cut, so all layouts have one reference."""

_LONGEST_S = 3600.0
"""For all layouts of a number of ranks."""


class _Known:
    """What layouts of one model share: weights, documents, and what one rank makes of them."""

    def __init__(self, model: ModelSpec) -> None:
        self.sample = Sample.draw(model.vocab, DOCUMENT_TOKENS)
        self.pack = PackSpec(policy="by-work", context_tokens=_WINDOW_TOKENS)
        self.curve = counted_curve(model)
        packed = self.packed(Layout())
        self.labels = self.sample.count_labels(packed)
        self.initial = make_decoder(model, self.labels).double()
        self.reference = compute_reference(self.initial, self.sample, packed)
        self.scales = {
            name: float(grad.abs().max()) for name, grad in self.reference.gradients.items()
        }

    def packed(self, layout: Layout) -> PackedStep:
        meets = layout.meets_each_turn
        return pack_step(
            self.sample.pieces, self.pack, layout.dp, self.curve, meets_each_turn=meets
        )

    def decoder(self, precision: Precision) -> Decoder:
        """Initial weights of one's own."""
        with torch.device("meta"):
            decoder = Decoder(self.initial.model)
        decoder.to(torch.float64 if precision == "fp64" else torch.float32)
        decoder.to_empty(device="cpu")
        decoder.load_state_dict(self.initial.state_dict(), strict=False)
        for each in balances(decoder):
            each.loads_X.zero_()
            each.penalty.zero_()
        set_loss_scale(decoder, 1 / self.labels)
        return decoder


class _LayoutRun:
    """One rank of a layout."""

    def __init__(self, ranks: Ranks, case: LayoutCase, known: _Known) -> None:
        layout = case.layout
        self.known, self.layout = known, layout
        self.mesh = Mesh.join(ranks, layout)
        place = self.mesh.coordinates
        planner = ContextPlanner(case.model, LayoutSpec(cp=layout.cp, tp=layout.tp))
        self.packed = known.packed(layout)
        self.sharing = ContextGroup(planner, place["dp"], place["cp"], self.mesh, Ledger(layout.cp))
        self.decoder = known.decoder(case.precision)
        self.schedule: PipelineSchedule | None = None
        if layout.pp > 1:
            self.schedule = _write(case, self.packed)
            held = np.flatnonzero(self.schedule.rank_of == place["pp"]).tolist()
            edges = even_edges(case.model.layers, self.schedule.stages)
            self.decoder = DecoderPart(self.decoder, edges, held)
        self.sharded = ShardedDecoder(
            self.decoder,
            ranks,
            zero=layout.zero,
            precision="fp32",
            mesh=self.mesh,
            small_bytes=0,
        )

    def step(self) -> float:
        """Compute all gradients anew; this rank's part of the loss."""
        for parameter in self.decoder.parameters():
            parameter.grad = None
        loss = self._plain() if self.schedule is None else self._pipelined(self.schedule)
        return loss / self.known.labels if self.sharing.counts_loss else 0.0

    def _batches(self) -> list[StageBatch]:
        found = []
        for at, turn in enumerate(self.sharing.turns(self.packed)):
            share = self.sharing.share(self.packed, at, self.known.sample.batch(turn))
            found.append(StageBatch(share.tokens_t, share.labels_t, share.pack))
        return found

    def _plain(self) -> float:
        sharded, batches, total = self.sharded, self._batches(), 0.0
        for at, batch in enumerate(batches):
            last = at == len(batches) - 1 and not sharded.sums_at_end
            sharded.prepare_micro_batch(last=last)
            loss = self.decoder(batch.tokens_t, batch.pack, labels_T=batch.labels_t)
            (loss / self.known.labels).backward()
            total += float(loss.detach())
        if sharded.sums_at_end:
            sharded.sum_gradients()
        return total

    def _pipelined(self, schedule: PipelineSchedule) -> float:
        pipeline = Pipeline(self.sharded, self.mesh.peers("pp"))
        run = pipeline.run(schedule, self._batches(), divisor=self.known.labels)
        pipeline.sum_gradients(schedule.rank_of)
        return run.loss

    def gradients(self) -> dict[str, Tensor | None]:
        """What this rank holds of each."""
        return {name: p.grad for name, p in self.decoder.named_parameters()}

    def worst(self) -> tuple[float, str]:
        """Largest error of any gradient that is here, and its name."""
        errors = {
            name: held_error(grad, self.known.reference.gradients[name], self.known.scales[name])
            for name, grad in self.gradients().items()
        }
        return max(((error, name) for name, error in errors.items()), default=(0.0, ""))


def _local(grad: Tensor | None) -> Tensor | None:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def _write(case: LayoutCase, packed: PackedStep) -> PipelineSchedule:
    """One schedule for all replicas, from the longest of each micro-batch."""
    layout = case.layout
    stages = layout.pp * (2 if case.schedule in TWO_STAGES else 1)
    work = np.max([[batch.tokens for batch in turns] for turns in packed.ranks], axis=0)
    prices = make_prices(work, work, work, stages=stages, micro_batches=len(work))
    return write_pipeline(case.schedule, prices, ranks=layout.pp)


def run_layout(ranks: Ranks, case: LayoutCase, known: _Known) -> LayoutVerdict:
    """One rank's part; the verdict is of the rank that is furthest off."""
    run = _LayoutRun(ranks, case, known)
    loss = run.step()
    error, worst = run.worst()
    first = {name: _local(grad) for name, grad in run.gradients().items()}
    is_repeated = run.step() == loss and all(
        _is_same(first[name], _local(grad)) for name, grad in run.gradients().items()
    )
    errors, names, losses, same = zip(
        *ranks.gather_objects((error, worst, loss, is_repeated)), strict=True
    )
    expected = known.reference.loss
    most, name = max(zip(errors, names, strict=True))
    return LayoutVerdict(case, abs(sum(losses) - expected) / expected, most, name, all(same))


def check_layouts(
    ranks: Ranks, cases: Sequence[LayoutCase], done: Path | None = None
) -> list[LayoutVerdict]:
    """Run layouts on these ranks, one after another; every rank has the same verdicts."""
    return _check(ranks, cases, {}, partial(tell, ranks, done))


def _check(
    ranks: Ranks,
    cases: Sequence[LayoutCase],
    known: dict[ModelSpec, _Known],
    told: Callable[[], None],
) -> list[LayoutVerdict]:
    found = []
    for case in cases:
        if case.model not in known:
            known[case.model] = _Known(case.model)
        try:
            found.append(run_layout(ranks, case, known[case.model]))
        except LayoutError as error:
            raise LayoutError(f"{case}: {error}") from error
        told()
    return found


def _host(hosts: Ranks, cases: Sequence[LayoutCase], done: Path) -> list[list[LayoutVerdict]]:
    """Play some of the cases in this process, whose ranks take turns; answers of all processes."""
    mine, known = cases[hosts.rank :: hosts.world], dict[ModelSpec, _Known]()

    def play(ranks: Ranks) -> list[LayoutVerdict]:
        return _check(ranks, mine, known, partial(tell, ranks, done))

    return play_ranks(mine[0].layout.world, play)[:1] if mine else [[]]


def prove_layouts(
    cases: Sequence[LayoutCase], progress: Progress | None = None, *, over_gloo: bool = False
) -> list[LayoutVerdict]:
    """Run layouts, those of each number of ranks together.

    Args:
        cases: In any order; verdicts are in the order of ranks, and then in this one.
        progress: Shows how many are done.
        over_gloo: Every rank is a process, and collectives are gloo's; else ranks take turns in
            one process, and as many processes as there are cores have some of the cases each.
    """
    progress, found = progress or SilentProgress(), list[LayoutVerdict]()
    for world in sorted({case.layout.world for case in cases}):
        these = [case for case in cases if case.layout.world == world]
        progress.start(f"layouts of {world} rank{'s' if world > 1 else ''}", len(these))
        try:
            with growing_file(progress.advance) as done:
                if over_gloo:
                    found += run_ranks(world, check_layouts, these, done, timeout_s=_LONGEST_S)[0]
                    continue
                hosts = min(len(os.sched_getaffinity(0)), len(these))
                parts = run_ranks(hosts, _host, these, done, timeout_s=_LONGEST_S)
                found += _interleave([part[0] for part in parts])
        finally:
            progress.finish()
    return found


def _interleave(parts: list[list[LayoutVerdict]]) -> list[LayoutVerdict]:
    """Every so many-th from each part, as the cases were dealt."""
    columns = itertools.zip_longest(*parts)
    return [verdict for column in columns for verdict in column if verdict is not None]
