"""The sides of a run: one packing policy, or several that compute every step one after the other.

Why
    Two runs one after the other are measured on two machines: clocks, caches and neighbours
    drift by more than many packs differ. Sides of one run compute the same pieces with the same
    weights in the same minute.

What it decides
    Sides take turns to begin a step. Each computes the step up to its gradients and drops them,
    all but the last, which updates the weights once for all; its seconds count on every side,
    for every side would spend them. Before that, all sides must agree: they have computed one
    gradient, up to rounding.

Kept true (tests/multi/train/test_compare.py)
    A run with sides trains the weights of a run without; sides that differ end it, and no weight
    is changed.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise.balance.packing.pack import StepPacker
from equipoise.balance.packing.turns import align_turns
from equipoise.base.errors import FaultError
from equipoise.comm.group import Ranks
from equipoise.cost.curve import LoadCurve
from equipoise.data.cache.store import TokenStore
from equipoise.data.mixture import Stream
from equipoise.data.stream import tell_apart
from equipoise.observe.journal import Journal
from equipoise.sim.rank_loads import RankLoads
from equipoise.spec.catalog import POLICIES
from equipoise.spec.names import EXPERT_FILES
from equipoise.spec.pack import PackedStep, Pieces
from equipoise.spec.run.compared import resolved_sides
from equipoise.spec.run.resolved import ResolvedFile
from equipoise.train.build import build_packer, build_runner, join_sharing
from equipoise.train.context import ContextGroup
from equipoise.train.record import RunRecorder
from equipoise.train.step import Gradients, StepResult, StepRunner

AGREE = {"fp32": 1e-4, "bf16": 0.02, "fp8": 0.02}
"""How far losses and gradient norms of sides may differ, by precision [ratio]. Sums in another
order differ by 1e-6 in fp32; another piece or mask differs by more than these."""


@dataclass(frozen=True, slots=True)
class Side:
    """One packing policy of a run: what packs, runs and journals its steps."""

    packer: StepPacker
    runner: StepRunner
    record: RunRecorder
    journal: Journal

    @property
    def policy(self) -> str:
        """Its packing policy."""
        return self.record.spec.pack.policy

    def pack(self, step: int, pieces: Pieces) -> tuple[PackedStep, RankLoads]:
        """Decide the step, on every rank alike, and journal the decision on rank 0."""
        began = time.perf_counter()
        with self.runner.own.reading():
            if POLICIES[self.policy].divides:
                pieces = tell_apart(pieces, self.runner.store.documents)
            packed = self.packer.step(pieces)
            if POLICIES[packed.policy].runs_together:
                packed = align_turns(packed)
        loads = self.record.sharing.loads(packed, self.record.curve)
        plan_s = time.perf_counter() - began
        self.record.write_pack(step, packed, pieces, loads, plan_s)
        return packed, loads

    def write_step(
        self, packed: tuple[PackedStep, RankLoads], result: StepResult, *, step: int, tokens: int
    ) -> dict[str, float]:
        """Journal a finished step; its figures."""
        begun_anew = self.journal.begun_anew
        figures = self.record.write_step(*packed, result, step=step, tokens_seen=tokens)
        if self.journal.begun_anew > begun_anew:
            self.record.write_start(step)
        return figures

    def follow(self, folder: Path, step: int) -> None:
        """Continue the journal in another folder."""
        begun_anew = self.journal.begun_anew
        self.journal.follow(folder)
        if self.journal.begun_anew > begun_anew:
            self.record.write_start(step)


def build_sides(
    resolved: ResolvedFile,
    ranks: Ranks,
    journals: Sequence[Journal],
    store: TokenStore,
    curve: LoadCurve,
    stream: Stream,
) -> list[Side]:
    """A side for each policy, all of them over one decoder and its optimizer.

    Args:
        resolved: The run.
        ranks: All of them; each calls this.
        journals: This rank's, one for each side.
        store: Tokens of the corpus.
        curve: Price of a document.
        stream: The run's.
    """
    compared: Mapping[str, Any] = {}
    if resolved.compare:
        compared = {"policies": resolved.compare, "session": time.time_ns()}
    every = [each for _, each in resolved_sides(Path(), resolved)]
    sides: list[Side] = []
    context: ContextGroup | None = None
    for each, journal in zip(every, journals, strict=True):
        if context is None or POLICIES[each.spec.pack.policy].runs_together:
            sharing = join_sharing(each, ranks, curve, stream)
        else:
            sharing = context
        if isinstance(sharing, ContextGroup):
            context = sharing
        record = RunRecorder(each, sharing, ranks, journal, store, curve, compared)
        if sides:
            runner = sides[0].runner.beside(journal, sharing)
        else:
            folder = journal.path.parent.parent / EXPERT_FILES / f"rank-{ranks.rank:05d}"
            runner = build_runner(each, ranks, store, journal, sharing, folder=folder)
        sides.append(Side(build_packer(each.spec, ranks.world, curve), runner, record, journal))
    return sides


def span_all(journals: Iterable[Journal], name: str) -> ExitStack:
    """A span in every side's journal."""
    with ExitStack() as stack:
        for journal in journals:
            stack.enter_context(journal.span(name))
        return stack.pop_all()


def run_sides(
    sides: Sequence[Side],
    packs: Sequence[PackedStep],
    *,
    step: int,
    rate: float,
    clip_norm: float,
    last_good: Callable[[], Path | None],
    stop_asked: bool,
    word: int,
) -> list[StepResult]:
    """One step under every side, and one update; the arguments are those of ``StepRunner.run``.

    Raises:
        FaultError: as ``StepRunner.run``; or sides differ. No weight was changed.
        LayoutError: ranks packed differently.
    """
    if len(sides) == 1:
        return [
            sides[0].runner.run(
                packs[0],
                step=step,
                rate=rate,
                clip_norm=clip_norm,
                last_good=last_good,
                stop_asked=stop_asked,
                word=word,
            )
        ]
    order = [(step + turn) % len(sides) for turn in range(len(sides))]
    first, last = order[0], order[-1]
    made: dict[int, Gradients] = {}
    took_s: dict[int, float] = {}
    ended: dict[int, float] = {}
    for at in order:
        runner = sides[at].runner
        runner.ranks.barrier()  # a side's step begins when all ranks are there
        began = time.perf_counter()
        is_first = at == first
        made[at] = runner.compute(
            packs[at],
            step=step,
            last_good=last_good,
            stop_asked=stop_asked and is_first,
            word=word if is_first else 0,
        )
        took_s[at], ended[at] = time.perf_counter() - began, time.time()
        if at != last:
            runner.drop()
    _require_agreement(sides, made, step)
    began = time.perf_counter()
    experts = sides[last].runner.update(made[last], step=step, rate=rate, clip_norm=clip_norm)
    update_s = time.perf_counter() - began
    for at in order[:-1]:
        sides[at].journal.write(
            "span", "optimizer", t=ended[at], duration_s=update_s, step=step, is_shared=True
        )
    results = [
        sides[at].runner.result(made[at], experts, step_s=took_s[at] + update_s)
        for at in range(len(sides))
    ]
    heard = results[first]
    return [dataclasses.replace(each, stop=heard.stop, words=heard.words) for each in results]


def _require_agreement(sides: Sequence[Side], made: Mapping[int, Gradients], step: int) -> None:
    """Journal how far sides differ from the first, and end the run where it is too far.

    Raises:
        FaultError: names the sides and what they computed.
    """
    ranks, base = sides[0].runner.ranks, made[0]
    for at in range(1, len(sides)):
        pairs = {
            "loss": (base.loss, made[at].loss),
            "gradient norm": (base.norm, made[at].norm),
        }
        mine = [abs(one - other) / max(abs(one), 1e-30) for one, other in pairs.values()]
        # The worst rank's, so that all ranks end here or none does.
        worst = ranks.gather_floats(mine).amax(0).tolist()
        gaps = dict(zip(pairs, worst, strict=True))
        if ranks.rank == 0:
            sides[at].journal.write(
                "scalar",
                "agreement",
                step=step,
                beside=sides[0].policy,
                loss=gaps["loss"],
                grad_norm=gaps["gradient norm"],
            )
        most = AGREE[sides[0].record.spec.train.precision]
        for what, gap in gaps.items():
            if not gap <= most:
                one, other = pairs[what]
                raise FaultError(
                    f"The {what} of step {step} is {one:.7g} under {sides[0].policy} and "
                    f"{other:.7g} under {sides[at].policy}: {gap:.1e} apart, where rounding "
                    f"explains {most:g}. No weight was changed. Prove the layout with "
                    f"`equipoise check`."
                )
