"""``equipoise check``: any layout equals one rank, proven for this model."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.base.errors import SpecError
from equipoise.cli.check import all_legal as check_layouts
from equipoise.cli.check.worlds import read_sharing, read_worlds
from equipoise.cli.console import make_console, make_progress
from equipoise.cli.run_arguments import add_run_arguments, run_from
from equipoise.cli.table import Column, print_columns
from equipoise.spec.catalog import POLICIES

if TYPE_CHECKING:
    from equipoise.spec.model.presets import ModelSpec
    from equipoise.spec.run.spec import LayoutSpec
    from equipoise.train.check.case import Case, Verdict

HELP = "prove that every layout and packing gives one rank's loss and gradients"

EXAMPLES = """\
examples:
  equipoise check run.toml                 on 1, 2, 3 and 4 ranks, the model scaled down
  equipoise check run.toml --ranks 8       data, ZeRO, context and tensor parallelism on 8 ranks
  equipoise check run.toml --in-process    the attention strategies alone, in seconds
  equipoise check run.toml --full-size     the model as it is
  equipoise check --layout all-legal       every legal layout of 2, 3, 4 and 8 ranks, dense and MoE
  equipoise check --experts                every policy of experts, every kind of workload
  equipoise check --modality               encoders of images and sound beside a decoder
  equipoise check --json
"""

_EXPERT_RANKS = (2, 4)
_ERRORS = ("loss_error", "forward_error", "gradient_error", "worst_parameter")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    add_run_arguments(parser)
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        metavar="N",
        help="numbers of ranks to prove (default: 1 2 3 4; of --layout all-legal: 2 3 4 8)",
    )
    parser.add_argument(
        "--layout",
        choices=["all-legal"],
        help="every legal layout instead (dp, cp, tp, pp, ep, etp, zero, replicas), of the model "
        "with and without experts, each twice; ranks take turns in one process for each core, or "
        "are --processes over gloo",
    )
    parser.add_argument(
        "--experts",
        action="store_true",
        help="balanced experts instead: every experts.policy with routers biased to W0 to W7, each "
        "twice, on 2 and 4 ranks unless --ranks says otherwise",
    )
    parser.add_argument(
        "--modality",
        action="store_true",
        help="encoders of images and sound beside a decoder instead, as for a run that has some: "
        "every axis, on 1, 2 and 4 ranks unless --ranks says otherwise",
    )
    parser.add_argument(
        "--full-size",
        action="store_true",
        help="do not scale the model down to 2 layers, a narrow width and 512 words",
    )
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--in-process",
        action="store_true",
        help="only ranks that take turns in one process: every attention strategy, nothing else",
    )
    either.add_argument(
        "--processes", action="store_true", help="only start real ranks: every layout"
    )


def run(args: argparse.Namespace) -> int:
    """Print what was proven; exit code 5 when a case fails."""
    if args.modality or run_from(args).spec.encoders:
        return _run_modality(args)
    if args.layout is not None and args.experts:
        raise SpecError(
            f"--experts and --layout {args.layout} each choose cases of their own. Give one of "
            f"them."
        )
    if args.layout is not None:
        return check_layouts.run(args)
    if args.experts:
        return _run_experts(args)
    worlds = read_worlds(args.ranks or [1, 2, 3, 4])
    from equipoise.train.check import case as cases
    from equipoise.train.check import partial, variants
    from equipoise.train.check.prove import run_cases

    resolved = run_from(args)
    layout, freeze = resolved.spec.layout, tuple[str, ...]()
    is_fp8 = resolved.spec.train.precision == "fp8"
    if resolved.spec.model.engine == "transformers":
        from equipoise.parallel.theirs.shrink import name_frozen, read_small
        from equipoise.train.request import init_folder

        model, theirs = read_small(Path(init_folder(resolved)), is_whole=args.full_size)
        freeze = name_frozen(theirs)
    else:
        # What a capacity drops follows from how documents are packed, and one rank packs otherwise.
        whole = dataclasses.replace(resolved.model, capacity_factor=0.0)
        model, theirs = whole if args.full_size else cases.scaled_down(whole), ""
    progress = make_progress(args.quiet or args.json)
    verdicts: list[Verdict] = []
    if not args.processes:
        played = [case for world in worlds for case in cases.played_cases(world, model)]
        played = variants.of_theirs(played, theirs) if theirs else played
        played = variants.of_fp8(played) if is_fp8 else played
        verdicts += run_cases(played, progress, over_gloo=False)
    if not args.in_process:
        real: list[Case] = []
        for world in worlds:
            real += cases.all_cases(world, model)
            real += cases.divided_cases(world, model)
            real += cases.context_cases(world, model, layout.strategy, layout.sharding)
            if not theirs:  # modules of transformers are not divided
                real += cases.tensor_cases(world, model)
                real += cases.expert_cases(world, model)
                real += cases.pipeline_cases(world, model)
            real += partial.masked_cases(world, model, is_theirs=bool(theirs))
            real += partial.trained_cases(world, model, their_freeze=freeze)
        real = variants.of_fp8(real) if is_fp8 else real
        verdicts += run_cases(variants.of_theirs(real, theirs) if theirs else real, progress)
    return _show(args, verdicts, model)


def _run_experts(args: argparse.Namespace) -> int:
    """Balanced experts alone."""
    from equipoise.train.check.balanced import balanced_cases, with_experts
    from equipoise.train.check.case import scaled_down

    model = with_experts(run_from(args).model)
    worlds = read_sharing(args.ranks, _EXPERT_RANKS, model.experts)
    from equipoise.train.check.prove import run_cases

    model = model if args.full_size else scaled_down(model)
    chosen = [case for world in worlds for case in balanced_cases(world, model)]
    progress = make_progress(args.quiet or args.json)
    return _show(args, run_cases(chosen, progress, over_gloo=not args.in_process), model)


def _run_modality(args: argparse.Namespace) -> int:
    """Encoders beside a decoder alone."""
    for flag, is_given in (
        ("--layout", args.layout is not None),
        ("--experts", args.experts),
        ("--full-size", args.full_size),
        ("--in-process", args.in_process),
    ):
        if is_given:
            raise SpecError(
                f"Encoders of images and sound are proven small, on real ranks and in cases of "
                f"their own, which {flag} does not choose. Leave it out."
            )
    # What a capacity drops follows from how documents are packed, and one rank packs otherwise.
    whole = dataclasses.replace(run_from(args).model, capacity_factor=0.0)
    from equipoise.train.check.case import scaled_down
    from equipoise.train.check.modal import modal_cases
    from equipoise.train.check.prove import run_cases

    worlds = read_worlds(args.ranks or [1, 2, 4])
    model = scaled_down(whole)
    chosen = [case for world in worlds for case in modal_cases(world, model)]
    return _show(args, run_cases(chosen, make_progress(args.quiet or args.json)), model)


def _scope(verdicts: "Sequence[Verdict]", model: "ModelSpec") -> str:
    """What the cases are proven on, and what they leave out."""
    from equipoise.train.check.case import DOCUMENT_TOKENS

    played = sum(verdict.case.played for verdict in verdicts)
    worlds = sorted({verdict.case.ranks for verdict in verdicts if not verdict.case.played})
    parts = [f"{len(verdicts) - played} on {', '.join(map(str, worlds))} gloo ranks"] * bool(worlds)
    parts += [f"{played} played in one process"] * (played > 0)
    deepest = max((verdict.case.model.layers for verdict in verdicts), default=model.layers)
    precisions = " and ".join(sorted({verdict.case.precision for verdict in verdicts}))
    layers = f"{model.layers} to {deepest}" if deepest > model.layers else f"{model.layers}"
    layers += f" layer{'s' * (deepest > 1)}"
    return (
        f"Cases: {' and '.join(parts)}. Model: {layers} of width {model.hidden}, "
        f"{precisions} on a CPU. Sample: {len(DOCUMENT_TOKENS)} documents "
        f"of {min(DOCUMENT_TOKENS)} to {max(DOCUMENT_TOKENS)} tokens. Not covered: bf16, CUDA "
        f"devices, longer documents.\n"
    )


def _show(args: argparse.Namespace, verdicts: "Sequence[Verdict]", model: "ModelSpec") -> int:
    from equipoise.train.check.case import TOLERANCE

    failed = [verdict for verdict in verdicts if not verdict.is_exact]
    tolerance = max((verdict.case.tolerance for verdict in verdicts), default=TOLERANCE)
    if args.json:
        rows = [_row(verdict) for verdict in verdicts]
        sys.stdout.write(json.dumps({"tolerance": tolerance, "cases": rows}, indent=1) + "\n")
    elif not args.quiet:
        sys.stdout.write(_scope(verdicts, model))
        _print_table(verdicts)
    if failed:
        return check_layouts.fail(_blame(failed, len(verdicts), tolerance), is_json=args.json)
    if not args.json and not args.quiet:
        sys.stdout.write(
            f"{len(verdicts)} cases equal one rank to {tolerance:g} of each gradient's scale.\n"
        )
    return 0


def _blame(failed: "Sequence[Verdict]", count: int, tolerance: float) -> str:
    report = "Please report it with the output of `equipoise check --json`."
    worst = max(failed, key=lambda verdict: verdict.error)
    what = f"{len(failed)} of {count} cases"
    if worst.error <= tolerance:
        return f"{check_layouts.blame_bytes(worst, what, str(worst.case))} {report}"
    return (
        f"{what} differ from one rank by more than {tolerance:g}; the "
        f"worst is {worst.worst_parameter} on {worst.case}: gradient {worst.gradient_error:.1e}, "
        f"logits {worst.forward_error:.1e}, loss {worst.loss_error:.1e}. {report}"
    )


def _row(verdict: "Verdict") -> dict[str, Any]:
    case, layout = verdict.case, verdict.case.layout
    return (
        {
            "ranks": case.ranks,
            "zero": layout.zero,
            "policy": case.pack.policy,
            "context_tokens": case.pack.context_tokens,
            "recompute": case.train.recompute,
            "lora_rank": case.lora.rank,
            "frozen": list(case.train.freeze),
        }
        | {key: getattr(layout, key) for key in ("cp", "tp", "ep", "etp", "pp", "schedule")}
        | {
            "strategy": layout.strategy if layout.cp > 1 else None,
            "sharding": layout.sharding if layout.cp > 1 else None,
            "masked": case.masks,
            "in_process": case.played,
            "experts": case.experts.policy,
            "router": case.router or None,
            "micro_batches": verdict.micro_batches,
        }
        | {key: getattr(verdict, key) for key in _ERRORS}
        | {
            "bytes": verdict.bytes,
            "messages": verdict.messages,
            "skew": verdict.skew,
            "is_exact": verdict.is_exact,
        }
    )


def _print_table(verdicts: "Sequence[Verdict]") -> None:
    """A row for each kind of case, of its worst one; and one for each case that is wrong."""
    columns = (
        Column("ranks"),
        Column("layout", is_left=True, wraps=18),
        Column("cases", goes=4),
        Column("KiB sent", goes=2),
        Column("logits", goes=3),
        Column("gradient"),
        Column("worst parameter", is_left=True, goes=1),
        Column("", is_left=True),
    )
    rows: list[tuple[str, ...]] = []
    kinds: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in verdicts:
        kinds.setdefault(_kind(verdict), []).append(verdict)
    for kind, alike in kinds.items():
        if exact := [verdict for verdict in alike if verdict.is_exact]:
            rows.append(_cells(kind, exact))
        for verdict in alike:
            if not verdict.is_exact:
                case = verdict.case
                how = f"{case.pack.policy} {case.pack.context_tokens}"
                how += f", zero {case.layout.zero}, {case.layout.sharding}"
                rows.append(_cells((kind[0], f"{kind[1]}, {how}"), [verdict]))
    title = "Loss, logits and every gradient against one rank"
    print_columns(make_console(), columns, rows, title=title)


def _kind(verdict: "Verdict") -> tuple[str, str]:
    case, layout = verdict.case, verdict.case.layout
    if case.played:
        return f"{case.ranks} played", layout.strategy
    others = "".join(f", {axis}={ranks}" for axis, ranks in _above_one(layout, "ep", "etp"))
    others += ", lora" if case.lora.rank else ""
    others += f", {case.experts.policy} experts" if case.router else ""
    others += ", shortcut" if case.model.shortcut else ""
    others += ", frozen" if case.train.freeze else ""
    if POLICIES[case.pack.policy].runs_together:
        tensor = f", tp={layout.tp}" if layout.tp > 1 else ""
        return str(case.ranks), case.pack.policy + tensor + others
    axes = _above_one(layout, "dp", "pp", "cp", "tp")
    parts = [f"{axis}={ranks}" for axis, ranks in axes] or ["dp=1"]
    how = f", {layout.schedule}" if layout.pp > 1 else ""
    return str(case.ranks), " ".join(parts) + how + others


def _above_one(layout: "LayoutSpec", *axes: str) -> list[tuple[str, int]]:
    degrees = [(axis, getattr(layout, axis)) for axis in axes]
    return [(axis, ranks) for axis, ranks in degrees if ranks > 1]


def _cells(kind: tuple[str, str], verdicts: "Sequence[Verdict]") -> tuple[str, ...]:
    worst = max(verdicts, key=lambda verdict: verdict.gradient_error)
    sent = sorted({round(verdict.bytes / 1024) for verdict in verdicts})
    return (
        *kind,
        str(len(verdicts)),
        "" if sent == [0] else " to ".join(map(str, dict.fromkeys((sent[0], sent[-1])))),
        f"{max(verdict.forward_error for verdict in verdicts):.1e}",
        f"{worst.gradient_error:.1e}",
        worst.worst_parameter,
        "exact" if worst.is_exact else "WRONG",
    )
