"""The registry of systems: what each published system does, and how far it works here.

Why
    A list of 72 names promises much. Each row here says which command shows the system, which
    test covers it, and what is missing; a row without a command does not work yet.

Kept true (tests/unit/base/test_registry.py)
    Numbers are 1 to 72 without a gap; a row with a test or a result has a command; every
    command is a verb that exists, and every test a file that exists.
"""

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from equipoise.base.errors import SpecError
from equipoise.base.nearest import nearest

Tier = Literal["core", "family", "recipe", "adjacent"]
State = Literal["works", "part", "not yet"]

_FILE = Path(__file__).with_name("systems.toml")


@dataclass(frozen=True, slots=True)
class System:
    """One published system."""

    number: int
    name: str
    mechanism: str
    """What it does, in one line."""
    home: str
    """The rooms of the source where it is, or will be."""
    tier: Tier
    """core: on the path of every run. family: a variant that config or planner chooses.
    recipe: a runnable story. adjacent: beside the path."""
    command: str | None = None
    """The command that shows it; None if it does not work yet."""
    test: str | None = None
    result: str | None = None
    """The last measured result."""
    missing: str | None = None
    """The part that does not work yet."""

    @property
    def state(self) -> State:
        """Whether it works, in part, or not yet."""
        if self.command is None:
            return "not yet"
        return "works" if self.missing is None else "part"


@functools.cache
def systems() -> tuple[System, ...]:
    """Every system, by number.

    >>> systems()[33].name
    'ZeRO'
    """
    with _FILE.open("rb") as file:
        rows = tomllib.load(file)["system"]
    return tuple(System(**row) for row in rows)


def find(name: str) -> System:
    """The system with this name or number, ignoring case; a unique part of a name is enough.

    Raises:
        SpecError: there is none, or there are several.

    >>> find("wlb").number, find("34").name
    (1, 'ZeRO')
    """
    word = name.casefold()
    exact = [each for each in systems() if word in (each.name.casefold(), str(each.number))]
    matches = exact or [each for each in systems() if word and word in each.name.casefold()]
    if len(matches) == 1:
        return matches[0]
    if matches:
        several = ", ".join(each.name for each in matches)
        raise SpecError(f'"{name}" is a part of several systems: {several}. Give more of the name.')
    names = {each.name.casefold(): each.name for each in systems()}
    raise SpecError(
        f'No system is called "{name}". Nearest: {names[nearest(word, names)]}. '
        '"equipoise systems" lists all.'
    )
