"""``equipoise convert RUN TO --budget SHARE``: a recommender's run becomes one of fewer bits."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from equipoise.base.errors import ModelError, SpecError
from equipoise.base.units import format_bytes
from equipoise.cli.console import make_console, make_progress
from equipoise.cli.convert.layout import given_flags
from equipoise.cli.table import Column, print_columns

_BUDGET = 0.001
_FOREIGN = (
    *("dtype", "adapter", "average", "interpolate", "cluster_experts"),
    *("layout", "dry_run", "tokenizer"),
)


def run(args: argparse.Namespace) -> int:
    """Convert, and say what each part is kept in."""
    if given := given_flags(args, _FOREIGN):
        raise SpecError(f"{given[0]} is not for a recommender. Leave it out.")
    target: Path | None = args.target
    if target is None:
        raise SpecError("convert needs TO, the folder to make.")
    if target.exists():
        raise ModelError(f"{target} already exists. Name a new folder, or delete it.")
    import torch

    from equipoise.recsys.lowbit.request import convert_run, require_budget

    budget = _BUDGET if args.budget is None else args.budget
    require_budget(budget)
    torch.set_num_threads(1)  # as ranks have while they train and evaluate
    progress = make_progress(args.quiet or args.json)
    progress.start(f"convert {args.source.name}", 2)
    try:
        facts = convert_run(
            args.source, target, budget, stream=args.stream, tick=lambda: progress.advance(1)
        )
    finally:
        progress.finish()
    if args.json:
        sys.stdout.write(json.dumps({"folder": str(target), **facts}, indent=1) + "\n")
    elif args.quiet:
        sys.stdout.write(f"{target}\n")
    else:
        _print(target, facts)
    return 0


def _print(target: Path, facts: dict[str, Any]) -> None:
    console = make_console(False)
    columns = (
        Column("part", is_left=True),
        Column("kept in", is_left=True),
        Column("size"),
        Column("fp32", goes=2),
        Column("its loss", goes=1),
    )
    rows = [
        (
            each["name"],
            each["form"],
            format_bytes(each["bytes"]),
            format_bytes(each["fp32_bytes"]),
            _loss(each),
        )
        for each in facts["parts"]
    ]
    print_columns(console, columns, rows)
    kept, whole, held = facts["bytes"]["kept"], facts["bytes"]["fp32"], facts["held_out"]
    fired = [each for each in facts["windows"] if each["fired"]]
    words = (
        f"Wrote {target}: {format_bytes(kept)} where fp32 takes {format_bytes(whole)}, "
        f"{whole / kept:.2f}x less. Normalised entropy grew by {100 * facts['loss']['loss']:.4f}% "
        f"on validation (budget {100 * facts['budget']:g}%) and by {100 * held['loss']:.4f}% on "
        f"test ({held['entropy_fp32']:.4f} to {held['entropy_kept']:.4f}).\n"
        f"Followed {len(facts['windows'])} windows of later samples; the monitor fired "
        f"{_times(len(fired))}"
    )
    words += "".join(
        f"; window {each['window']}: {each['fired']}, {each['did']} chosen anew, loss "
        f"{100 * each['entropy']:.4f}% to {100 * each['entropy_after']:.4f}%"
        for each in fired
    )
    sys.stdout.write(f"{words}.\nServe it: equipoise serve {target}\n")


def _loss(part: dict[str, Any]) -> str:
    """What the part loses alone, all others in fp32."""
    row = part["losses"].get(part["form"])
    return "-" if row is None else f"{100 * row['loss']:+.4f}%"


def _times(count: int) -> str:
    return {0: "never", 1: "once"}.get(count, f"{count} times")
