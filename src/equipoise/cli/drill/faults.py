"""``equipoise drill run.toml``: inject faults into a small copy of the run, and print a table."""

import argparse
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from equipoise.base.errors import FaultError, SpecError
from equipoise.cli.console import make_progress
from equipoise.cli.run_arguments import add_run_arguments, run_from

if TYPE_CHECKING:
    from equipoise.fault.drill.stage import DrillRun


_REPEAT, _MINUTES = 1, 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the run, which faults, and how often."""
    add_run_arguments(parser)
    group = parser.add_argument_group("faults")
    group.add_argument(
        "--only",
        metavar="FAULTS",
        help="names between commas, as kill,hang (default: all)",
    )
    group.add_argument(
        "--repeat",
        type=int,
        default=_REPEAT,
        metavar="N",
        help="rehearse each fault this often, each time elsewhere (default: %(default)s)",
    )
    group.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of places and moments (default: %(default)s)",
    )
    group.add_argument(
        "--minutes",
        type=float,
        default=_MINUTES,
        metavar="M",
        help="how long faults come at random moments in poisson (default: %(default)g)",
    )
    group.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="a new folder that keeps every run of the drill (default: a temporary one)",
    )


def asks_more(args: argparse.Namespace) -> bool:
    """Whether a flag is given that only a rehearsal reads."""
    is_given = args.only is not None or args.out is not None
    return is_given or args.repeat != _REPEAT or args.minutes != _MINUTES


def is_asked(args: argparse.Namespace) -> bool:
    """Always: faults are what a drill is about."""
    del args
    return True


def run(args: argparse.Namespace) -> int:
    """Rehearse, and print what was seen."""
    from equipoise.cli.drill.table import print_drill
    from equipoise.fault.drill.drill import DrillRequest, drill, names_of

    only = () if args.only is None else tuple(names_of(args.only))
    if args.only is not None and not only:
        raise SpecError("--only names no fault. Give names with commas between, or leave it out.")
    asked = _asked(args)
    request = DrillRequest(asked, only, args.repeat, args.seed, args.minutes, args.out)
    with _ended_by_signals():
        done = drill(request, make_progress(args.quiet or args.json))
    if args.json:
        sys.stdout.write(json.dumps(done.as_json(), indent=1) + "\n")
    else:
        print_drill(done, is_quiet=args.quiet)
    return 0 if done.is_survived else FaultError.exit_code


def _asked(args: argparse.Namespace) -> "DrillRun":
    """The run, judged here, and the words by which ``equipoise train`` reads it."""
    from equipoise.base.read import real_path
    from equipoise.fault.drill.stage import DrillRun
    from equipoise.observe.machine import own_ranks

    spec = run_from(args).spec
    words = [] if args.run_toml is None else [str(real_path(args.run_toml))]
    words += [f"--{key}={text}" for key, text in args.overrides]
    return DrillRun(tuple(words), spec, spec.layout.count_ranks(own_ranks()))


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM ends a drill as Ctrl-C does: with its processes and folders."""
    before: Any = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: object) -> NoReturn:
    del number, frame
    raise KeyboardInterrupt
