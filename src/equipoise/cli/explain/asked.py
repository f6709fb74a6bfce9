"""What the verbs below ``equipoise explain`` share: their arguments, and how they answer."""

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.base.errors import SpecError
from equipoise.base.nearest import nearest
from equipoise.cli.counts import require_counts
from equipoise.cli.lengths import document_lengths
from equipoise.cli.run_arguments import add_run_arguments
from equipoise.cli.written import require_folder_of, require_kind

if TYPE_CHECKING:
    from equipoise.schedule.attention.price import LinkPrice
    from equipoise.spec.pack import Pieces
    from equipoise.spec.run.resolve import ResolvedRun

EXAMPLE_MODEL = "llama3-8b"
EXAMPLE_RANKS = 4
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""Ranks, rounds and micro-batches in pictures, one character each."""

LINK = "10:50"


@dataclass(frozen=True, slots=True)
class StepOrigin:
    """Where a step's micro-batches come from, to be shown."""

    documents: str
    policy: str
    model: str
    is_alone: bool
    """Whether one rank computes each stage; ranks that share one in the run are not priced."""


def add_step_arguments(
    parser: argparse.ArgumentParser, *, strategies: str, documents: str, window: int, ranks: str
) -> None:
    """Declare what attention and pipelines are asked: a run, documents, ranks, a machine.

    Args:
        parser: Of the verb.
        strategies: Help on ``--strategy``, its default included.
        documents: What ``--lengths`` fills, and the documents without it.
        window: ``--context-tokens`` if neither a flag nor a run gives it [tokens].
        ranks: What ranks share, and the run's key for how many.
    """
    add_run_arguments(parser)
    parser.add_argument("--strategy", metavar="NAME", help=f"all, or one: {strategies}")
    parser.add_argument(
        "--lengths",
        metavar="LIST|NAME|FILE",
        help=f"documents, as in 3000,40,900; or enough to fill {documents}, drawn from "
        f"pretrain-128k, prolong, python-stdlib, wikipedia, or a file of lengths",
    )
    parser.add_argument(
        "--context-tokens",
        type=int,
        metavar="N",
        help=f"pack.context_tokens (default: the run's, else {window})",
    )
    parser.add_argument(
        "--ranks", type=int, metavar="N", help=f"ranks that share {ranks}, else {EXAMPLE_RANKS})"
    )
    parser.add_argument(
        "--model", metavar="NAME", help=f"model.preset (default: the run's, else {EXAMPLE_MODEL})"
    )
    parser.add_argument(
        "--tflop-per-s",
        type=float,
        default=400.0,
        metavar="N",
        help="assumed speed of a rank (default: 400)",
    )
    parser.add_argument("--text", action="store_true", help="print the whole schedule as text")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the schedule in time (.png, .svg or .pdf)"
    )


def add_link_arguments(
    parser: argparse.ArgumentParser, between: str, dtypes: tuple[str, ...] = ("bf16", "fp32")
) -> None:
    """Declare ``--dtype`` and ``--link``; ``between`` says what the link joins."""
    parser.add_argument(
        "--dtype", choices=dtypes, default="bf16", help="of what travels (default: bf16)"
    )
    parser.add_argument(
        "--link",
        default=LINK,
        metavar="US:GB",
        help=f"assumed latency in us and bandwidth in GB/s {between} (default: {LINK})",
    )


def judge(args: argparse.Namespace, most: dict[str, int], names: Sequence[str]) -> None:
    """Refuse counts, names of strategies and files that cannot be, before anything is computed."""
    require_counts(args, most)
    for flag, what in (("plot", "picture"), ("trace", "trace")):
        if flag in args:
            require_kind(flag, getattr(args, flag), what)
            require_folder_of(flag, getattr(args, flag))
    if args.strategy not in (None, "all", *names):
        raise SpecError(
            f'--strategy: "{args.strategy}" is not one of all, {", ".join(names)}. Nearest: '
            f'"{nearest(args.strategy, names)}".'
        )


def read_link(flag: str, text: str) -> "LinkPrice":
    """A link as a flag gives it, as in 10:50.

    Raises:
        SpecError: the text is anything else.
    """
    from equipoise.schedule.attention.price import LinkPrice

    latency, _, bandwidth = text.partition(":")
    try:
        latency_s, bytes_per_s = float(latency) / 1e6, 1e9 * float(bandwidth)
        if not (math.isfinite(latency_s) and math.isfinite(bytes_per_s)):
            raise ValueError
        return LinkPrice(latency_s, bytes_per_s)
    except ValueError:
        raise SpecError(
            f'{flag}: "{text}" is not a latency in us and a bandwidth in GB/s, as in 10:50.'
        ) from None


def asks_for_corpus(args: argparse.Namespace) -> bool:
    """Whether documents come from a corpus unless ``--lengths`` is given."""
    return args.run_toml is not None or any(k.startswith("data.") for k, _ in args.overrides)


def first_pieces(
    args: argparse.Namespace, run: "ResolvedRun", tokens: int, unit: str
) -> "tuple[Pieces, str]":
    """The first ``tokens`` tokens of the documents that are asked for, and where they come from."""
    from equipoise.data.mixture import open_stream

    lengths = document_lengths(
        args.lengths, run, least_tokens=tokens, is_quiet=args.quiet or args.json
    )
    window = run.spec.pack.context_tokens
    stream = open_stream(
        lengths.tokens,
        seed=run.spec.train.seed,
        context_tokens=window,
        mixture=lengths.mixture,
        whole=run.spec.data.whole if args.lengths is None else (),
    )
    return stream.step(0, tokens), f"first {unit} of {lengths.origin.partition(' (')[0]}"


def answer(
    args: argparse.Namespace,
    *,
    rows: Callable[[], object],
    lines: Callable[[], None],
    tables: Callable[[], None],
    schedules: Iterable[object] = (),
    files: Sequence[Path | None] = (),
) -> None:
    """Print one JSON document, schedules as text, a line each, or tables; then files written."""
    if args.json:
        import json

        sys.stdout.write(json.dumps(rows(), separators=(",", ":")) + "\n")
        return
    if getattr(args, "text", False):
        sys.stdout.write("\n\n".join(map(str, schedules)) + "\n")
    elif args.quiet:
        lines()
    else:
        tables()
    if not args.quiet:
        for file in files:
            if file is not None:
                sys.stdout.write(f"{file}\n")
