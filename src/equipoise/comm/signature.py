"""What each collective of a rank was, and ranks whose collectives do not match.

Why
    The n-th collective of a group is one meeting of all its ranks, whatever each of them calls
    there. gloo pairs them by that number alone: ranks that call different things wait for each
    other for ever, sum what should not be summed, or end in an abort that names neither.

What it decides
    torch's flight recorder has the operation, dtype and sizes of the last collectives by group and
    number, so nothing is noted and nothing more is exchanged by ranks that train. The watchdog
    leaves this rank's trail in the store; each rank compares its own with that of the next member
    of each group. The first call in which two differ is the fault; what the majority called is
    right, and of two either may be wrong.

    Sizes are compared where they must be equal: ranks may send each other unequal parts in an
    all-to-all, and only the root of a scatter has its inputs.

Kept true (tests/unit/comm/test_signature.py, tests/multi/comm/test_mismatch.py)
    Another operation, dtype, size or order is named with both sides; what may differ is not.

Sources
    gloo 2025, ``Context::nextSlot``: messages of a collective are told apart by a counter.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
}
"""torch's names in the recorder; the others are theirs in lower case."""

_EQUAL_SIZES = {
    "all_reduce": "input_sizes",
    "broadcast": "input_sizes",
    "reduce": "input_sizes",
    "all_gather": "input_sizes",
    "gather": "input_sizes",
    "reduce_scatter": "output_sizes",
    "scatter": "output_sizes",
}
"""Operations to which every rank brings as many numbers, and where the recorder has them."""

_KEPT = 1024
"""Calls of a group to remember: more than the other ranks' trails hold."""

CALL_ALIKE = (
    "Make all ranks call the same collectives in one order, then run the same command again to "
    "resume from the last checkpoint."
)

_LEFT = 64
"""Calls of a group to leave to others."""


@dataclass(frozen=True, slots=True)
class Call:
    """One rank's part in a collective."""

    op: str
    dtype: str
    """Empty where the recorder has none, as for a barrier."""
    numbers: int | None
    """What it brings; None where ranks may differ."""
    sizes: str
    """In words: ``[1000] into [2, 1000]``."""
    place: str = ""
    """Innermost line outside of torch while it was under way; empty if it was never seen so."""

    def matches(self, other: "Call") -> bool:
        """Whether both may be parts of one collective."""
        dtypes = {self.dtype, other.dtype} - {""}
        numbers = {self.numbers, other.numbers} - {None}
        return self.op == other.op and len(dtypes) <= 1 and len(numbers) <= 1

    @property
    def words(self) -> str:
        """For a message."""
        what = " ".join(filter(None, (self.dtype, self.sizes)))
        text = f"{self.op} of {what}" if what else self.op
        return f"{text} at {self.place}" if self.place else text


def read_call(entry: Mapping[str, Any]) -> Call:
    """A call from an entry of torch's flight recorder.

    >>> read_call(
    ...     {
    ...         "profiling_name": "gloo:all_gather",
    ...         "input_dtypes": ["Float"],
    ...         "input_sizes": [[3]],
    ...         "output_sizes": [[2, 3]],
    ...     }
    ... ).words
    'all_gather of float32 [3] into [2, 3]'
    """
    name = str(entry["profiling_name"])
    op = name.partition(":")[2] or name
    dtypes = entry.get("input_dtypes") or entry.get("output_dtypes") or []
    inputs, outputs = entry.get("input_sizes", []), entry.get("output_sizes", [])
    counted = entry.get(_EQUAL_SIZES[op], []) if op in _EQUAL_SIZES else None
    numbers = sum(math.prod(each) for each in counted) if counted else None
    sizes = _sizes(inputs) + (f" into {_sizes(outputs)}" if outputs != inputs else "")
    dtype = _DTYPES.get(dtypes[0], dtypes[0].lower()) if dtypes else ""
    return Call(op, dtype, numbers, sizes.strip())


def _sizes(shapes: list[list[int]]) -> str:
    shown = ", ".join(map(str, shapes[:4]))
    return f"{shown} and {len(shapes) - 4} more" if len(shapes) > 4 else shown


@dataclass(slots=True)
class Trail:
    """The last collectives of one rank, by group and number."""

    members: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Ranks of each group of two or more that this rank is in."""
    calls: dict[str, dict[int, Call]] = field(default_factory=lambda: defaultdict(dict))

    def note(self, group: str, members: tuple[int, ...], number: int, call: Call) -> None:
        """Remember a call; the first place that was seen is kept."""
        if len(members) < 2:
            return
        self.members[group] = members
        known = self.calls[group]
        if number not in known or (call.place and not known[number].place):
            known[number] = call
            if len(known) > _KEPT:
                del known[min(known)]

    def as_json(self) -> dict[str, Any]:
        """For the store: each call's words once, however often it came."""
        table: dict[Call, int] = {}
        groups = []
        for group, members in self.members.items():
            last = sorted(self.calls[group].items())[-_LEFT:]
            rows = [[number, table.setdefault(call, len(table))] for number, call in last]
            groups.append([group, members, rows])
        names = Call.__match_args__
        return {"calls": [[getattr(c, name) for name in names] for c in table], "groups": groups}

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> "Trail":
        """What another rank has left."""
        table = [Call(*row) for row in data["calls"]]
        made = cls()
        for group, members, rows in data["groups"]:
            made.members[group] = tuple(members)
            made.calls[group] = {number: table[at] for number, at in rows}
        return made

    def partners(self, rank: int) -> list[int]:
        """The next member of each of this rank's groups, each once."""
        after = {
            members[(members.index(rank) + 1) % len(members)]
            for members in self.members.values()
            if rank in members
        }
        return sorted(after)


def first_mismatch(one: Trail, other: Trail) -> tuple[str, int] | None:
    """Group and number of the first call in which two ranks differ; None if all match."""
    for group, members in one.members.items():
        if other.members.get(group) != members:
            continue
        mine, theirs = one.calls[group], other.calls[group]
        for number in sorted(mine.keys() & theirs.keys()):
            if not mine[number].matches(theirs[number]):
                return group, number
    return None


def odd_ranks(calls: Mapping[int, Call]) -> tuple[int, ...]:
    """Ranks whose call is not that of the majority; none if there is no majority.

    >>> sum_, gather = Call("all_reduce", "float32", 3, "[3]"), Call("barrier", "", None, "")
    >>> odd_ranks({0: sum_, 1: gather, 2: sum_}), odd_ranks({0: sum_, 1: gather})
    ((1,), ())
    """
    kinds = _kinds(calls)
    most = max(kinds, key=len, default=[])
    if 2 * len(most) <= len(calls):
        return ()
    return tuple(sorted(set(calls) - set(most)))


def _kinds(calls: Mapping[int, Call]) -> list[list[int]]:
    """Ranks by what they called, those of the lowest rank first."""
    kinds: list[list[int]] = []
    for rank, call in sorted(calls.items()):
        same = next((each for each in kinds if calls[each[0]].matches(call)), None)
        if same is None:
            kinds.append(same := [])
        same.append(rank)
    return kinds


def tell_mismatch(
    number: int, calls: Mapping[int, Call], name: Mapping[int, str], members: Iterable[int]
) -> str:
    """A sentence with what each side called.

    Args:
        number: Of the collective in its group.
        calls: What each rank called, as far as that is known.
        name: What each rank was doing, as ``backward of step 7``.
        members: Ranks of the group.
    """
    kinds = _kinds(calls)
    sides = []
    for kind in kinds:
        first = kind[0]
        who = f"rank {first}" if len(kind) == 1 else f"ranks {', '.join(map(str, kind))}"
        phase = f" ({name[first]})" if name.get(first) else ""
        sides.append(f"{who} called {calls[first].words}{phase}")
    listed = ", ".join(map(str, members))
    return (
        f"Collective {number} of ranks {listed} does not match: {'; '.join(sides)}. Results from "
        f"there on are wrong, so the ranks end. {CALL_ALIKE}"
    )
