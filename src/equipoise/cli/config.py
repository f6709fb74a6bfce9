"""``equipoise config``: what every key of a run resolves to, and why."""

import argparse
import dataclasses
import json
import sys
from typing import TYPE_CHECKING

from equipoise.base.errors import LayoutError
from equipoise.cli.run_arguments import add_run_arguments, run_from

if TYPE_CHECKING:
    from equipoise.spec.run.spec import RunSpec

HELP = "show what every key of a run resolves to, and why"

EXAMPLES = """\
examples:
  equipoise config                             the defaults
  equipoise config run.toml                    each value with the line it comes from
  equipoise config run.toml --train.steps 500 --model.preset 30m
  equipoise config run.toml --quiet            print nothing unless something is wrong
  equipoise config --schema > run.schema.json  for the editor

What it prints is a run.toml itself. --json prints {"run", "model", "origins", "base", "digest"}.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    add_run_arguments(parser)
    parser.add_argument(
        "--schema", action="store_true", help="print the JSON Schema of run.toml instead"
    )


def run(args: argparse.Namespace) -> int:
    """Print the resolved run, or the schema."""
    from equipoise.spec.run.load import render, schema, to_dict

    if args.schema:
        _print_json(schema())
        return 0
    resolved = run_from(args)
    if args.json:
        _print_json(
            {
                "run": to_dict(resolved.spec),
                "model": dataclasses.asdict(resolved.model),
                "origins": resolved.origins,
                "base": str(resolved.base),
                "digest": resolved.digest,
            }
        )
    elif not args.quiet:
        step = _describe_step(resolved.spec)
        sys.stdout.write(f"# {step}\n{render(resolved)}" if step else render(resolved))
    return 0


def _describe_step(spec: "RunSpec") -> str:
    """How a step becomes micro-batches on this machine; empty of a layout that it cannot have."""
    from equipoise.observe.machine import own_ranks
    from equipoise.spec.run.step import describe_step

    try:
        return describe_step(spec, spec.layout.count_ranks(own_ranks()))
    except LayoutError:
        return ""


def _print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
