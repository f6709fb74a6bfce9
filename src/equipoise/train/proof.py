"""Before the first step on devices that are not CPUs: the run's own layout, proven on them.

Why
    The executors are proven on CPU ranks. Another device has other kernels and other
    collectives, and a version of its libraries that no test has seen.

What it decides
    Every rank runs the case of ``equipoise check`` that has this run's layout, policy and
    recomputation, with the model scaled down, in fp32: loss, logits and every gradient against one
    rank's on its CPU. It takes seconds and is kept by device, versions and layout, so the next
    run of its kind starts at once. A layout that fails is refused with its table. A schedule that
    trains another model than one rank's cannot be proven; 1f1b stands for it.

Kept true (tests/multi/train/test_proof.py)
    A layout whose gradients are wrong never trains a step; what was proven is not proven again.
"""

import dataclasses
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

import equipoise
from equipoise.base.digest import digest
from equipoise.base.durable import write_whole
from equipoise.base.errors import CheckError, LayoutError
from equipoise.comm.group import Ranks, name_device
from equipoise.observe.journal import Journal
from equipoise.plan.space.accepted import require_step
from equipoise.spec.catalog import LOSSY, POLICIES
from equipoise.spec.run.resolved import ResolvedFile
from equipoise.spec.run.spec import PackSpec, TrainSpec
from equipoise.train.build import build_runner
from equipoise.train.check.case import DOCUMENT_TOKENS, Case, Verdict, deepen, scaled_down
from equipoise.train.check.prove import Build, prove_case
from equipoise.train.check.sample import References

_UNPROVEN = "--no-proof: nobody has checked that this layout equals one rank on these devices."

_MOST_COPIES = 64
"""Times that the sample's documents are repeated, at most, until a large layout has enough."""


def prove_layout(
    resolved: ResolvedFile,
    ranks: Ranks,
    journal: Journal,
    cache: Path | None,
    build: Build = build_runner,
) -> None:
    """Prove the run's layout on the devices of its ranks, unless it was proven on their like.

    Args:
        resolved: The run.
        ranks: All of them; each calls this.
        journal: Where the verdict is written, on rank 0.
        cache: Folder that runs share; proofs are kept in it. None trains unproven, and the
            journal says so.
        build: Makes what runs the step.

    Raises:
        CheckError: the layout does not equal one rank; with the table of errors.
    """
    devices = sorted(set(ranks.gather_objects(name_device(ranks.device))))
    if cache is None:
        if ranks.rank == 0:
            journal.write("instant", "unproven", devices=devices, message=_UNPROVEN)
        return
    case = proof_case(resolved)
    file = cache / "proofs" / f"{_name(case, devices)}.json"
    if ranks.gather_objects(ranks.rank == 0 and file.exists())[0]:
        return
    with journal.span("prove"):
        verdict = prove_case(ranks, case, References(), build)
    row = _row(verdict, devices)
    if ranks.rank == 0:
        journal.write("instant", "proof", **row)
        if verdict.is_exact:
            with suppress(OSError):  # the next run proves again
                file.parent.mkdir(exist_ok=True)
                write_whole(file, json.dumps(row, indent=1) + "\n")
    if not verdict.is_exact:
        raise CheckError(_table(verdict, devices))


def proof_case(resolved: ResolvedFile) -> Case:
    """The case of ``equipoise check`` that has a run's layout, policy and recomputation.

    Raises:
        LayoutError: no number of the sample's documents is enough for the layout.
    """
    spec = resolved.spec
    layout, policy = spec.layout, spec.pack.policy
    if layout.schedule in LOSSY:
        layout = dataclasses.replace(layout, schedule="1f1b", skip=0.0, virtual=None)
    if POLICIES[policy].lets_wait:
        policy = PackSpec().policy
    whole = dataclasses.replace(resolved.model, capacity_factor=0.0)
    model, theirs = deepen(scaled_down(whole), layout.stages), ""
    if spec.model.engine == "transformers":
        from equipoise.parallel.theirs.shrink import read_small

        model, theirs = read_small(Path(resolved.init_folder))
    refusal: LayoutError | None = None
    copies = 1
    while copies <= _MOST_COPIES:
        doc_tokens = DOCUMENT_TOKENS * copies
        case = Case(
            resolved.ranks,
            model,
            dataclasses.replace(layout, dp=resolved.ranks // layout.sharing),
            PackSpec(policy=policy, context_tokens=256, step_tokens=sum(doc_tokens)),
            TrainSpec(recompute=spec.train.recompute),
            precision="fp64" if model.experts or theirs else "fp32",
            theirs=theirs,
            doc_tokens=doc_tokens,
        )
        try:
            require_step(case.resolved.spec, model, resolved.ranks, np.array(doc_tokens))
        except LayoutError as error:
            refusal, copies = error, 2 * copies
            continue
        return case
    raise LayoutError(
        f"The layout cannot be proven on a sample of {len(DOCUMENT_TOKENS) * _MOST_COPIES} "
        f"documents: {refusal} Train it as it is with --no-proof."
    )


def _name(case: Case, devices: list[str]) -> str:
    libraries = [equipoise.__version__, torch.__version__, str(torch.version.cuda)]
    parts = [case.model, case.layout, case.pack, case.train.recompute, case.ranks]
    parts += [case.theirs] if case.theirs else []
    return digest([*parts, devices, libraries])


def _row(verdict: Verdict, devices: list[str]) -> dict[str, Any]:
    return {
        "case": str(verdict.case),
        "devices": devices,
        "torch": torch.__version__,
        "tolerance": verdict.case.tolerance,
        "loss_error": verdict.loss_error,
        "forward_error": verdict.forward_error,
        "gradient_error": verdict.gradient_error,
        "worst_parameter": verdict.worst_parameter,
        "sent_bytes": verdict.bytes,
        "scheduled_bytes": verdict.scheduled_bytes,
        "is_exact": verdict.is_exact,
    }


def _table(verdict: Verdict, devices: list[str]) -> str:
    sent = f"{verdict.bytes:,} B sent, {verdict.scheduled_bytes:,} B in the schedule"
    return (
        f"{verdict.case} does not equal one rank on {', '.join(devices)}, so nothing was trained. "
        f"Report this table, choose another layout, or train all the same with --no-proof.\n"
        f"  loss      {verdict.loss_error:.1e} of its size (allowed {verdict.case.tolerance:.0e})\n"
        f"  logits    {verdict.forward_error:.1e} of the largest\n"
        f"  gradient  {verdict.gradient_error:.1e} of its scale, {verdict.worst_parameter}\n"
        f"  messages  {sent}"
    )
