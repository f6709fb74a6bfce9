"""What ``equipoise pack`` shows and writes: the table, the JSON rows, the packs themselves."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from equipoise.balance.packing.divided_price import TRAVEL_SHARE
from equipoise.balance.packing.evaluate import PackedRecord, PackScore, Setting
from equipoise.base.errors import SpecError
from equipoise.base.units import format_bytes
from equipoise.cli.console import make_console
from equipoise.cli.table import Column, print_columns
from equipoise.spec.pack import MicroBatch
from equipoise.spec.workload import Lengths

_BAR_CHARACTERS = 16
"""Characters for the loads of all bins; of more bins than that, neighbours share one."""

_GOES = {"load of bins": 2, "plan": 1, "p95": 3, "tok/cap": 4, "delay": 5, "travels": 6, "gap": 7}
"""Columns in the turn in which they leave a narrow console; the others are keys."""

_BLOCKS = "▁▂▃▄▅▆▇█"


def score_rows(scores: list[PackScore]) -> list[dict[str, object]]:
    """A row of plain values for each policy."""
    keys = [f.name for f in dataclasses.fields(PackScore) if f.name != "bin_seconds"]
    return [{key: getattr(score, key) for key in keys} for score in scores]


def write_packs(file: Path, packs: Sequence[Sequence[PackedRecord]]) -> None:
    """Write every micro-batch as a JSON line, so that anyone can recompute the figures.

    Raises:
        SpecError: the file cannot be written.
    """
    try:
        with file.open("w") as out:
            for records in packs:
                for record in records:
                    for line in _lines(record):
                        out.write(json.dumps(line, separators=(",", ":")) + "\n")
    except OSError as error:
        raise SpecError(f"--out {file} cannot be written ({error.strerror}).") from None


def _lines(record: PackedRecord) -> Iterator[dict[str, object]]:
    index = 0
    for place, micro_batches in enumerate(record.bins):
        for batch in micro_batches:
            yield _line(record, place, index, batch)
            index += 1


def _line(
    record: PackedRecord, place: int, index: int, batch: tuple[MicroBatch, ...]
) -> dict[str, object]:
    pieces = np.concatenate([share.pieces for share in batch])
    froms = np.concatenate([share.begins for share in batch])
    order = np.lexsort((pieces[:, 1], pieces[:, 0]))
    line: dict[str, object] = {
        "policy": record.policy,
        "step": record.step,
        "bin": place,
        "micro_batch": index,
        "pieces": pieces[order].tolist(),
        "attends_from": froms[order].tolist(),
    }
    if record.is_flush:
        line["flush"] = True
    if len(batch) > 1:
        line["ranks"] = [share.pieces.tolist() for share in batch]
    return line


def print_table(scores: list[PackScore], setting: Setting, lengths: Lengths, origin: str) -> None:
    """A row for each policy, with the loads of its bins as bars."""
    console = make_console(False)
    pack = setting.pack
    middle, tail, longest = np.percentile(lengths, [50, 99, 100])
    shared = f", each shared by {setting.context_ranks} ranks" if setting.context_ranks > 1 else ""
    console.print(
        f"{len(lengths):,} document{'s' * (len(lengths) > 1)} from {origin}: median "
        f"{middle:,.0f} tokens, 99th percentile {tail:,.0f}, longest {longest:,.0f}. "
        f"{len(setting.steps)} steps of {pack.step_tokens:,} tokens over {setting.bins} "
        f"bins{shared}, windows of {pack.context_tokens:,}. Attention costs as much as the linear "
        f"layers at {setting.curve.break_even_tokens:,.0f} tokens.",
        highlight=False,
    )
    has_delay = any(score.delay_max for score in scores)
    has_travel = any(score.travel_bytes for score in scores)
    has_turns = not setting.is_pipeline and any(score.turn_skew != score.skew for score in scores)
    names = ["policy", "load of bins", "skew", "p95", "gap", "tok/cap", "cuts", "plan"]
    names[6:6] = ["delay"] * has_delay
    names[3:3] = ["by turn"] * has_turns
    names[-1:-1] = ["travels"] * has_travel
    heaviest = max(score.bin_seconds[0] for score in scores)
    print_columns(
        console,
        [
            Column(name, is_left=name in ("policy", "load of bins"), goes=_GOES.get(name, 0))
            for name in names
        ],
        [[_cell(score, name, heaviest) for name in names] for score in scores],
    )
    notes = [
        "skew: heaviest over mean; every other one waits for it. gap: over the least that the "
        "same pieces allow."
    ]
    if has_turns:
        meets = "as this layout's do" if setting.meets_each_turn else "as under ZeRO 2 and 3"
        notes.append(f"by turn: the same where ranks meet in every micro-batch, {meets}.")
    if has_delay:
        notes.append("delay: steps that a token waits, mean / most.")
    if has_travel:
        notes.append("travels: keys and values sent in one step's forward.")
    console.print(" ".join(notes), style="dim")
    for score in scores:
        if sentence := _verdict(score):
            console.print(sentence, highlight=False)
    if any(score.whole_step_s is not None and score.travel_bytes for score in scores):
        console.print(
            f"Travel is priced at {TRAVEL_SHARE:g} of a token's linear layers for each token sent.",
            style="dim",
        )


def _cell(score: PackScore, name: str, heaviest: float) -> str:
    match name:
        case "policy":
            return score.policy
        case "load of bins":
            return _bars(score.bin_seconds, heaviest, _BAR_CHARACTERS)
        case "skew":
            return f"{score.skew:.3f}"
        case "by turn":
            return f"{score.turn_skew:.3f}"
        case "p95":
            return f"{score.p95_skew:.3f}"
        case "gap":
            return f"{score.gap:+.1%}"
        case "tok/cap":
            return f"{score.max_tokens_ratio:.2f}"
        case "delay":
            return f"{score.delay_mean:.2f} / {score.delay_max}" if score.delay_max else "0"
        case "cuts":
            return f"{score.fragments:,}"
        case "travels":
            return format_bytes(int(score.travel_bytes)) if score.travel_bytes else "0"
        case _:
            return f"{score.plan_s * 1e3:.1f} ms"


def _verdict(score: PackScore) -> str:
    """Whether dividing documents pays; empty for policies that keep them whole."""
    if score.whole_step_s is None:
        return ""
    ratio = score.step_s / score.whole_step_s
    does = f"cuts {score.fragments:,} times" if score.fragments else "cuts no document"
    if score.travel_bytes:
        does = f"sends {format_bytes(int(score.travel_bytes))} a step"
    if abs(ratio - 1) < 0.0005:
        return f"{score.policy} {does} and takes as long as by-work."
    if ratio > 1:
        return (
            f"{score.policy} {does} and takes {ratio - 1:.1%} longer than by-work: by-work is "
            f"faster here."
        )
    return f"{score.policy} {does} and takes {1 - ratio:.1%} less time than by-work."


def _bars(loads: tuple[float, ...], heaviest: float, width: int) -> str:
    """Loads as a row of bars, heaviest first, ``width`` characters wide."""
    wide = max(1, width // len(loads))
    shown = np.array(loads)
    if len(loads) > width:
        shown = np.array([part.max() for part in np.array_split(shown, width)])
    levels = np.clip(np.rint(8 * shown / heaviest).astype(int), 1, 8)
    return "".join(_BLOCKS[level - 1] * wide for level in levels)
