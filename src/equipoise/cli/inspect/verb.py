"""``equipoise inspect``: say what a file or a folder holds, and whether it is whole."""

import argparse
import json
import sys
from pathlib import Path

from equipoise.base.errors import CheckpointError

HELP = "say what a file or a folder of a run holds"

EXAMPLES = """\
examples:
  equipoise inspect runs/run                         a run, and each of its checkpoints
  equipoise inspect runs/run/checkpoint/step-000250  a checkpoint; every byte is verified
  equipoise inspect exported                         a Hugging Face folder
  equipoise inspect small                            a recommender that convert made of fewer bits
  equipoise inspect SmolLM2-135M.Q8_0.gguf --json
  equipoise inspect ~/.cache/equipoise/tokens-*/     a token cache, or a tokenizer.json

Exit code 4 says that a checkpoint is torn, or that one is of a newer format.
--json prints what the table shows: {"kind", "path", ...}; sizes in bytes, "state" is "ok" or
the sentence that says what is wrong.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "path",
        type=Path,
        metavar="PATH",
        help="a run, a checkpoint, a Hugging Face folder, a .gguf, a token cache, a tokenizer.json",
    )


def run(args: argparse.Namespace) -> int:
    """Print the facts; returns 4 if a checkpoint is torn."""
    from equipoise.cli.inspect.facts import is_torn, read_facts

    facts = read_facts(args.path, args.quiet or args.json)
    if args.json:
        sys.stdout.write(json.dumps(facts, indent=1, default=str) + "\n")
    elif args.quiet:
        sys.stdout.write(f"{facts['kind']}\n")
    else:
        from equipoise.cli.inspect.table import print_facts

        print_facts(facts)
    return CheckpointError.exit_code if is_torn(facts) else 0
