"""``equipoise drill --bit-flips``: how likely one flipped bit is to change a model's output."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.base.errors import SpecError
from equipoise.base.units import format_bytes
from equipoise.cli.console import make_console, make_progress
from equipoise.cli.drill.faults import asks_more
from equipoise.cli.run_arguments import run_from
from equipoise.cli.table import Column, print_columns

if TYPE_CHECKING:
    from rich.console import Console

    from equipoise.fault.vulnerability.campaign import Count, Vulnerability
    from equipoise.fault.vulnerability.interval import Estimate
    from equipoise.fault.vulnerability.protect import Protection
    from equipoise.fault.vulnerability.request import BitFlipAnswer

_INTERRUPTED = 130
_FLIPS = 25


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what is flipped, and how often."""
    group = parser.add_argument_group("bit flips")
    group.add_argument(
        "--bit-flips",
        action="store_true",
        help="measure how likely a flipped bit is to change the output of the run's model, by "
        "component and bit field, beside a small CNN and a small DLRM; run.toml may be a run's "
        "folder",
    )
    group.add_argument(
        "--flips",
        type=int,
        metavar="N",
        help=f"flips for each component and bit field (default: {_FLIPS})",
    )
    group.add_argument("--each-bit", action="store_true", help="every bit on its own")


def is_asked(args: argparse.Namespace) -> bool:
    """Whether bits are to be flipped.

    Raises:
        SpecError: flags of bit flips stand without it, or flags of faults beside it.
    """
    if not args.bit_flips and (args.flips is not None or args.each_bit):
        raise SpecError("--flips and --each-bit need --bit-flips. Give it too, or leave them out.")
    if args.bit_flips and asks_more(args):
        raise SpecError(
            "--only, --repeat, --minutes and --out are for faults that are rehearsed. Leave them "
            "out beside --bit-flips; --flips N says how many bits are flipped."
        )
    return bool(args.bit_flips)


def run(args: argparse.Namespace) -> int:
    """Flip bits, and print what was measured; after Ctrl-C, so far."""
    folder = _folder(args)
    from equipoise.fault.vulnerability.request import BitFlipRequest, flip_bits

    flips = _FLIPS if args.flips is None else args.flips
    request = BitFlipRequest(folder, flips, args.seed, each_bit=args.each_bit)
    answer = flip_bits(request, make_progress(args.quiet or args.json))
    if args.json:
        facts = {"run": None if folder is None else str(folder), "seed": args.seed}
        sys.stdout.write(json.dumps(facts | _as_json(answer), indent=1) + "\n")
    else:
        if not args.quiet:
            sys.stderr.writelines(f"{sentence} Passed over.\n" for sentence in answer.passed_over)
        console = make_console()
        for each in answer.measured:
            _print(console, each, is_quiet=args.quiet)
        if not answer.is_whole:
            console.print("Interrupted: this is what was measured so far.")
    return 0 if answer.is_whole else _INTERRUPTED


def _folder(args: argparse.Namespace) -> Path | None:
    """The run's folder, which may be given itself, or None without a run."""
    given: Path | None = args.run_toml
    if given is None and not args.overrides and args.name is None:
        return None
    if given is not None and given.is_dir():
        if args.overrides or args.name is not None:
            raise SpecError(
                f"{given} is a run's folder, so it takes no other keys. Leave them out."
            )
        return given
    folder = Path("runs") / run_from(args).spec.name
    if not folder.is_dir():
        raise SpecError(
            f"{folder} does not exist: bits are flipped in a trained model. Train it first with "
            f"equipoise train, or give the run's folder instead of run.toml."
        )
    return folder


def _print(console: "Console", measured: "Vulnerability", *, is_quiet: bool) -> None:
    fields = measured.fields
    shown = [] if len(fields) > len(_FIELD_NAMES) else [each.name for each in fields]
    console.print(f"{measured.model} {measured.dtype}: {measured.about}", soft_wrap=True)
    columns = [
        Column("component", is_left=True),
        Column("memory", goes=2),
        Column("PVF (95%)"),
        *(Column(each, goes=3) for each in shown),
        Column("loss > +1%", goes=4),
        Column("not finite", goes=1),
    ]
    rows = []
    for component in measured.components:
        cells = [measured.cells.get((component, each.name)) for each in fields]
        counts = [each for each in cells if each is not None]
        flips = sum(each.flips for each in counts)
        rows.append(
            [
                component,
                format_bytes(measured.size_bytes(component)),
                _interval(measured.of_component(component)),
                *(_share(measured.cells.get((component, each))) for each in shown),
                f"{sum(each.worse for each in counts)}/{flips}",
                f"{sum(each.not_finite for each in counts)}/{flips}",
            ]
        )
    print_columns(console, columns, rows, pad_edge=False)
    stored = [each for each in measured.components if measured.is_stored(each)]
    if stored:
        _print_fields(console, measured)
        _print_protection(console, measured, is_quiet=is_quiet)
    if not is_quiet:
        console.print(
            f"PVF: the share of single flips, each bit as likely, that changed "
            f"{measured.decisions}; {measured.flips:,} flips.",
            soft_wrap=True,
        )
    console.print()


_FIELD_NAMES = ("sign", "exponent", "mantissa high", "mantissa low")


def _print_fields(console: "Console", measured: "Vulnerability") -> None:
    """All weights: by bit field, and uniformly drawn faults."""
    rows = [
        [each.name, _bits(each.first, each.stop), _interval(measured.of_field(each.name))]
        for each in measured.fields
    ]
    uniform = [
        [f"any bit, {model}", "", _interval(count.pvf)] for model, count in measured.uniform.items()
    ]
    columns = [Column("all weights", is_left=True), Column("bits", goes=1), Column("PVF (95%)")]
    print_columns(console, columns, [*rows, *uniform], pad_edge=False)


def _print_protection(console: "Console", measured: "Vulnerability", *, is_quiet: bool) -> None:
    from equipoise.fault.vulnerability.protect import protect, rank

    if not is_quiet:
        console.print(f"Protect first: {', '.join(rank(measured))}.", soft_wrap=True)
    budgets = protect(measured)
    rows = [
        [
            f"{each.share:.0%}",
            _interval(each.avoided),
            f"{each.share:.2f}",
            "yes" if each.beats_random else "not shown",
            ", ".join(f"{name}{_part(part)}" for name, part in each.components),
        ]
        for each in budgets
    ]
    columns = [
        Column("protected bytes", is_left=True),
        Column("harmful flips avoided (95%)"),
        Column("at random"),
        Column("better", is_left=True),
        Column("what", is_left=True, goes=1, wraps=30),
    ]
    if rows:
        print_columns(console, columns, rows, pad_edge=False)
        if not is_quiet:
            console.print(
                f"Judged on {len(measured.trials):,} flips that ranked nothing; "
                f"{budgets[0].harmful:,} were harmful.",
                soft_wrap=True,
            )


def _part(part: float) -> str:
    if part == 1:
        return ""
    return f" ({part:.0%} of it)" if part >= 0.01 else " (under 1% of it)"


def _bits(first: int, stop: int) -> str:
    return f"{first}" if stop - first == 1 else f"{stop - 1} to {first}"


def _share(count: "Count | None") -> str:
    return "" if count is None else f"{count.pvf.value:.2f}"


def _interval(estimate: "Estimate") -> str:
    if estimate.value != estimate.value:
        return ""
    return f"{estimate.value:.3f} ({estimate.low:.3f} to {estimate.high:.3f})"


def _as_json(answer: "BitFlipAnswer") -> dict[str, Any]:
    return {
        "is_whole": answer.is_whole,
        "passed_over": list(answer.passed_over),
        "models": [_model_json(each) for each in answer.measured],
    }


def _model_json(measured: "Vulnerability") -> dict[str, Any]:
    from equipoise.fault.vulnerability.protect import protect, rank

    stored = [each for each in measured.components if measured.is_stored(each)]
    return {
        "model": measured.model,
        "dtype": measured.dtype,
        "about": measured.about,
        "decisions": measured.decisions,
        "flips": measured.flips,
        "planned": measured.planned,
        "components": [
            {
                "component": each,
                "bytes": measured.size_bytes(each),
                "is_stored": measured.is_stored(each),
                **_estimate_json(measured.of_component(each)),
                "fields": {
                    part.name: _count_json(measured.cells[each, part.name])
                    for part in measured.fields
                    if (each, part.name) in measured.cells
                },
            }
            for each in measured.components
        ],
        "fields": {
            each.name: {
                "bits": [each.first, each.stop - 1],
                **_estimate_json(measured.of_field(each.name)),
            }
            for each in measured.fields
            if stored
        },
        "uniform": {model: _count_json(count) for model, count in measured.uniform.items()},
        "protect_first": rank(measured),
        "protection": [_protection_json(each) for each in protect(measured)],
    }


def _protection_json(each: "Protection") -> dict[str, Any]:
    return {
        "share": each.share,
        "components": dict(each.components),
        "harmful": each.harmful,
        "avoided": _estimate_json(each.avoided),
        "beats_random": each.beats_random,
    }


def _count_json(count: "Count") -> dict[str, Any]:
    counts = {
        "flips": count.flips,
        "wrong": count.wrong,
        "not_finite": count.not_finite,
        "worse": count.worse,
    }
    return counts | _estimate_json(count.pvf)


def _estimate_json(estimate: "Estimate") -> dict[str, float | None]:
    value = None if estimate.value != estimate.value else estimate.value
    return {"pvf": value, "low": estimate.low, "high": estimate.high}
