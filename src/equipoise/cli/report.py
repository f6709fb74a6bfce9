"""``equipoise report``: runs as one HTML file that needs nothing but a browser."""

import argparse
import json
import sys
from pathlib import Path

from equipoise.base.errors import SpecError
from equipoise.cli.written import require_not_of_run
from equipoise.spec.names import RECOMMEND

HELP = "write runs as one HTML page: predicted beside measured, and each rank's timeline"

EXAMPLES = """\
examples:
  equipoise report runs/by-work                     one run; writes runs/by-work/report.html
  equipoise report runs/in-order runs/by-work       two runs, held against each other
  equipoise report runs/run                         a run of train --compare: its sides
  equipoise report runs/by-work --out report.html
  equipoise report runs/by-work --json

--json prints {"report", "headline", "runs": [...], "comparisons": [...]}. Unknown is null.
  of each run: label folder policy ranks steps tokens stop faults; missing_ranks: whose journals
    are lost; loss (of the last step), held_out_loss (the last), loss_spikes: steps;
    means over steps, without the first of each session: step_s predicted_step_s tokens_per_s
    mfu wait_share uneven_share (of it, what even work gives back) plan_s, skew (max/mean of the
    ranks' busy seconds) predicted_skew predicted_turn_skew (the slowest rank of each turn,
    added up, over the mean: what counts where ranks meet in every micro-batch) in_order_skew;
    step_error busy_error (a number for each rank): median of |measured - predicted| / measured;
    peak_memory_bytes forecast_bytes of the fullest rank;
    plan, of a run that obeyed a plan.lock: keys, steps, and planned measured error of step_s (a
    median), parts (seconds) and memory_bytes; terms of the planned seconds
  of each comparison: baseline label; measured predicted: how many times faster label is;
    steps: over how many; is_same_documents; differs_in: keys of run.toml; of sides of one run
    also low high: the 90% interval of measured, by Student, over steps;
    busy busy_low busy_high busy_predicted: the same by processor time of the fullest rank;
    run_delay: share of the ranks' time in which other programs had the cores
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder of a run (holds journal/)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the page to write (default: report.html in the first run's folder)",
    )


def run(args: argparse.Namespace) -> int:
    """Write the page and say where it is."""
    if any((folder / RECOMMEND).is_file() for folder in args.runs):
        return _report_recommend(args)
    from equipoise.dash.compare import compare_all
    from equipoise.dash.findings import headline
    from equipoise.dash.planned import read_plans
    from equipoise.dash.report import read_runs, write_page
    from equipoise.dash.summary import labels, summarize
    from equipoise.dash.verdict import tell_spread

    for folder in args.runs:
        require_not_of_run("out", args.out, folder)
    records = read_runs(args.runs)
    for record in records:
        if record.missing_ranks:
            sys.stderr.write(f"{record.missing_sentence}\n")
    out = write_page(records, args.out or args.runs[0] / "report.html")
    names = labels(records)
    summaries = [summarize(record, name) for record, name in zip(records, names, strict=True)]
    comparisons = compare_all(records, names)
    text = headline(summaries, comparisons)
    if args.json:
        plans, _ = read_plans(records, names)
        answer = {
            "report": str(out),
            "headline": text,
            "runs": [
                each.as_json() | {"plan": None if plan is None else plan.as_json()}
                for each, plan in zip(summaries, plans, strict=True)
            ],
            "comparisons": [each.as_json() for each in comparisons],
        }
        sys.stdout.write(json.dumps(answer, indent=2, allow_nan=False) + "\n")
    elif args.quiet:
        sys.stdout.write(f"{out}\n")
    else:
        spread = "".join(f"{line}\n" for each in comparisons if (line := tell_spread(each)))
        sys.stdout.write(f"{text}\n{spread}{out}\n")
    return 0


def _report_recommend(args: argparse.Namespace) -> int:
    """The page of one recommender's run."""
    from equipoise.dash.recommend.report import headline, read_record, write_report

    if len(args.runs) > 1:
        raise SpecError(
            f"{len(args.runs)} runs are given, and a recommender's run has a page of its own. Give "
            "one."
        )
    folder = args.runs[0]
    require_not_of_run("out", args.out, folder)
    record = read_record(folder)
    out = write_report(record, args.out or folder / "report.html")
    if args.json:
        answer = {"report": str(out), "headline": headline(record), "runs": [record]}
        sys.stdout.write(json.dumps(answer, indent=2, allow_nan=False) + "\n")
    else:
        sys.stdout.write(f"{out}\n" if args.quiet else f"{headline(record)}\n{out}\n")
    return 0
