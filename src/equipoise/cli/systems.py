"""``equipoise systems``: which of the published systems work here, and which do not yet."""

import argparse
import dataclasses
import json
import sys

from equipoise.base.registry import System, find, systems

HELP = "list the published systems that equipoise unites, and which of them work"

EXAMPLES = """\
examples:
  equipoise systems                all of them, a line each
  equipoise systems WLB-LLM        one of them: what it does, what works, what is missing
  equipoise systems 34
  equipoise systems --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="name or number of one system")


def run(args: argparse.Namespace) -> int:
    """Print the table, or one system."""
    shown = systems() if args.name is None else (find(args.name),)
    if args.json:
        rows = [{**dataclasses.asdict(each), "state": each.state} for each in shown]
        answer = rows if args.name is None else rows[0]
        sys.stdout.write(json.dumps(answer, indent=2) + "\n")
    elif args.name is None:
        sys.stdout.write(_table(shown, summary_only=args.quiet))
    else:
        sys.stdout.write(_one(shown[0]))
    return 0


def _table(shown: tuple[System, ...], *, summary_only: bool) -> str:
    states = [each.state for each in shown]
    summary = (
        f"{len(shown)} systems: {states.count('works')} work, {states.count('part')} work in "
        f"part, {states.count('not yet')} do not yet.\n"
    )
    if summary_only:
        return summary
    width = max(len(each.name) for each in shown)
    home = max(len(each.home) for each in shown)
    head = f" #  state    {'system':<{width}}  tier      {'home':<{home}}  command"
    rows = (
        f"{each.number:>2}  {each.state:<7}  {each.name:<{width}}  {each.tier:<8}  "
        f"{each.home:<{home}}  {each.command or ''}".rstrip()
        for each in shown
    )
    return "\n".join([head, *rows, "", summary])


def _one(system: System) -> str:
    rows = {
        "state": system.state,
        "what it does": system.mechanism,
        "home": system.home,
        "tier": system.tier,
        "command": system.command,
        "test": system.test,
        "last result": system.result,
        "missing": system.missing,
    }
    lines = (f"  {name:<12}  {text}" for name, text in rows.items() if text is not None)
    return "\n".join([f"{system.number}. {system.name}", *lines]) + "\n"
