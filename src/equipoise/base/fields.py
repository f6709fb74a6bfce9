"""Numbers in the fields of a request, whatever a notebook put there.

Why
    No annotation keeps a caller from giving NumPy's numbers, a flag or a text. A flag counts as 1,
    NumPy's numbers do not go into JSON, and a text fails deep inside a formula.

Kept true (tests/unit/base/test_fields.py)
    What comes back has Python's own numbers; anything else is refused by the field's name.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np

from equipoise.base.errors import SpecError
from equipoise.base.shown import shown

Request = TypeVar("Request")


def with_plain_numbers(
    request: Request, *, whole: Iterable[str] = (), real: Iterable[str] = ()
) -> Request:
    """A request whose numbers are Python's own.

    Args:
        request: A dataclass.
        whole: Fields that hold a whole number, or None.
        real: Fields that hold a number, or None.

    Raises:
        SpecError: a field holds something else; names it.
    """
    changed: dict[str, Any] = {}
    for names, kinds, wanted in ((whole, (int,), "whole number"), (real, (int, float), "number")):
        for name in names:
            value = getattr(request, name)
            plain = value.item() if isinstance(value, np.generic) else value
            if plain is None:
                continue
            if isinstance(plain, bool) or not isinstance(plain, kinds):
                raise SpecError(f"{name} is {shown(plain)}. Give a {wanted}.")
            if plain is not value:
                changed[name] = plain
    return dataclasses.replace(request, **changed) if changed else request  # type: ignore[type-var]
