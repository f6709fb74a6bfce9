"""What ``equipoise pack`` shows and writes: the table, the JSON rows, the packs themselves."""

import dataclasses
import json
from pathlib import Path

import numpy as np

from equipoise.balance.evaluate import PackedRecord, PackScore, Setting, split_batch
from equipoise.base.errors import SpecError
from equipoise.base.units import format_bytes
from equipoise.cli.console import make_console
from equipoise.spec.pack import MicroBatch
from equipoise.spec.workload import Lengths

_BARS = 8
"""Bins whose bars are shown; of more, as many spread over all of them."""


def score_rows(scores: list[PackScore]) -> list[dict[str, object]]:
    """One row of plain values a policy."""
    keys = [f.name for f in dataclasses.fields(PackScore) if f.name != "bin_seconds"]
    return [{key: getattr(score, key) for key in keys} for score in scores]


def write_packs(file: Path, packs: list[tuple[str, list[PackedRecord]]], setting: Setting) -> None:
    """Write every micro-batch as a JSON line, so that anyone can recompute the figures.

    Raises:
        SpecError: the file cannot be written.
    """
    try:
        with file.open("w") as out:
            for policy, records in packs:
                for record in records:
                    for index, batch in enumerate(record.packed):
                        line = _line(policy, record, index, batch, setting)
                        out.write(json.dumps(line, separators=(",", ":")) + "\n")
    except OSError as error:
        raise SpecError(f"--out {file} cannot be written ({error.strerror}).") from None


def _line(
    policy: str, record: PackedRecord, index: int, batch: MicroBatch, setting: Setting
) -> dict[str, object]:
    line: dict[str, object] = {
        "policy": policy,
        "step": record.step,
        "micro_batch": index,
        "pieces": batch.pieces.tolist(),
    }
    if batch.attends_from is not None:
        line["attends_from"] = batch.attends_from.tolist()
    if record.is_flush:
        line["flush"] = True
    if setting.context_ranks > 1:
        line["ranks"] = [pieces.tolist() for pieces in split_batch(batch, setting)]
    return line


def print_table(scores: list[PackScore], setting: Setting, lengths: Lengths, origin: str) -> None:
    """One row a policy, with the loads of its bins as bars."""
    from rich.table import Table

    console = make_console(False)
    pack = setting.pack
    middle, tail, longest = np.percentile(lengths, [50, 99, 100])
    shared = f", each shared by {setting.context_ranks} ranks" if setting.context_ranks > 1 else ""
    console.print(
        f"{len(lengths):,} documents from {origin}: median {middle:,.0f} tokens, 99th "
        f"percentile {tail:,.0f}, longest {longest:,.0f}. {len(setting.steps)} steps of "
        f"{pack.step_tokens:,} tokens over {setting.bins} bins{shared}, windows of "
        f"{pack.context_tokens:,}. Attention costs as much as the linear layers at "
        f"{setting.curve.break_even_tokens:,.0f} tokens.",
        highlight=False,
    )
    table = Table()
    for name in ("policy", "load of each bin, heaviest first"):
        table.add_column(name, no_wrap=True)
    has_delay = any(score.delay_max for score in scores)
    has_travel = any(score.travel_bytes for score in scores)
    names = ["skew", "p95", "gap", "tokens/cap", "cuts", "plan"]
    names[4:4] = ["delay"] * has_delay
    names[-1:-1] = ["travels"] * has_travel
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    heaviest = max(score.bin_seconds[0] for score in scores)
    for score in scores:
        row = [f"{score.skew:.3f}", f"{score.p95_skew:.3f}", f"{score.gap:+.1%}"]
        row.append(f"{score.max_tokens_ratio:.2f}")
        if has_delay:
            row.append(f"{score.delay_mean:.2f}, most {score.delay_max}")
        row.append(f"{score.fragments:,}")
        if has_travel:
            row.append(format_bytes(score.travel_bytes) if score.travel_bytes else "0")
        row.append(f"{score.plan_s * 1e3:.1f} ms")
        table.add_row(score.policy, _bars(score.bin_seconds, heaviest), *row)
    console.print(table)
    notes = [
        "skew: heaviest over mean; every other one waits for it. gap: over the least that the "
        "same pieces allow."
    ]
    if has_delay:
        notes.append("delay: steps that a token waits, mean and most.")
    if has_travel:
        notes.append("travels: keys and values sent in one step's forward.")
    console.print(" ".join(notes), style="dim")


def _bars(loads: tuple[float, ...], heaviest: float) -> str:
    """A bar for each bin, or for some of many."""
    shown = np.unique(np.linspace(0, len(loads) - 1, min(_BARS, len(loads))).round().astype(int))
    return "\n".join("█" * max(1, round(24 * loads[index] / heaviest)) for index in shown)
