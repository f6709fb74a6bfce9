"""Groups of columns of which a batch keeps each distinct row once.

Kept true (tests/multi/recsys/test_sessions.py)
    What cannot be a group is refused in one sentence.
"""

from collections.abc import Sequence

from equipoise.base.errors import SpecError
from equipoise.base.nearest import nearest


def require_groups(
    groups: Sequence[Sequence[str]], tables: Sequence[str], numbers: Sequence[str]
) -> None:
    """Refuse groups of columns that are not read, or twice; numbers have one MLP, so one group.

    Args:
        groups: ``tables.deduplicate``.
        tables: Columns that have a table.
        numbers: Columns of numbers.

    Raises:
        SpecError: says what, and what to do.
    """
    known = (*tables, *numbers)
    named: list[str] = []
    for group in groups:
        for name in group:
            if name not in known:
                raise SpecError(
                    f'tables.deduplicate: "{name}" is not among data.ids, data.bags and '
                    f'data.numbers. Nearest: "{nearest(name, list(known))}".'
                )
            if name in named:
                raise SpecError(f'tables.deduplicate names "{name}" twice. Name it once.')
            named.append(name)
        given = [name for name in group if name in numbers]
        if not group or (given and len(given) < len(numbers)):
            lacks = [name for name in numbers if name not in group]
            raise SpecError(
                "tables.deduplicate has an empty group. Leave it out."
                if not group
                else f"tables.deduplicate: all numbers go through one MLP, so a group has all of "
                f"them or none. Add {', '.join(lacks)} to that of {', '.join(given)}."
            )
