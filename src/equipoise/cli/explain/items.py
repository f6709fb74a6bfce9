"""``equipoise explain items``: which rank encodes which images and sound, before and after."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.base.errors import SpecError
from equipoise.base.units import format_bytes
from equipoise.cli.console import make_console, make_progress
from equipoise.cli.counts import MOST_SHARING, require_counts
from equipoise.cli.explain import asked
from equipoise.cli.run_arguments import add_run_arguments, run_from
from equipoise.cli.table import Column, print_columns
from equipoise.cli.written import require_folder_of, require_kind

if TYPE_CHECKING:
    from equipoise.balance.modality.deal import Dealt
    from equipoise.base.arrays import Ints

HELP = "show which rank encodes which images and sound of a run, before and after"

EXAMPLES = """\
examples:
  equipoise explain items run.toml                 the first 4 steps on 4 ranks
  equipoise explain items run.toml --ranks 16 --steps 8
  equipoise explain items run.toml --plot items.svg
  equipoise explain items run.toml --json
"""

_FP32_BYTES = 4
_MOST = {"ranks": MOST_SHARING, "steps": 1000}


@dataclass(frozen=True, slots=True, eq=False)
class _StepItems:
    """The items of a step."""

    work: "Ints"
    patches: int
    rows: int
    dealt: "Dealt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    add_run_arguments(parser)
    parser.add_argument(
        "--ranks", type=int, default=4, metavar="N", help="ranks that encode (default: 4)"
    )
    parser.add_argument(
        "--steps", type=int, default=4, metavar="N", help="first steps of the run (default: 4)"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw what ranks encode (.png, .svg or .pdf)"
    )


def run(args: argparse.Namespace) -> int:
    """Deal the items of a run's first steps.

    Raises:
        SpecError: the run has no encoders.
    """
    require_counts(args, _MOST)
    require_kind("plot", args.plot, "picture")
    require_folder_of("plot", args.plot)
    resolved = run_from(args)
    if not resolved.spec.encoders:
        raise SpecError(
            "The run encodes no images or sound. Give a run.toml with vision.layers or "
            "audio.layers."
        )
    steps = _steps(args)
    name = f"{resolved.spec.name}: items of {len(steps)} steps on {args.ranks} ranks"
    if args.plot is not None:
        from equipoise.dash.modality.plot import plot_items

        plot_items(args.plot, [(each.work, each.dealt) for each in steps], name)
    asked.answer(
        args,
        rows=lambda: _rows(steps, args.ranks, resolved.model.hidden),
        lines=lambda: _print_lines(steps),
        tables=lambda: _print_tables(steps, name, resolved.model.hidden),
        files=(args.plot,),
    )
    return 0


def _steps(args: argparse.Namespace) -> list[_StepItems]:
    from equipoise.balance.modality.deal import deal_items
    from equipoise.balance.modality.step import count_work, items_of
    from equipoise.data.cache.store import prepare
    from equipoise.data.mixture import open_stream
    from equipoise.data.modality.rules import ItemRules

    resolved = run_from(args)
    spec, rules = resolved.spec, ItemRules.of(resolved.spec)
    progress = make_progress(args.quiet or args.json)
    store = prepare(spec.data, resolved.base, progress=progress, rules=rules)
    items, pack = store.require_items(), spec.pack
    stream = open_stream(
        store.doc_tokens,
        seed=spec.train.seed,
        context_tokens=pack.context_tokens,
        whole=spec.data.whole,
    )
    steps = []
    for step in range(args.steps):
        pieces = stream.step(step * pack.step_tokens, pack.step_tokens)
        chosen = items_of(pieces, items, store.documents)
        work = count_work(items, chosen, spec.encoders, resolved.model.hidden)
        total, rows = int(items.patches[chosen].sum()), int(items.rows[chosen].sum())
        steps.append(_StepItems(work, total, rows, deal_items(work, args.ranks)))
    return steps


def _rows(steps: Sequence[_StepItems], ranks: int, width: int) -> dict[str, Any]:
    return {
        "ranks": ranks,
        "steps": [
            {
                "items": len(each.work),
                "patches": each.patches,
                "rows": each.rows,
                "row_bytes": each.rows * width * _FP32_BYTES,
                "work_in_turn": each.dealt.work_in_turn.tolist(),
                "work": each.dealt.work.tolist(),
                "skew_in_turn": each.dealt.skew_in_turn,
                "skew": each.dealt.skew,
                "gap": each.dealt.gap,
            }
            for each in steps
        ],
    }


def _print_lines(steps: Sequence[_StepItems]) -> None:
    console = make_console()
    for number, each in enumerate(steps, start=1):
        console.print(
            f"step {number}: {len(each.work)} items, max/mean {each.dealt.skew:.3f} by work, "
            f"{each.dealt.skew_in_turn:.3f} in turn, {each.dealt.gap:.1%} above the bound.",
            soft_wrap=True,
        )


def _print_tables(steps: Sequence[_StepItems], name: str, width: int) -> None:
    console = make_console()
    columns = (
        Column("step"),
        Column("items"),
        Column("patches", goes=2),
        Column("rows", goes=3),
        Column("row bytes", goes=1),
        Column("in turn"),
        Column("by work"),
        Column("above bound"),
    )
    cells = [
        (
            str(number),
            f"{len(each.work):,}",
            f"{each.patches:,}",
            f"{each.rows:,}",
            format_bytes(each.rows * width * _FP32_BYTES),
            f"{each.dealt.skew_in_turn:.3f}",
            f"{each.dealt.skew:.3f}",
            f"{each.dealt.gap:.1%}",
        )
        for number, each in enumerate(steps, start=1)
    ]
    print_columns(console, columns, cells, title=f"{name}: work of the fullest over the mean")
    console.print(
        "Work: multiplications of the encoders. Row bytes: what the decoder reads of all items, "
        "fp32, one way; rows that are read where they are encoded do not travel.",
        style="dim",
    )
