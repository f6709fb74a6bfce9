"""Will this run work on this machine? Checks, each with why it matters and what to do.

Why
    Most runs that fail in their first minute fail for a reason that could have been checked before:
    a port, a limit, a name that resolves to loopback. The framework's own errors come late, from
    many ranks, and do not name the cause.

What it decides
    ``breaks``: the run would end, or never begin. ``warn``: it would be slow, or other programs
    would distort its measurements. Verdicts follow from facts (``doctor.facts``) alone; nothing is
    changed.

Kept true (tests/unit/launch/doctor/test_checks.py)
    Every verdict of every check, and the whole text of each message.
"""

from collections.abc import Iterable

from equipoise.launch.doctor.facts import Facts, Needs, Row
from equipoise.launch.doctor.folder import folder_rows
from equipoise.launch.doctor.links import link_rows
from equipoise.launch.doctor.machine import machine_rows
from equipoise.launch.doctor.network import network_rows
from equipoise.spec.layout import Layout


def examine(facts: Facts, needs: Needs) -> list[Row]:
    """One row per check, in the order in which a starting run would meet them."""
    rows = [
        *machine_rows(facts.machine, needs),
        *network_rows(facts.network, needs),
        *folder_rows(facts.folder, needs),
    ]
    return rows if facts.links is None else [*rows, *link_rows(facts.links)]


def would_break(rows: Iterable[Row]) -> bool:
    """Whether the run would not work."""
    return any(row.verdict == "breaks" for row in rows)


def conclusion(rows: list[Row], needs: Needs) -> str:
    """A one-sentence summary of all rows."""
    broken = sum(row.verdict == "breaks" for row in rows)
    warned = sum(row.verdict == "warn" for row in rows)
    ranks = f"{needs.ranks} rank{'s' if needs.ranks > 1 else ''}"
    if broken:
        rest = f"; {warned} {'warns' if warned == 1 else 'warn'}" if warned else ""
        return f"{broken} of {len(rows)} checks found what would break a run of {ranks} here{rest}."
    if warned:
        verb = "warns" if warned == 1 else "warn"
        return f"A run of {ranks} would work here; {warned} of {len(rows)} checks {verb}."
    return f"A run of {ranks} would work here: all {len(rows)} checks are well."


def count_group_files(layout: Layout) -> int:
    """Files that the process groups of one rank hold open.

    A gloo group of n ranks holds n + 3 files, n - 1 of them connections (counted in /proc with
    torch 2.13 and groups of 2, 4 and 6).

    >>> count_group_files(Layout(dp=4, tp=2))
    23
    """
    groups = (layout.world, layout.dp * layout.cp, layout.tp, layout.cp, layout.pp)
    experts = (layout.ep, layout.etp, layout.edp) if layout.ep * layout.etp > 1 else ()
    return sum(size + 3 for size in (*groups, *experts) if size > 1)
