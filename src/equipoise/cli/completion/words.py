"""The words that a command line may hold, read from the verbs' own parsers.

Kept true (tests/unit/cli/completion/test_verb.py)
    Every verb, every flag of its parser, and every key of run.toml is there once.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Annotated, Literal, get_args, get_origin

from equipoise.cli import main as frame


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag, what it is for, and the values that it may have."""

    name: str
    about: str
    takes_value: bool
    values: tuple[str, ...] = ()
    """Empty where any value is taken, such as a number or a file."""


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb, as ``pack`` or ``explain attention``, and its flags."""

    name: str
    about: str
    flags: tuple[Flag, ...]
    takes_keys: bool
    """Whether it takes keys of run.toml as flags."""
    values: tuple[str, ...] = ()
    """The words that may follow it, where they are few."""


@dataclass(frozen=True, slots=True)
class Words:
    """All verbs, those with verbs below them, and the keys of run.toml."""

    verbs: tuple[Verb, ...]
    groups: Mapping[str, Mapping[str, str]]
    """Verbs below a verb, by its name: their last word and what each does."""
    top: Mapping[str, str]
    keys: tuple[Flag, ...]


def read_words() -> Words:
    """The words of this installation."""
    verbs, groups = [], {}
    for name in frame.VERBS:
        module = frame.load(name)
        if hasattr(module, "VERBS"):
            groups[name] = dict(module.VERBS)
            below = (f"{name} {last}" for last in module.VERBS)
            verbs += [_verb(each, frame.load(each)) for each in below]
        else:
            verbs.append(_verb(name, module))
    return Words(tuple(verbs), groups, dict(frame.VERBS), _keys())


def _verb(name: str, module: ModuleType) -> Verb:
    parser = frame.make_parser(name, module)
    flags: list[Flag] = []
    words: list[str] = []
    for action in parser._actions:  # argparse has no public list of its arguments
        values = tuple(map(str, action.choices or ()))
        if not action.option_strings:
            words += values
        elif action.help != argparse.SUPPRESS:
            takes_value = action.nargs != 0
            long = [each for each in action.option_strings if each.startswith("--")]
            flags += [Flag(each, action.help or "", takes_value, values) for each in long]
    takes_keys = parser.get_default("overrides") is not None
    return Verb(name, module.HELP, tuple(flags), takes_keys, tuple(words))


def _keys() -> tuple[Flag, ...]:
    from equipoise.spec.run.keys import keys

    return tuple(
        Flag(f"--{name}", key.description, takes_value=True, values=_values(key.annotation))
        for name, key in keys().items()
    )


def _values(annotation: object) -> tuple[str, ...]:
    """The words that a key's type allows; empty where there are other values, too."""
    if get_origin(annotation) is Annotated:
        return _values(get_args(annotation)[0])
    if annotation is bool:
        return ("true", "false")
    if get_origin(annotation) is Literal:
        return tuple(map(str, get_args(annotation)))
    return ()
