"""The arguments that every verb over a run shares: a run.toml, and a flag for each of its keys.

Why
    Any key can be given as ``--section.key VALUE``, without a list of flags: the keys are known to
    ``spec.run.load`` alone, which takes 0.1 s to import. So flags with a dot are set aside before
    argparse sees the line, and judged together with the file, faults and all.
"""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from equipoise.spec.run.resolve import ResolvedRun

_OVERRIDE = re.compile(r"--(\w[\w-]*(?:\.[\w-]+)+)(?:=(.*))?", re.DOTALL)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare ``[run.toml] [--name NAME] [--SECTION.KEY VALUE ...]``."""
    parser.add_argument(
        "run_toml",
        nargs="?",
        type=Path,
        metavar="run.toml",
        help="the run (default: every key's default); "
        "--SECTION.KEY VALUE replaces any key of it, as in --train.steps 500",
    )
    parser.add_argument("--name", metavar="NAME", help="the run's name")
    parser.set_defaults(overrides=[])


def run_from(args: argparse.Namespace) -> "ResolvedRun":
    """The run that the parsed arguments describe.

    Raises:
        SpecError: every fault of the file and of the flags.
    """
    from equipoise.spec.run.load import read_run

    named = [] if args.name is None else [("name", args.name)]
    run = read_run(args.run_toml, [*args.overrides, *named])
    for note in run.notes:
        sys.stderr.write(f"{note}\n")
    return run


def asks_recommender(args: argparse.Namespace) -> bool:
    """Whether a verb's run.toml, or a flag, asks for a recommender."""
    from equipoise.spec.recommend import is_recommend

    return is_recommend(args.run_toml, args.overrides)


def split_overrides(
    argv: Sequence[str], error: Callable[[str], NoReturn]
) -> tuple[list[str], list[tuple[str, str]]]:
    """Take the flags with a dot out of a command line.

    Args:
        argv: The arguments after the verb.
        error: Called with a message if a flag has no value.

    Returns:
        The other arguments, and pairs of a dotted key and its text.

    >>> split_overrides(["run.toml", "--train.steps", "5", "--json", "--train.lr=-1"], exit)
    (['run.toml', '--json'], [('train.steps', '5'), ('train.lr', '-1')])
    """
    rest: list[str] = []
    overrides: list[tuple[str, str]] = []
    left = iter(argv)
    for word in left:
        if word == "--":
            rest += [word, *left]
        elif flag := _OVERRIDE.fullmatch(word):
            value = flag[2] if flag[2] is not None else next(left, "--")
            if value.startswith("--") and flag[2] is None:
                error(f"{word} needs a value")
            overrides.append((flag[1], value))
        else:
            rest.append(word)
    return rest, overrides


def nearest_run_flag(flag: str, flags: Sequence[str]) -> str:
    """The flag that a wrong one most likely meant: ``--steps`` means ``--train.steps``."""
    from equipoise.base.nearest import nearest
    from equipoise.spec.run.keys import keys
    from equipoise.spec.run.other_words import key_meant

    if (meant := key_meant(flag.lstrip("-"))) is not None:
        return f"--{meant}"
    dotted = [f"--{name}" for name in keys()]
    alike = [name for name in dotted if name.rpartition(".")[2] == flag.lstrip("-")]
    return nearest(flag, alike or [*flags, *dotted])
