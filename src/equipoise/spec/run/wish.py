"""The values of all keys while they are checked against each other.

Kept true (tests/unit/spec/run/test_load.py)
    A rule that reads a faulty key is silent: one mistake, one message.
"""

from dataclasses import dataclass
from typing import Any

from equipoise.spec.run.keys import DEFAULT, Fault, Given, toml


@dataclass(frozen=True, slots=True)
class Wish:
    """The value of every key, and the faults between keys so far."""

    given: dict[str, Given]
    faulty: frozenset[str]
    faults: list[Fault]

    def __getitem__(self, name: str) -> Any:
        return self.given[name].value

    def is_given(self, name: str) -> bool:
        """Whether a value was given, rather than taken from the default."""
        return self.given[name].origin is not DEFAULT

    def is_sound(self, *names: str) -> bool:
        """Whether none of these keys is faulty by itself."""
        return self.faulty.isdisjoint(names)

    def tell(self, name: str, message: str) -> None:
        """Note a fault at a key."""
        self.faults.append(Fault(self.given[name].origin, name, message))

    def cite(self, name: str) -> str:
        """A key with its value and the value's origin."""
        each = self.given[name]
        return f"{name} = {toml(each.value)} ({each.origin.label})"


def nearest_multiples(value: int, step: int) -> str:
    """The multiples of ``step`` on both sides of ``value``, in words.

    >>> nearest_multiples(7, 4), nearest_multiples(3, 4)
    ('4 or 8', '4')
    """
    below = value // step * step
    return f"{below} or {below + step}" if below else f"{below + step}"
