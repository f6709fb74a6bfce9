"""``equipoise VERB``: find the verb, parse its arguments, run it, turn errors into exit codes.

Why
    ``equipoise --help`` must feel like ``ls``. So the lines of the overview stand here, and a
    verb's module is imported only when that verb is asked for.

Kept true (tests/unit/cli/test_main.py)
    Importing this module, and asking for help, loads no torch, pydantic, numpy or rich; each
    verb's line here is its module's ``HELP``.
"""

import argparse
import errno
import importlib
import os
import re
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from equipoise import __version__
from equipoise.base.errors import EquipoiseError, SpecError
from equipoise.base.nearest import nearest
from equipoise.base.shown import shorten, shown
from equipoise.base.whole import whole_number
from equipoise.cli.console import OutputError, guard_stdout
from equipoise.cli.run_arguments import nearest_run_flag, split_overrides

VERBS = {
    "init": "write a commented run.toml to start from",
    "config": "show what every key of a run resolves to, and why",
    "pack": "show how evenly each policy would pack a corpus; needs no torch",
    "explain": "show who computes or sends what: attention, experts, pipelines; needs no torch",
    "simulate": "say how long a step, or a trace's requests, take on a cluster; needs no torch",
    "plan": "search the layout that trains a model, or serves a trace, best; needs no torch",
    "train": "train a model; the same command again resumes",
    "report": "write runs as one HTML page: predicted beside measured, and each rank's timeline",
    "dash": "show runs and a server live in a browser, predicted beside measured",
    "trace": "write steps of a run as a trace for Perfetto, predicted beneath measured",
    "check": "prove that every layout and packing gives one rank's loss and gradients",
    "calibrate": "measure this machine, so that this-cpu or this-cuda is priced by what it does",
    "convert": "turn a checkpoint into a Hugging Face folder, or rewrite it for another layout",
    "completion": "print a script with which bash, zsh or fish completes verbs, flags and keys",
    "generate": "continue a text, or chat, with a run, a checkpoint or a Hugging Face folder",
    "serve": "serve a model over HTTP with OpenAI's API, to one user or to many tenants",
    "inspect": "say what a file or a folder of a run holds",
    "launch": "print a run as torchrun, Slurm or Kubernetes starts it; --submit hands it over",
    "doctor": "say what of this machine would break a run, and what to do about it",
    "drill": "rehearse faults on a run: what notices them, how it goes on, and what is lost",
    "systems": "list the published systems that equipoise unites, and which of them work",
}

_EXTRAS = {
    "torch": "train",
    "tokenizers": "train",
    "safetensors": "train",
    "pyarrow": "parquet",
    "PIL": "images",
    "ortools": "exact",
    "scipy": "exact",
    "matplotlib": "plot",
    "starlette": "serve",
    "uvicorn": "serve",
    "prometheus_client": "serve",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; the exit code.

    0 done, 1 a fault of the installation or the machine, 2 usage or run.toml, 3 does not fit, 4 a
    checkpoint or a plan that cannot be used, 5 check failed, 6 fault not recovered, 130
    interrupted, 141 nobody reads the output any more. Under --json an error is
    ``{"error", "exit_code"}`` on stdout, beside the sentence on stderr.
    """
    if sys.stderr is None:  # closed: whoever did so wants no word
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    if whole_number(os.environ.get("COLUMNS", "")) is None:
        os.environ.pop("COLUMNS", None)  # rich reads it as a number, however many digits it has
    try:
        with guard_stdout():
            return _answer(sys.argv[1:] if argv is None else list(argv))
    except OutputError as error:
        _say(f"{error}\n" if str(error) else "")
        return error.exit_code


def _say(message: str) -> None:
    """Write to stderr; where that is full, the exit code says it."""
    try:
        sys.stderr.write(message)
        sys.stderr.flush()
    except OSError:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115


def _answer(words: Sequence[str]) -> int:
    """Run one verb and turn its errors into sentences; the exit code."""
    try:
        code = _run(list(words))
    except EquipoiseError as error:
        return _fail(_brief(str(error)), error.exit_code, words)
    except RecursionError:
        return _fail("A file is nested deeper than can be read. Flatten it.", 2, words)
    except MemoryError as error:
        return _fail(_no_memory(str(error)), 1, words)
    except KeyboardInterrupt:
        return _fail("Interrupted.", 130, words)
    except BrokenPipeError:  # of a rank
        raise
    except OSError as error:
        return _fail(_refusal(error), 1, words)
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        return _fail(
            f"This needs {error.name}, which is not installed. "
            f'Install it: pip install "equipoise[{_EXTRAS[error.name]}]"',
            1,
            words,
        )
    except (ImportError, RuntimeError) as error:  # of a loader, of a thread, of torch's allocator
        if not any(each in str(error) for each in _NO_ROOM):
            raise
        return _fail(_no_memory(str(error)), 1, words)
    return code


def _fail(message: str, code: int, words: Sequence[str]) -> int:
    """Say what is wrong on stderr, and under --json also as the one document on stdout."""
    _say(f"{message}\n")
    if "--json" in words:
        import json

        with suppress(OSError, OutputError):  # stdout may be what is wrong
            sys.stdout.write(json.dumps({"error": message, "exit_code": code}) + "\n")
            sys.stdout.flush()
    return code


_LONG = re.compile(r'\S{501,}|"[^"\n]{1001,}"')
"""A word longer than any path, or a quotation longer than any command, that somebody means."""


def _brief(message: str) -> str:
    return _LONG.sub(lambda long: shorten(long[0]), message)


def _require_names(argv: Sequence[str]) -> None:
    """Refuse words that cannot name a file or be passed to a program."""
    for word in argv:
        try:
            is_name = b"\0" not in os.fsencode(word)
        except UnicodeEncodeError:
            is_name = False
        if not is_name:
            raise SpecError(
                f"equipoise: the argument {shown(word)} has a character that no file name can "
                f"have. Type it again."
            )


_NO_ROOM = (
    "failed to map segment",
    "cannot allocate memory",
    "Cannot allocate memory",
    "can't allocate memory",
    "can't start new thread",
)


def _no_memory(said: str) -> str:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    least = "The machine has too little memory left"
    if limit != resource.RLIM_INFINITY:
        least = f'"ulimit -v" leaves {limit / 2**30:.1f} GiB of address space, which is too little'
    reason = f" ({shorten(said)})" if said else ""
    return f'{least}{reason}. Free some, choose a smaller size, or raise "ulimit -v".'


def _refusal(error: OSError) -> str:
    """What the operating system refused, and what to do about it."""
    words = error.strerror or str(error)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f'{words}: this process may hold {limit:,}. Raise the limit: "ulimit -n 65536".'
    if error.errno == errno.ENOMEM or any(each in words for each in _NO_ROOM):
        return _no_memory(words)
    if error.errno == errno.ENAMETOOLONG and error.filename is not None:
        return f"{shorten(str(error.filename), 200)}: {words}. Give a shorter one."
    if error.errno == errno.ENOENT and not _has_folder():
        return "The folder in which this runs has been deleted. Change to one that exists."
    where = "" if error.filename is None else f"{shorten(str(error.filename), 200)}: "
    return f"{where}{words}. Check the file, its folder and who may read and write them."


def _has_folder() -> bool:
    try:
        Path.cwd()
    except OSError:
        return False
    return True


def load(verb: str) -> ModuleType:
    """The module of one verb: a file of this room, or ``verb.py`` of the room of its name.

    A module with ``VERBS`` of its own has verbs below it, as in ``load("explain boxing")``.
    """
    name = f"equipoise.cli.{verb.replace(' ', '.')}"
    module = importlib.import_module(name)
    return importlib.import_module(f"{name}.verb") if hasattr(module, "__path__") else module


_WORDS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"^argument (.*?): ", r"\1: "),
    (r"ignored explicit argument '(.*)'", r'takes no value, but got "\1"'),
    (r"invalid int value: '(.*)'", r'needs a whole number, got "\1"'),
    (r"invalid float value: '(.*)'", r'needs a number, got "\1"'),
    (r"expected (one|at least one) argument", "needs a value"),
    (r"the following arguments are required: ", "needs "),
    (
        r"invalid choice: '(.*)' \(choose from (.*)\)",
        lambda match: f'"{match[1]}" is not one of ' + match[2].replace("'", ""),
    ),
)
"""What argparse says, and what we say."""


class Parser(argparse.ArgumentParser):
    """argparse, with our errors and without guessed abbreviations."""

    def __init__(self, prog: str, description: str, epilog: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Raise a SpecError where argparse would print its usage and leave."""
        message = re.sub(r"\S{61,}", lambda word: shorten(word[0]), message)
        for theirs, ours in _WORDS:
            message = re.sub(theirs, ours, message)
        raise SpecError(f'{self.prog}: {message}. See "{self.prog} --help".')


def _run(argv: list[str]) -> int:
    _require_names(argv)
    about = "Train large models so that every device finishes at the same time."
    return _run_one_of("", VERBS, about, argv)


def _run_one_of(above: str, verbs: Mapping[str, str], about: str, argv: list[str]) -> int:
    """Run the verb that the first word names; ``above`` is the verb that these belong to."""
    word = argv[0] if argv else ""
    if word in verbs:
        verb = f"{above} {word}".lstrip()
        module = load(verb)
        if hasattr(module, "VERBS"):
            return _run_one_of(verb, module.VERBS, _sentence(module), module.modernize(argv[1:]))
        code: int = module.run(parse(verb, module, argv[1:]))
        return code
    program = f"equipoise {above}".rstrip()
    if not word.startswith("-") and word:
        raise SpecError(
            f'{program}: there is no verb "{word}". Nearest: {nearest(word, verbs)}. '
            f"All: {', '.join(verbs)}."
        )
    overview = _overview(program, verbs, about)
    if not word:
        overview.print_help(sys.stderr)
        return 2
    _, [*extras] = overview.parse_known_args(argv)
    raise SpecError(_unknown(overview, extras, argv))


def _sentence(module: ModuleType) -> str:
    return f"{module.HELP[0].upper()}{module.HELP[1:]}."


def _overview(program: str, verbs: Mapping[str, str], about: str) -> Parser:
    width = max(map(len, verbs))
    lines = "\n".join(f"  {verb:<{width}}  {line}" for verb, line in verbs.items())
    fix = f'"{program} VERB --help" shows the arguments of a verb, and examples.'
    parser = Parser(program, about, f"verbs:\n{lines}\n\n{fix}")
    parser.usage = f"{program} VERB [ARGUMENTS]"
    parser.add_argument("--version", action="version", version=f"equipoise {__version__}")
    return parser


def make_parser(verb: str, module: ModuleType) -> Parser:
    """The parser of one verb, with the flags that all verbs have."""
    parser = Parser(f"equipoise {verb}", _sentence(module), module.EXAMPLES)
    module.add_arguments(parser)
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON document; of an error, {error, exit_code}",
    )
    parser.add_argument("--quiet", action="store_true", help="print no more than the result")
    return parser


def parse(verb: str, module: ModuleType, argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of one verb.

    Raises:
        SpecError: wrong usage; names the nearest flag.
    """
    parser = make_parser(verb, module)
    _refuse_dashes(parser, argv)
    rest, overrides = list(argv), None
    if parser.get_default("overrides") is not None:
        rest, overrides = split_overrides(argv, parser.error)
    # "Intermixed", because before Python 3.12 an optional positional after a flag is lost.
    args, extras = parser.parse_known_intermixed_args(rest)
    if extras:
        raise SpecError(_unknown(parser, extras, argv))
    if overrides is not None:
        args.overrides = overrides
    return args


def _refuse_dashes(parser: Parser, argv: Sequence[str]) -> None:
    """Refuse ``--flag=--``, whose value argparse loses before Python 3.13."""
    for word in argv:
        flag, _, value = word.partition("=")
        if word == "--":
            return
        if flag.startswith("--") and value == "--":
            parser.error(f'argument {flag}: "--" is not a value')


def _unknown(parser: Parser, extras: Sequence[str], argv: Sequence[str]) -> str:
    before = argv[: argv.index("--")] if "--" in argv else argv
    flags_in = [extra for extra in extras if extra.startswith("-") and extra in before]
    flag = flags_in[0].partition("=")[0] if flags_in else None
    if flag is None:
        more = [extra for extra in extras if extra != "--"] or ["--"]
        return f'{parser.prog}: "{more[0]}" is one argument too many. See "{parser.prog} --help".'
    flags = re.findall(r"--[a-z][\w-]*", parser.format_usage()) or ["--help", "--version"]
    is_run = parser.get_default("overrides") is not None
    meant = nearest_run_flag(flag, flags) if is_run else nearest(flag, flags)
    return f"{parser.prog}: {flag}: no such flag. Nearest: {meant}"


if __name__ == "__main__":
    sys.exit(main())
