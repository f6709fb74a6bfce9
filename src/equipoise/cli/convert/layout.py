"""``equipoise convert --layout``: what a layout reads of a checkpoint, and one written for it."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.base.errors import ModelError, SpecError
from equipoise.base.units import format_bytes, format_seconds
from equipoise.cli.console import make_progress
from equipoise.cli.table import Column, print_columns

if TYPE_CHECKING:
    from equipoise.train.saving.reshape import ReshapeAnswer

_ALONE = ("adapter", "average", "interpolate", "cluster_experts", "dtype", "tokenizer")
"""Flags of a Hugging Face folder, which a checkpoint does not have."""

_MOST_ROWS = 64
"""With more ranks only those are printed that read most and least; ``--json`` has all."""

_COLUMNS = (Column("rank"), Column("loads"), Column("reads"), Column("ranges", goes=1))


def given_flags(args: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Those of some flags that stand in the command, 0 and empty words too."""
    values = {name: getattr(args, name) for name in names}
    given = [name for name, value in values.items() if not (value is None or value is False)]
    return [f"--{name.replace('_', '-')}" for name in given]


def run(args: argparse.Namespace) -> int:
    """Print what ranks read, and write the checkpoint unless it is a dry run."""
    if given := given_flags(args, _ALONE):
        raise SpecError(
            f"{given[0]} belongs to a Hugging Face folder, and --layout writes a checkpoint. Give "
            f"one of them."
        )
    target: Path | None = args.target
    if target is None and not args.dry_run:
        raise SpecError(
            "convert --layout needs TO, the folder to make. To see what ranks would read, add "
            "--dry-run."
        )
    if target is not None and target.exists():
        raise ModelError(f"{target} already exists. Name a new folder, or delete it.")
    from equipoise.train.saving.reshape import ReshapeRequest, predict_reshape, reshape

    request = ReshapeRequest(args.source, args.layout)
    if target is None or args.dry_run:
        _print(args, predict_reshape(request), None)
        return 0
    predicted = predict_reshape(request)
    progress = make_progress(args.quiet or args.json)
    progress.start(f"convert {args.source.name}", predicted.layout.world)
    try:
        path, answer = reshape(request, target, progress.advance)
    finally:
        progress.finish()
    _print(args, answer, path)
    return 0


def _print(args: argparse.Namespace, answer: "ReshapeAnswer", path: Path | None) -> None:
    if args.json:
        sys.stdout.write(json.dumps(_as_json(answer, path), indent=1) + "\n")
        return
    if args.quiet:
        sys.stdout.write(f"{path or answer.read_bytes}\n")
        return
    sys.stderr.writelines(f"{sentence} Passed over.\n" for sentence in answer.passed_over)
    from rich.console import Console

    if path is not None:
        sys.stdout.write(f"Wrote {path}.\n")
    writers = "1 rank" if answer.world_before == 1 else f"{answer.world_before} ranks"
    wrote = "" if path is not None else f", written by {writers}"
    sys.stdout.write(
        f"{answer.folder} ({format_bytes(answer.stored_bytes)} in shards{wrote}) loaded with "
        f"{args.layout}, zero={answer.layout.zero}:\n"
    )
    if answer.stages is not None:
        sys.stdout.write(f"Stages: {answer.stages}.\n")
    ranks = list(enumerate(answer.ranks))
    if len(ranks) > _MOST_ROWS:
        ranks.sort(key=lambda each: -each[1].read_bytes)
        ranks = [ranks[0], ranks[-1]]  # who reads most, and who reads least
    rows = [
        (
            str(rank),
            format_bytes(each.needed_bytes),
            format_bytes(each.read_bytes),
            f"{each.ranges:,}",
        )
        for rank, each in ranks
    ]
    rows.append(
        (
            "all",
            format_bytes(sum(each.needed_bytes for each in answer.ranks)),
            format_bytes(answer.read_bytes),
            f"{sum(each.ranges for each in answer.ranks):,}",
        )
    )
    print_columns(Console(), _COLUMNS, rows, sections=[len(rows) - 2])
    sys.stdout.write(f"{_seconds(answer)}\n")


def _seconds(answer: "ReshapeAnswer") -> str:
    rate, shared, own = answer.disk_bytes_per_s, answer.shared_disk_s, answer.own_disk_s
    if rate is None or shared is None or own is None:
        return "There is nothing to read."
    return (
        f"At {format_bytes(rate)}/s, measured on this machine's disk: {format_seconds(shared)} if "
        f"ranks share one such disk, {format_seconds(own)} if each has its own."
    )


def _as_json(answer: "ReshapeAnswer", path: Path | None) -> dict[str, object]:
    stages = answer.stages
    return {
        "folder": None if path is None else str(path),
        "from": str(answer.folder),
        "step": answer.step,
        "ranks_before": answer.world_before,
        "layout": {
            axis: getattr(answer.layout, axis)
            for axis in ("dp", "cp", "tp", "pp", "ep", "etp", "zero", "replicas")
        },
        "stage_edges": None if stages is None else list(stages.edges),
        "stored_bytes": answer.stored_bytes,
        "ranks": [dataclasses.asdict(each) for each in answer.ranks],
        "needed_bytes": sum(each.needed_bytes for each in answer.ranks),
        "read_bytes": answer.read_bytes,
        "disk_bytes_per_s": answer.disk_bytes_per_s,
        "shared_disk_s": answer.shared_disk_s,
        "own_disk_s": answer.own_disk_s,
        "passed_over": list(answer.passed_over),
    }
