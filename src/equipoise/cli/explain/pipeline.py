"""``equipoise explain --schedule``: score strategies of a pipeline, show, draw and trace them."""

import argparse
import sys
from dataclasses import replace

from equipoise.cli.explain.pipeline_rows import explain_rows
from equipoise.cli.explain.pipeline_score import score_pipelines
from equipoise.cli.explain.pipeline_setting import pipeline_setting_from
from equipoise.cli.explain.pipeline_table import print_all, print_lines, print_one


def explain_pipeline(args: argparse.Namespace) -> None:
    """Explain the schedule of one strategy, or compare all."""
    setting = pipeline_setting_from(args)
    scores, left_out = score_pipelines(setting)
    predicted = [
        replace(each.timeline, name=f"{each.title}, predicted for {setting.machine}")
        for each in scores
    ]
    if args.plot is not None:
        from equipoise.dash.pipeline_plot import plot_pipeline

        plot_pipeline(args.plot, predicted)
    if args.trace is not None:
        from equipoise.dash.pipeline_plot import write_trace

        write_trace(args.trace, predicted, scores[0].schedule if len(scores) == 1 else None)
    if args.json:
        import json

        rows = explain_rows(scores, left_out, setting)
        sys.stdout.write(json.dumps(rows, separators=(",", ":")) + "\n")
        return
    if args.text:
        sys.stdout.write("\n\n".join(str(score.schedule) for score in scores) + "\n")
    elif args.quiet:
        print_lines(scores, setting)
    elif setting.strategy == "all":
        print_all(scores, left_out, setting)
    else:
        print_one(scores[0], setting)
    if not args.quiet:
        for file in (args.plot, args.trace):
            if file is not None:
                sys.stdout.write(f"{file}\n")
