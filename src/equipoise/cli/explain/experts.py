"""``equipoise explain experts``: who computes which expert's rows, before and after balancing."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.base.errors import SpecError
from equipoise.base.nearest import nearest
from equipoise.base.units import format_bytes
from equipoise.cli.console import make_console
from equipoise.cli.counts import MOST_SHARING, require_counts
from equipoise.cli.explain import asked, expert_prefetch, expert_trace
from equipoise.cli.table import Column, print_columns
from equipoise.cli.written import require_folder_of, require_kind

if TYPE_CHECKING:
    from equipoise.balance.expert.compare import ExpertScore, ExpertSetting
    from equipoise.spec.model.presets import ModelSpec

HELP = "show which rank computes which expert's rows, before and after balancing"

EXAMPLES = """\
examples:
  equipoise explain experts                            hot experts, 8 ranks, every policy
  equipoise explain experts --workload W6 --step 5     popularity moves on; eplb has seen step 4
  equipoise explain experts --policy exact --slots 2 --text
  equipoise explain experts --model mixtral-8x7b --ranks 4 --plot experts.png
  equipoise explain experts --experts 256 --ranks 64 --json
  equipoise explain experts --memory-mib 9000            layers in a file: what is fetched when
  equipoise explain experts --run runs/run --ranks 4     what a run's own routers chose, all steps
"""

_BF16_BYTES = 2
_MOST = {"ranks": MOST_SHARING, "experts": 4096, "rows": 1 << 24, "least_rows": 1 << 24}
_SHOWN = 8
"""Most experts that a table names."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "--run",
        metavar="DIR",
        help="a run's folder: every policy on the loads that its routers made, in all steps or in "
        "--step",
    )
    parser.add_argument(
        "--workload",
        default="W1",
        metavar="NAME",
        help="what tokens choose: W0 balanced, W1 hot experts, W2 hot rank, W3 spread hot, W4 "
        "ragged sources, W5 empty, W6 rotating, W7 burst (default: W1)",
    )
    parser.add_argument(
        "--policy",
        default="all",
        metavar="NAME",
        help="all, or one: fixed, exact, hecate, eplb, tutel, auto (default: all)",
    )
    parser.add_argument(
        "--model",
        default="qwen2-57b-a14b",
        metavar="NAME",
        help="a preset with experts, whose sizes are moved (default: qwen2-57b-a14b)",
    )
    parser.add_argument(
        "--ranks", type=int, default=8, metavar="N", help="ranks that share experts (default: 8)"
    )
    parser.add_argument(
        "--experts", type=int, metavar="N", help="experts of the layer (default: the model's)"
    )
    parser.add_argument(
        "--rows",
        type=int,
        default=8192,
        metavar="N",
        help="tokens of a rank times the experts of each (default: 8192)",
    )
    parser.add_argument(
        "--slots",
        type=int,
        metavar="N",
        help="copies on a rank (default: 1, or 0 where one rank owns all)",
    )
    parser.add_argument(
        "--least-rows",
        type=int,
        default=1,
        metavar="N",
        help="fewest rows that a copy is made for, and the price of one (default: 1)",
    )
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="of the workload (default: 1), or of the run (default: all)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the workload (default: 0)"
    )
    parser.add_argument(
        "--memory-mib",
        type=float,
        metavar="N",
        help="experts.memory_mib: show when the model's layers are read and gathered",
    )
    parser.add_argument("--text", action="store_true", help="print each schedule as text")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw what ranks compute (.png, .svg or .pdf)"
    )


def run(args: argparse.Namespace) -> int:
    """Explain one policy, or compare all."""
    if args.memory_mib is not None:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        return expert_prefetch.run(args, parser)
    if args.run is not None:
        return _run_trace(args)
    from equipoise.balance.expert.compare import compare_experts, policy_names

    args.step = 1 if args.step is None else args.step
    model, setting = _setting(args)
    request = setting.request()
    names = policy_names(request) if args.policy == "all" else [args.policy]
    scores = compare_experts(request, names)
    if args.plot is not None:
        from equipoise.dash.expert.plot import plot_experts

        plot_experts(args.plot, scores, _title(setting))
    asked.answer(
        args,
        rows=lambda: _rows(scores, setting, model),
        lines=lambda: _print_lines(scores, model),
        tables=lambda: _print_tables(scores, setting, model),
        schedules=[score.schedule for score in scores],
        files=(args.plot,),
    )
    return 0


def _run_trace(args: argparse.Namespace) -> int:
    """Every policy on a run's own loads."""
    require_counts(args, {name: most for name, most in _MOST.items() if name != "rows"})
    for flag in ("slots", "step"):
        _require_whole(args, flag)
    require_kind("plot", args.plot, "picture")
    require_folder_of("plot", args.plot)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    expert_trace.refuse_drawn(args, parser)
    return expert_trace.run(args)


def _require_whole(args: argparse.Namespace, flag: str) -> None:
    value = getattr(args, flag)
    if value is not None and value < 0:
        raise SpecError(f"--{flag} {value} is below 0. Give 0 or more.")


def _setting(args: argparse.Namespace) -> "tuple[ModelSpec, ExpertSetting]":
    """What the parsed arguments ask for.

    Raises:
        SpecError: a flag that is wrong.
    """
    from equipoise.balance.expert.compare import ExpertSetting
    from equipoise.balance.expert.policies import AUTO, EXPERT_POLICIES
    from equipoise.balance.expert.price import RowPrices
    from equipoise.spec.model.presets import preset

    require_counts(args, _MOST)
    for flag in ("slots", "step", "seed"):
        _require_whole(args, flag)
    require_kind("plot", args.plot, "picture")
    require_folder_of("plot", args.plot)
    names = ["all", *EXPERT_POLICIES, AUTO]
    if args.policy not in names:
        raise SpecError(
            f'--policy: "{args.policy}" is not one of {", ".join(names)}. Nearest: '
            f'"{nearest(args.policy, names)}".'
        )
    model = preset(args.model)
    if not model.experts:
        raise SpecError(
            f"--model {args.model} has no experts. Give one that has, as mixtral-8x7b or "
            f"qwen2-57b-a14b."
        )
    experts = args.experts or model.experts
    expert_trace.settle_slots(args, experts)
    return model, ExpertSetting(
        args.workload,
        args.seed,
        args.step,
        args.ranks,
        experts,
        args.slots,
        args.least_rows,
        args.rows,
        RowPrices.of_width(args.least_rows, model.expert_ffn).row_cost,
    )


def _title(setting: "ExpertSetting") -> str:
    from equipoise.balance.expert.workload import WORKLOADS

    slots = f"{setting.slots} slot{'s' * (setting.slots != 1)}"
    return (
        f"{setting.kind} ({WORKLOADS[setting.kind]}), step {setting.step}: {setting.experts} "
        f"experts on {setting.ranks} ranks, {setting.rows_per_rank:,} rows each, {slots} for "
        f"copies"
    )


def _copy_bytes(score: "ExpertScore", model: "ModelSpec") -> int:
    """Weights out and gradients back in a micro-batch, over all ranks, in bf16."""
    elements = 3 * model.hidden * model.expert_ffn
    return int(score.schedule.copy_bytes(elements, element_bytes=_BF16_BYTES).sum())


def _row_bytes(score: "ExpertScore", model: "ModelSpec") -> int:
    return int(score.schedule.bytes(model.hidden, element_bytes=_BF16_BYTES).sum())


def _rows(
    scores: "Sequence[ExpertScore]", setting: "ExpertSetting", model: "ModelSpec"
) -> dict[str, Any]:
    schedule = scores[0].schedule
    return {
        "workload": setting.kind,
        "step": setting.step,
        "ranks": setting.ranks,
        "experts": setting.experts,
        "slots": setting.slots,
        "loads": schedule.rows.sum(axis=0).tolist(),
        "rows_before": schedule.computed_by_owners.tolist(),
        "policies": [
            {
                "policy": score.policy,
                "skew": score.schedule.skew,
                "gap": score.gap,
                "price_rows": score.price,
                "rows_after": score.schedule.computed.tolist(),
                "copies": score.schedule.copies,
                "fewest_copies": score.fewest_copies,
                "copy_bytes": _copy_bytes(score, model),
                "row_bytes": _row_bytes(score, model),
                "replicas": score.schedule.places[score.schedule.is_copy].tolist(),
                "digest": score.schedule.digest,
            }
            for score in scores
        ],
    }


def _print_lines(scores: "Sequence[ExpertScore]", model: "ModelSpec") -> None:
    console = make_console()
    for score in scores:
        schedule = score.schedule
        console.print(
            f"{score.policy}: max/mean {schedule.skew:.3f}, {score.gap:.1%} above the bound, "
            f"{schedule.copies} copies, {format_bytes(_copy_bytes(score, model))} for them.",
            soft_wrap=True,
        )


def _print_tables(
    scores: "Sequence[ExpertScore]", setting: "ExpertSetting", model: "ModelSpec"
) -> None:
    console = make_console()
    columns = (
        Column("policy", is_left=True),
        Column("max/mean"),
        Column("above bound", goes=3),
        Column("copies"),
        Column("fewest", goes=2),
        Column("for copies"),
        Column("for rows", goes=1),
        Column("price", goes=4),
    )
    cells = [
        (
            score.policy,
            f"{score.schedule.skew:.3f}",
            f"{score.gap:.1%}",
            str(score.schedule.copies),
            str(score.fewest_copies),
            format_bytes(_copy_bytes(score, model)),
            format_bytes(_row_bytes(score, model)),
            f"{score.price:,.0f}",
        )
        for score in scores
    ]
    console.print(_title(setting) + ".", soft_wrap=True)
    print_columns(console, columns, cells, title="Rows of the fullest rank, and what it costs")
    console.print(
        "Bytes: bf16, one layer and micro-batch, forward and backward. Fewest: copies that any "
        "plan as even needs, by a lower bound. Price: rows that the slowest rank could compute "
        "meanwhile, at --least-rows for a copy.",
        style="dim",
    )
    if len(scores) == 1 and scores[0].schedule.copies:
        _print_copies(scores[0])


def _print_copies(score: "ExpertScore") -> None:
    """The experts that have copies, and where."""
    schedule = score.schedule
    loads = schedule.loads.tolist()
    copies: dict[int, list[str]] = {}
    for at, (expert, rank) in enumerate(schedule.places.tolist()):
        if schedule.is_copy[at]:
            copies.setdefault(expert, []).append(f"rank {rank} ({loads[at]:,})")
    totals = schedule.rows.sum(axis=0)
    hottest = sorted(copies, key=lambda expert: (-int(totals[expert]), expert))
    cells = [
        (
            str(expert),
            f"{int(totals[expert]):,}",
            str(schedule.owners[expert]),
            ", ".join(copies[expert]),
        )
        for expert in hottest[:_SHOWN]
    ]
    columns = (
        Column("expert"),
        Column("rows"),
        Column("owner"),
        Column("copies on (rows)", is_left=True, wraps=18),
    )
    print_columns(make_console(), columns, cells, title="Copies")
    if len(hottest) > _SHOWN:
        make_console().print(f"and {len(hottest) - _SHOWN:,} more experts", style="dim")
