"""``equipoise drill --runbook GUIDE RUN``: a guide finds out what is wrong with a run."""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.base.errors import DataError, FaultError, SpecError
from equipoise.cli.drill.faults import asks_more

if TYPE_CHECKING:
    from equipoise.fault.runbook.guide import Guide
    from equipoise.fault.runbook.run import GuideRun, GuideSubject


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the guide, and whether it may act."""
    group = parser.add_argument_group("runbooks")
    group.add_argument(
        "--runbook",
        metavar="GUIDE",
        help="run a guide on a run's folder, or on a server's address, and say what is wrong: "
        "a name of --runbook list, or a Markdown file; without a run, check and show it",
    )
    group.add_argument(
        "--act",
        action="store_true",
        help="also run the guide's commands that change something; otherwise they are proposed",
    )


def is_asked(args: argparse.Namespace) -> bool:
    """Whether a guide is."""
    if args.act and args.runbook is None:
        raise SpecError("--act runs the commands of a guide. Name one with --runbook.")
    return args.runbook is not None


def run(args: argparse.Namespace) -> int:
    """Run the guide, or list, check and show."""
    from equipoise.cli.drill import shown_guide
    from equipoise.cli.drill.commands import judge_command, run_command
    from equipoise.fault.runbook.record import as_json
    from equipoise.fault.runbook.run import run_guide
    from equipoise.fault.runbook.shipped import open_guide

    if args.overrides or args.name is not None:
        raise SpecError("--runbook reads a run that was: it takes no key of run.toml.")
    if args.bit_flips or args.flips is not None or args.each_bit:
        raise SpecError("--runbook flips no bits: leave --bit-flips, --flips and --each-bit out.")
    if asks_more(args):
        raise SpecError(
            "--only, --repeat, --minutes and --out rehearse faults, and --runbook does not. Leave "
            "them out."
        )
    if args.runbook == "list":
        shown_guide.print_list(is_json=args.json)
        return 0
    guide = open_guide(args.runbook, judge_command)
    if args.run_toml is None:
        shown_guide.print_guide(guide, is_json=args.json)
        return 0
    subject = _subject(guide, str(args.run_toml))
    done = run_guide(guide, subject, run_command, agrees=args.act)
    kept = _keep(done, Path(subject.name))
    if args.json:
        sys.stdout.write(json.dumps(as_json(done), indent=1, allow_nan=False) + "\n")
    else:
        shown_guide.print_run(done, is_quiet=args.quiet, kept=kept)
    if any(s.state == "failed" and s.action and s.action.exit_code for s in done.steps):
        return FaultError.exit_code
    return 0


def _keep(done: "GuideRun", folder: Path) -> Path | None:
    """Keep what was said in the run's folder, if there is one that can be written."""
    from equipoise.fault.runbook.record import write_record

    if not folder.is_dir():
        return None
    try:
        return write_record(folder, done)
    except FaultError as error:
        sys.stderr.write(f"{error}\n")
        return None


def _subject(guide: "Guide", asked: str) -> "GuideSubject":
    """What the guide is to run on.

    Raises:
        SpecError, DataError: it cannot run on that, or that cannot be read.
    """
    from equipoise.fault.runbook.query import METRIC, wanted_events
    from equipoise.fault.runbook.run import GuideSubject
    from equipoise.fault.runbook.source import JournalSource, MetricsSource

    asks = {query.events.kind == METRIC for query in guide.queries if query.events is not None}
    path = Path(asked)
    if asks == {True, False}:
        raise SpecError(f"{guide.name} asks both a journal and metrics. Make two guides of it.")
    if asks == {True}:
        if path.is_dir():
            raise SpecError(
                f"{guide.name} asks a server's metrics, and {asked} is a folder. Give the server's "
                f"address, as in 127.0.0.1:8000, or a file with what it answers at /metrics."
            )
        return GuideSubject(asked, MetricsSource(_metrics(path, asked)))
    if path.is_file():
        raise SpecError(
            f"{guide.name} asks a run's journal, and {asked} is a file. Give the run's folder."
        )
    source = JournalSource(path, wanted_events(guide.queries))
    return GuideSubject(asked, source, source.start)


def _metrics(path: Path, asked: str) -> "dict[str, dict[tuple[tuple[str, str], ...], float]]":
    """What a server shows at an address, or a file holds."""
    from equipoise.base.disk import explain_refusal
    from equipoise.base.read import read_text
    from equipoise.dash.web.serving import explain_silence, get_metrics, metrics_url
    from equipoise.observe.prometheus import parse_metrics

    if path.exists():
        try:
            samples = parse_metrics(read_text(path))
        except (OSError, ValueError) as error:
            why = explain_refusal(error, path) if isinstance(error, OSError) else "not UTF-8 text"
            raise DataError(f"{path} cannot be read: {why}.") from error
    else:
        url = metrics_url(re.sub(r"^(https?):/+", r"\1://", asked))  # a path has one slash
        try:
            samples = parse_metrics(get_metrics(url))
        except (OSError, ValueError) as error:
            raise DataError(explain_silence(url, error)) from error
    if not any(name.startswith("equipoise_") for name in samples):
        raise DataError(f"{asked} has no metrics of equipoise serve.")
    return samples
