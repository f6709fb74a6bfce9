"""A guide without a flaw, and what the linter says of one."""

from equipoise.base.errors import SpecError
from equipoise.cli.drill.commands import judge_command
from equipoise.fault.runbook.lint import check_guide

GOOD = """\
# Something is late

A short guide.

when: instant late

## First

```query
late = count of instant late
```

- if `late > 0`: **late**
- else: **none**; stop: nothing was late ({late} times).

## Second

after: First = late

> {late} ranks were late.

```action
equipoise report RUN
```
"""


def flaws(text: str) -> list[str]:
    """Every flaw of a guide, as ``mine.md:LINE: SENTENCE``."""
    try:
        check_guide(text, "mine", judge_command, file="mine.md")
    except SpecError as error:
        return str(error).split("\n")
    return []
