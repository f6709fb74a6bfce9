"""What ``equipoise drill`` prints: a row for each fault, and what was said where one won."""

from collections.abc import Iterable

from equipoise.base.units import format_seconds
from equipoise.cli.console import make_console
from equipoise.cli.table import Column, print_columns
from equipoise.fault.drill.outcome import Drill, DrillRow, Rehearsal

_COLUMNS = (
    Column("fault", is_left=True),
    Column("id", is_left=True, goes=1),
    Column("injected", is_left=True, wraps=20),
    Column("survived", goes=3),
    Column("detected by", is_left=True),
    Column("named", is_left=True),
    Column("after"),
    Column("resumed"),
    Column("goes on", is_left=True, goes=2),
    Column("tokens lost"),
    Column("state equal", is_left=True),
)


def print_drill(done: Drill, *, is_quiet: bool) -> None:
    """The table, and unless quiet what was scaled and what was said."""
    console = make_console()
    rehearsed = [row for row in done.rows if not row.left_out]
    print_columns(console, _COLUMNS, [_cells(row) for row in rehearsed], pad_edge=False)
    for row in done.rows:
        if row.left_out:
            console.print(f"{row.name} was left out: it {row.left_out}.", soft_wrap=True)
    for row in rehearsed:
        for each in row.outcomes:
            if not each.is_survived:
                console.print(_complaint(row, each), soft_wrap=True)
            if each.note:
                console.print(f"{row.name}: {each.note}", soft_wrap=True)
    if is_quiet:
        return
    if done.scaled:
        console.print(f"Made smaller: {', '.join(done.scaled)}.", soft_wrap=True)
    total = sum(len(row.outcomes) for row in rehearsed)
    survived = sum(row.survived for row in rehearsed)
    console.print(
        f"{survived} of {total} faults on {done.ranks} ranks were named and survived with the "
        f"state of an undisturbed run, in {format_seconds(done.took_s)}.",
        soft_wrap=True,
    )


def _cells(row: DrillRow) -> tuple[str, ...]:
    outcomes, count = row.outcomes, len(row.outcomes)

    def share(number: int) -> str:
        return _yes(number == count) if count == 1 else f"{number}/{count}"

    equal = [each.is_equal for each in outcomes]
    return (
        row.name,
        row.number,
        outcomes[0].injected if count == 1 else f"{count} times",
        f"{row.survived}/{count}",
        _joined(each.detected_by or "missed" for each in outcomes),
        share(sum(each.is_named for each in outcomes)),
        _times(row, "detected_s"),
        _times(row, "resumed_s"),
        _joined(each.goes_on or "not at all" for each in outcomes),
        f"{round(sum(each.lost_tokens for each in outcomes) / count):,}",
        share(sum(each is True for each in equal)),
    )


def _times(row: DrillRow, field: str) -> str:
    """The median, and of several rehearsals also the longest."""
    median, most = row.median(field), row.most(field)
    if median is None or most is None:
        return ""
    if len(row.outcomes) == 1:
        return format_seconds(median)
    return f"{format_seconds(median)} (most {format_seconds(most)})"


def _joined(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "NO"


def _complaint(row: DrillRow, each: Rehearsal) -> str:
    """A sentence on a fault that was not survived."""
    if not each.injected:
        return f"{row.name}: the fault did not fire. {each.said}".rstrip()
    if not each.detected_by:
        why = "nothing noticed it"
    elif not each.is_named:
        why = "it was not named rightly"
    elif not each.goes_on:
        why = "the run did not go on"
    else:
        why = "the run ended with another state"
    said = f" The run said: {each.said}" if each.said else ""
    return f"{row.name} ({each.injected}): {why}.{said}"
