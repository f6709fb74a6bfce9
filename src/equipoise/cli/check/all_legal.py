"""``equipoise check --layout all-legal``: every legal layout equals one rank, and itself."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from equipoise.base.errors import CheckError, SpecError
from equipoise.cli.check.worlds import read_worlds
from equipoise.cli.console import make_console, make_progress
from equipoise.cli.run_arguments import run_from
from equipoise.cli.table import Column, print_columns

if TYPE_CHECKING:
    from equipoise.spec.model.presets import ModelSpec
    from equipoise.train.check.case import Case, Verdict

_RANKS = (2, 3, 4, 8)
_AXES = ("dp", "cp", "tp", "pp", "ep", "etp", "zero", "replicas")
_FIGURES = (
    "loss_error",
    "forward_error",
    "gradient_error",
    "worst_parameter",
    "bytes",
    "messages",
    "is_repeated",
    "is_exact",
)
_EXPERTS = 15
"""Experts of a model whose run has none: 2, 4 and 8 ranks get unequal numbers."""


def run(args: argparse.Namespace) -> int:
    """Print what was proven; exit code 5 when a layout fails."""
    from equipoise.train.check.case import scaled_down
    from equipoise.train.check.legal import layout_cases
    from equipoise.train.check.prove import run_cases

    if args.in_process:
        raise SpecError(
            "--in-process plays strategies of attention, and --layout all-legal plays ranks as it "
            "is. Leave --in-process out."
        )
    worlds = read_worlds(args.ranks or _RANKS)
    model = run_from(args).model
    models = both_kinds(model if args.full_size else scaled_down(model))
    cases = [case for world in worlds for case in layout_cases(world, models)]
    progress = make_progress(args.quiet or args.json)
    verdicts = run_cases(cases, progress, over_gloo=args.processes)
    failed = [verdict for verdict in verdicts if not verdict.is_exact]
    if args.json:
        rows = [_row(verdict) for verdict in verdicts]
        sys.stdout.write(json.dumps({"layouts": rows}, indent=1) + "\n")
    elif not args.quiet:
        sys.stdout.write(
            f"{_count(cases)} of {', '.join(map(str, worlds))} ranks, in fp64 and once for all "
            f"degrees in fp32, on a CPU. Not covered: bf16, CUDA devices, long documents.\n"
        )
        _print_table(verdicts)
    if failed:
        return fail(_blame(failed, len(verdicts)), is_json=args.json)
    if not args.json and not args.quiet:
        sys.stdout.write(f"{_count(cases)} equal one rank, twice, bit for bit.\n")
    return 0


def fail(blame: str, *, is_json: bool) -> int:
    """The exit code of a check that failed; under --json the answer has been printed already.

    Raises:
        CheckError: nothing has been printed as JSON.
    """
    if not is_json:
        raise CheckError(blame)
    sys.stderr.write(f"{blame}\n")
    return CheckError.exit_code


def both_kinds(model: "ModelSpec") -> list["ModelSpec"]:
    """The model without experts, and with: its own, or some."""
    dense = dataclasses.replace(model, experts=0, top_k=1, shared_ffn=0, dense_layers=0)
    if model.experts:
        # What a capacity drops follows from how documents are packed.
        return [dense, dataclasses.replace(model, capacity_factor=0.0)]
    units = max(model.ffn // 2, 8)
    sparse = dataclasses.replace(
        model, experts=_EXPERTS, top_k=2, expert_ffn=units, dense_layers=model.layers // 2
    )
    return [dense, sparse]


def _count(cases: "Sequence[Case]") -> str:
    layouts = {(case.layout, bool(case.model.experts)) for case in cases}
    dense = sum(not experts for _, experts in layouts)
    return (
        f"{len(cases):,} runs of {dense:,} layouts of a dense model and "
        f"{len(layouts) - dense:,} of one with experts"
    )


def blame_bytes(verdict: "Verdict", what: str, where: str) -> str:
    """The sentence for a case that is exact and sent something else than its schedules say.

    Args:
        verdict: Of that case.
        what: How many failed, as in ``2 of 9 cases``.
        where: The case in words.
    """
    return (
        f"{what} equal one rank and sent other bytes than their schedules say: "
        f"{verdict.bytes:,} in {verdict.messages} messages instead of "
        f"{verdict.scheduled_bytes:,} in {verdict.scheduled_messages} on {where}."
    )


def _describe(case: "Case") -> str:
    layout = case.layout
    degrees = {axis: getattr(layout, axis) for axis in _AXES if axis != "zero"}
    parts = [f"{axis} = {ranks}" for axis, ranks in degrees.items() if ranks > 1]
    parts += [f"zero = {layout.zero}", case.precision]
    parts += [layout.schedule] if layout.pp > 1 else []
    kind = "experts" if case.model.experts else "dense"
    return f"{case.ranks} ranks ({kind}, {', '.join(parts)})"


def _blame(failed: "Sequence[Verdict]", count: int) -> str:
    report = "Please report it with the output of `equipoise check --layout all-legal --json`."
    what = f"{len(failed)} of {count} layouts"
    worst = max(failed, key=lambda verdict: verdict.strain)
    where = _describe(worst.case)
    if worst.strain > 1.0:
        return (
            f"{what} differ from one rank; the worst is {worst.worst_parameter} on {where}: "
            f"gradient {worst.gradient_error:.1e}, loss {worst.loss_error:.1e}. {report}"
        )
    changing = [verdict for verdict in failed if not verdict.is_repeated]
    if not changing:
        return f"{blame_bytes(worst, what, where)} {report}"
    return (
        f"{what} differ from themselves on a second run; the first is "
        f"{_describe(changing[0].case)}. {report}"
    )


def _row(verdict: "Verdict") -> dict[str, Any]:
    case = verdict.case
    return (
        {"ranks": case.ranks}
        | {axis: getattr(case.layout, axis) for axis in _AXES}
        | {
            "experts": case.model.experts,
            "precision": case.precision,
            "schedule": case.layout.schedule if case.layout.pp > 1 else None,
        }
        | {key: getattr(verdict, key) for key in _FIGURES}
    )


def _print_table(verdicts: "Sequence[Verdict]") -> None:
    """A row for each way to divide attention, and one for each layout that is wrong."""
    columns = (
        Column("ranks"),
        Column("dp x cp x tp x pp", is_left=True, wraps=13),
        Column("ways of ep x etp", goes=2),
        Column("runs", goes=3),
        Column("fp32"),
        Column("fp64"),
        Column("worst parameter", is_left=True, goes=1),
        Column("", is_left=True),
    )
    rows: list[tuple[str, ...]] = []
    kinds: dict[tuple[int, str], list[Verdict]] = {}
    for verdict in verdicts:
        layout = verdict.case.layout
        degrees = f"{layout.dp} x {layout.cp} x {layout.tp} x {layout.pp}"
        kinds.setdefault((verdict.case.ranks, degrees), []).append(verdict)
    for (world, degrees), alike in kinds.items():
        right = [verdict for verdict in alike if verdict.is_exact]
        folds = {(each.case.layout.ep, each.case.layout.etp) for each in right}
        if right:
            rows.append(_cells((str(world), degrees, str(len(folds))), right))
        for verdict in alike:
            if not verdict.is_exact:
                layout = verdict.case.layout
                how = f"{degrees}, zero {layout.zero}, replicas {layout.replicas}"
                fold = f"{layout.ep} x {layout.etp}"
                rows.append(_cells((str(world), how, fold), [verdict]))
    title = "Loss and every gradient of each legal layout against one rank"
    print_columns(make_console(), columns, rows, title=title)


def _cells(named: tuple[str, str, str], verdicts: "Sequence[Verdict]") -> tuple[str, ...]:
    worst = max(verdicts, key=lambda verdict: verdict.strain)
    errors = []
    for precision in ("fp32", "fp64"):
        mine = [each.error for each in verdicts if each.case.precision == precision]
        errors.append(f"{max(mine):.1e}" if mine else "")
    said = "exact" if all(each.is_exact for each in verdicts) else "WRONG"
    return (*named, str(len(verdicts)), *errors, worst.worst_parameter, said)
