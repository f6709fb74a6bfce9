"""Commands inside guides: judged by the verbs' own parsers, and run as a user would run them.

Kept true (tests/unit/cli/drill/test_commands.py)
    An unknown verb, flag or key is named with the nearest one; judging imports no torch.
"""

import re
import subprocess
import sys
from collections.abc import Sequence

from equipoise.base.errors import EquipoiseError, FaultError, SpecError
from equipoise.fault.runbook.run import CommandEnd

_SLOT = re.compile(r"\{[a-z]\w*\}")
_LONGEST_S = 600.0
_SHOWN_LINES = 12


def judge_command(words: Sequence[str]) -> str:
    """What is wrong with the words after ``equipoise``; empty if nothing is.

    A value that stands for another, as in ``{rank}``, is right where any value is.

    >>> judge_command(["report", "RUN"]), judge_command(["repot", "RUN"])[:28]
    ('', 'There is no verb "repot". Ne')
    """
    from equipoise.base.nearest import nearest
    from equipoise.cli.main import VERBS, load, parse

    verb, rest = words[0], [*words[1:]]
    if verb not in VERBS:
        return f'There is no verb "{verb}". Nearest: {nearest(verb, VERBS)}.'
    module = load(verb)
    if hasattr(module, "VERBS"):
        below = rest[0] if rest else ""
        if below not in module.VERBS:
            return f'{verb} has no verb "{below}". Nearest: {nearest(below, module.VERBS)}.'
        verb, rest = f"{verb} {below}", rest[1:]
        module = load(verb)
    try:
        args = parse(verb, module, [_SLOT.sub("1", word) for word in rest])
        for key, value in getattr(args, "overrides", []):
            _judge_key(key, value, is_open=any(_SLOT.search(word) for word in _of(key, rest)))
    except EquipoiseError as error:
        return str(error)
    return ""


def _of(key: str, words: Sequence[str]) -> list[str]:
    """The words that give a key its value."""
    flag = f"--{key}"
    after = [words[at + 1] for at, word in enumerate(words[:-1]) if word == flag]
    return after + [word for word in words if word.startswith(f"{flag}=")]


def _judge_key(key: str, value: str, *, is_open: bool) -> None:
    """Refuse a key of run.toml that is not there, or a value that it cannot have.

    Raises:
        SpecError: it names the nearest key, or what the key takes.
    """
    from equipoise.cli.run_arguments import nearest_run_flag
    from equipoise.spec.run.keys import keys
    from equipoise.spec.run.load import read_run

    if key not in keys():
        raise SpecError(f"--{key}: no such key. Nearest: {nearest_run_flag(f'--{key}', [])}")
    if not is_open:
        read_run(None, [(key, value)])


def run_command(words: Sequence[str]) -> CommandEnd:
    """Run the words after ``equipoise`` in a process of their own; what they print is kept short.

    Raises:
        FaultError: it took longer than ten minutes.
    """
    command = [sys.executable, "-m", "equipoise.cli.main", *words]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_LONGEST_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise FaultError(
            f"equipoise {' '.join(words)} did not end within {_LONGEST_S:.0f} s. Run it by itself."
        ) from error
    lines = done.stdout.decode(errors="replace").rstrip().splitlines()
    return CommandEnd(done.returncode, "\n".join(lines[-_SHOWN_LINES:]))
