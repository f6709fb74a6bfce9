"""A guide as data: its alarms, and steps that form a graph."""

from dataclasses import dataclass

from equipoise.fault.runbook.expression import Expression
from equipoise.fault.runbook.query import Events, Query


@dataclass(frozen=True, slots=True)
class Flaw:
    """What is wrong with a guide, and where."""

    line: int
    sentence: str


@dataclass(frozen=True, slots=True)
class Alarm:
    """Events after which a guide applies."""

    line: int
    events: Events


@dataclass(frozen=True, slots=True)
class Need:
    """A step that must be done before another, and how it must have come out."""

    step: str
    outcome: str = ""
    """Empty where any will do."""


@dataclass(frozen=True, slots=True)
class Branch:
    """How a step may come out. The first one whose condition holds is its outcome."""

    line: int
    outcome: str
    condition: Expression | None
    """None of the one that is left: ``else``."""
    stop: str = ""
    """Why nothing follows; empty where something does."""


@dataclass(frozen=True, slots=True)
class Action:
    """A command of the product."""

    line: int
    words: tuple[str, ...]
    """Without ``equipoise``; with ``RUN``, ``run.toml`` and ``{name}`` in them."""
    changes: bool
    """Whether it may change something, so that it is only proposed unless the user agrees."""


@dataclass(frozen=True, slots=True)
class GuideStep:
    """One step of a guide: what to ask, what to do, how it comes out, what to conclude."""

    name: str
    line: int
    after: tuple[tuple[Need, ...], ...] = ()
    """Runs if all needs of one of these are met; always if there are none."""
    after_line: int = 0
    queries: tuple[Query, ...] = ()
    branches: tuple[Branch, ...] = ()
    action: Action | None = None
    conclusion: str = ""
    conclusion_line: int = 0

    @property
    def needs(self) -> tuple[Need, ...]:
        """Every need, in any of the alternatives."""
        return tuple(need for clause in self.after for need in clause)

    @property
    def parents(self) -> tuple[str, ...]:
        """Steps that must be settled before it, each once."""
        return tuple(dict.fromkeys(need.step for need in self.needs))


@dataclass(frozen=True, slots=True)
class Guide:
    """A guide that has been read."""

    name: str
    """Its file's, without the suffix."""
    title: str
    about: str
    """Its first paragraph."""
    alarms: tuple[Alarm, ...]
    steps: tuple[GuideStep, ...]

    @property
    def queries(self) -> tuple[Query, ...]:
        """Those of all steps."""
        return tuple(query for step in self.steps for query in step.queries)
