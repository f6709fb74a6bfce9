"""Predicted seconds of each step of a real plan, from the very packs that ran."""

from collections.abc import Iterator
from typing import Any

from bench.lib.corpus import open_corpus
from bench.planner.real_cases import CASES, COMMON, STEPS
from equipoise.balance.packing.pack import make_packer
from equipoise.cost.curve import LoadCurve
from equipoise.cost.step.request import StepOptions, residuals_of
from equipoise.data.stream import DocumentStream
from equipoise.sim.machine import Machine
from equipoise.sim.step import StepRun, run_step
from equipoise.spec.pack import PackedStep
from equipoise.spec.run.load import read_run
from equipoise.spec.run.resolve import ResolvedRun


def packs_of(resolved: ResolvedRun, curve: LoadCurve) -> Iterator[PackedStep]:
    """Every step's packs, as the run makes them."""
    spec, store = resolved.spec, open_corpus()
    stream = DocumentStream(
        store.doc_tokens, seed=spec.train.seed, context_tokens=spec.pack.context_tokens
    )
    packer = make_packer(spec.pack, 2 // spec.layout.sharing, curve)
    for step in range(STEPS):
        yield packer.step(stream.step(step * spec.pack.step_tokens, spec.pack.step_tokens))


def foresee(case: str, run: dict[str, Any], machine: Machine) -> list[StepRun]:
    """Each step but the first, priced from its packs.

    Raises:
        ValueError: the packs are not those that ran.
    """
    resolved = read_run(None, list((COMMON | CASES[case]).items()))
    spec = resolved.spec
    known = {**run["curve"]}
    known |= {name: tuple(known[name]) for name in ("doc_tokens", "doc_ns")}
    options = StepOptions(
        spec.pack.context_tokens,
        spec.pack.step_tokens // spec.pack.context_tokens,
        virtual=max(1, spec.layout.stages // spec.layout.pp),
        schedule=spec.layout.schedule,
        recompute=spec.train.recompute,
        precision=spec.train.precision,
        policy=spec.pack.policy,
        sharding=spec.layout.sharding,
        context_strategy=spec.layout.strategy,
        residuals=residuals_of(machine.device),
    )
    priced = []
    for step, packed in enumerate(packs_of(resolved, LoadCurve(**known)), start=1):
        if packed.digest != run["packs"][str(step)]:
            raise ValueError(f"{case}: step {step} ran with other packs than those priced.")
        documents = [[batch.doc_tokens.tolist() for batch in rank] for rank in packed.ranks]
        layout = spec.layout.of_ranks(2)
        if step > 1:
            priced.append(run_step(resolved.model, machine, layout, options, documents=documents))
    return priced
