"""What a schedule of nano-batches arranges: operations, the lanes they run on, what they wait for.

Why
    A matrix product keeps the cores busy, attention of single tokens the memory, an exchange the
    link. Cut into *nano-batches* whose operations depend only on their own, an iteration may run
    one kind beside another.

    ::

        nano-batch 0   dense -> attend -> dense -> attend -> ...
        nano-batch 1   dense -> attend -> dense -> attend -> ...

What it decides
    Nothing. A lane is a set of cores, or an engine of a device. An operation has several *ways* to
    run, each on some lanes: a product takes both halves of the cores, or one of them for longer.

Kept true (tests/unit/schedule/nano/test_search.py)
    What cannot be scheduled is refused in one sentence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from equipoise.base.errors import SpecError

Resource = Literal["compute", "memory", "network"]
"""What an operation is bound by."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run an operation."""

    lanes: tuple[int, ...]
    """All are busy meanwhile."""
    seconds: float
    """With nothing beside it [s]."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of one nano-batch."""

    name: str
    batch: int
    resource: Resource
    ways: tuple[Way, ...]
    after: tuple[int, ...] = ()
    """Operations whose results it needs, by their places in the graph."""


@dataclass(frozen=True, slots=True)
class NanoGraph:
    """Operations, each behind those that it needs.

    Raises:
        SpecError: an operation has no way to run, needs a later one, or gets faster beside another.
    """

    operations: tuple[Operation, ...]
    lanes: int
    beside: Mapping[tuple[Resource, Resource], float] = field(default_factory=dict)
    """How many times longer an operation bound by the first takes beside one bound by the second;
    1 for pairs that are not named. Beside several, the product."""

    def __post_init__(self) -> None:
        for at, each in enumerate(self.operations):
            if not each.ways:
                raise SpecError(f"{each.name} has no way to run. Give it one.")
            if any(not way.seconds > 0 for way in each.ways):
                raise SpecError(f"{each.name} takes no time. Give every way seconds above 0.")
            if any(
                not way.lanes or not set(way.lanes) <= {*range(self.lanes)} for way in each.ways
            ):
                raise SpecError(
                    f"{each.name} runs on lanes that do not exist. Name some of {self.lanes}, "
                    "counted from 0."
                )
            if any(not 0 <= before < at for before in each.after):
                raise SpecError(f"{each.name} needs a later operation. List operations in order.")
        for (one, other), times in self.beside.items():
            if not times >= 1:
                raise SpecError(
                    f"{one} beside {other} takes {times:g} times as long. It must be at least 1."
                )

    @property
    def sequential_s(self) -> float:
        """All operations one after another, each in its fastest way [s]."""
        return sum(min(way.seconds for way in each.ways) for each in self.operations)


@dataclass(frozen=True, slots=True)
class Link:
    """One operation in a nano-batch's chain."""

    name: str
    resource: Resource
    ways: tuple[Way, ...]


def chain_graph(
    batches: Sequence[Sequence[Link]],
    *,
    lanes: int,
    beside: Mapping[tuple[Resource, Resource], float] | None = None,
) -> NanoGraph:
    """The graph of nano-batches whose operations follow each other.

    Args:
        batches: Of each nano-batch its operations in order.
        lanes: Lanes that there are.
        beside: As in ``NanoGraph``.
    """
    operations = list[Operation]()
    for batch, links in enumerate(batches):
        for at, each in enumerate(links):
            after = (len(operations) - 1,) if at else ()
            operations.append(Operation(each.name, batch, each.resource, each.ways, after))
    return NanoGraph(tuple(operations), lanes, beside or {})
