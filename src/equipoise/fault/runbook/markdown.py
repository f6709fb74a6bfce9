"""Read a guide's Markdown into steps, and say at which line what cannot be read.

What it decides
    A guide is a title (``#``), a line ``when:`` for each alarm, prose, and a step for each ``##``.
    In a step count: a line ``after:``, blocks fenced as ``query`` and ``action``, items
    ``- if `CONDITION`: **outcome**`` and ``- else: **outcome**``, each with ``; stop: why`` if
    nothing follows, and a quotation (``>``), which is the step's conclusion. All else is prose.

Kept true (tests/unit/fault/runbook/test_lint.py)
    Whatever bytes a file holds, there is a guide or a flaw with a line; every flaw is reported.
"""

import re
import shlex
from dataclasses import dataclass, field

from equipoise.fault.runbook.expression import GuideError, parse_expression
from equipoise.fault.runbook.guide import Action, Alarm, Branch, Flaw, Guide, GuideStep, Need
from equipoise.fault.runbook.query import Query, parse_events, parse_query

_HEADING = re.compile(r"(#{1,6})\s+(.*?)\s*#*\s*")
_KEY = re.compile(r"(when|after):\s*(.*)", re.IGNORECASE)
_BRANCH = re.compile(
    r"-\s+(?:if\s+`(?P<condition>[^`]+)`|(?P<otherwise>else))\s*:\s*\*\*(?P<outcome>[^*]+)\*\*"
    r"(?:\s*;\s*stop:\s*(?P<stop>.+)|\.)?"
)
_NAME = re.compile(r"[^\W_][\w '-]*")

_NAME_RULE = "it has letters, digits, spaces and hyphens, and neither of the words and, or."

READS = ("config", "doctor", "explain", "inspect", "pack", "report", "simulate", "systems", "trace")
"""Verbs that look, take seconds and change nothing but their own page in the run's folder."""

_WRITES = ("--out", "--plot", "--trace", "--export")
"""Flags with which such a verb writes to any place."""


@dataclass
class _Draft:
    """A step while its lines are read."""

    name: str
    line: int
    after: tuple[tuple[Need, ...], ...] = ()
    after_line: int = 0
    queries: list[Query] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    action: Action | None = None
    conclusion: list[str] = field(default_factory=list)
    conclusion_line: int = 0

    def step(self) -> GuideStep:
        return GuideStep(
            self.name,
            self.line,
            self.after,
            self.after_line,
            tuple(self.queries),
            tuple(self.branches),
            self.action,
            " ".join(self.conclusion),
            self.conclusion_line,
        )


@dataclass
class _Reader:
    lines: list[str]
    flaws: list[Flaw] = field(default_factory=list)
    title: str = ""
    about: list[str] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)
    steps: list[_Draft] = field(default_factory=list)
    at: int = 0
    """Index of the next line."""
    has_about: bool = False

    def flaw(self, line: int, sentence: str) -> None:
        self.flaws.append(Flaw(line, sentence))

    def read(self) -> None:
        while self.at < len(self.lines):
            number, text = self.at + 1, self.lines[self.at].rstrip()
            self.at += 1
            if fence := re.fullmatch(r"(`{3,})\s*([\w-]*).*", text):
                self._fence(number, fence[1], fence[2])
            elif heading := _HEADING.fullmatch(text):
                self._heading(number, heading[1], heading[2])
            elif key := _KEY.fullmatch(text):
                self._key(number, key[1].lower(), f"{key[2]} {self._more()}".strip())
            elif re.match(r"-\s+(if|else)\b", text):
                self._branch(number, text)
            elif text.startswith(">"):
                self._quotation(number, text[1:].strip())
            else:
                self._prose(text)

    def _more(self) -> str:
        """The lines that go on with the last one, which end at a blank one or another key."""
        begin = self.at
        while self.at < len(self.lines):
            text = self.lines[self.at].strip()
            if not text or _KEY.fullmatch(text) or re.match(r"#|`{3}|>|- ", text):
                break
            self.at += 1
        return " ".join(each.strip() for each in self.lines[begin : self.at])

    def _prose(self, text: str) -> None:
        if self.steps or not self.title:
            return
        if text and not self.has_about:
            self.about.append(text.strip())
        elif self.about:
            self.has_about = True

    def _heading(self, line: int, marks: str, text: str) -> None:
        if marks == "#":
            if self.title:
                self.flaw(line, "A guide has one title. Begin a step with ##.")
            self.title = self.title or text
        elif marks == "##":
            if not _is_name(text):
                self.flaw(line, f'"{text}" cannot be a step\'s name: {_NAME_RULE}')
            twin = next((each for each in self.steps if each.name.lower() == text.lower()), None)
            if twin is not None:
                self.flaw(line, f'Line {twin.line} has a step called "{text}", too. Rename one.')
            self.steps.append(_Draft(text, line))

    def _key(self, line: int, key: str, text: str) -> None:
        if key == "when":
            if self.steps:
                self.flaw(line, "when: belongs above the first step: it is the guide's.")
            try:
                self.alarms.append(Alarm(line, parse_events(text)))
            except GuideError as error:
                self.flaw(line, str(error))
            return
        if not self.steps:
            self.flaw(line, "after: belongs to a step, below its ## heading.")
            return
        step = self.steps[-1]
        if step.after_line:
            self.flaw(line, f"Line {step.after_line} says already what this step comes after.")
            return
        step.after_line = line
        clauses = []
        for clause in re.split(r"\s+or\s+", text):
            refs = [each.partition("=") for each in re.split(r"\s+and\s+", clause)]
            clauses.append(tuple(Need(name.strip(), wanted.strip()) for name, _, wanted in refs))
        if any(not need.step for clause in clauses for need in clause):
            self.flaw(line, "after: names no step. Write after: STEP, or after: STEP = outcome.")
            return
        step.after = tuple(clauses)

    def _fence(self, line: int, mark: str, kind: str) -> None:
        inside: list[tuple[int, str]] = []
        while self.at < len(self.lines):
            number, text = self.at + 1, self.lines[self.at].rstrip()
            self.at += 1
            if text.strip().startswith(mark) and not text.strip().strip("`"):
                break
            inside.append((number, text))
        else:
            self.flaw(line, f"This block is not closed. End it with {mark}.")
        if kind not in ("query", "action"):
            return
        if not self.steps:
            self.flaw(line, f"A block of {kind} belongs to a step, below its ## heading.")
        elif kind == "query":
            self._queries(self.steps[-1], inside)
        else:
            self._action(self.steps[-1], line, inside)

    def _queries(self, step: _Draft, inside: list[tuple[int, str]]) -> None:
        joined: list[tuple[int, str]] = []
        for number, text in inside:
            plain = text.partition("#")[0] if text.lstrip().startswith("#") else text
            if plain[:1].isspace() and plain.strip() and joined:
                joined[-1] = joined[-1][0], f"{joined[-1][1]} {plain.strip()}"
            elif plain.strip():
                joined.append((number, plain.strip()))
        for number, text in joined:
            try:
                step.queries.append(parse_query(text, number))
            except GuideError as error:
                self.flaw(number, str(error))
                if name := re.match(r"[a-z]\w*(?=\s*=)", text):  # one mistake, one message
                    step.queries.append(Query(number, text, name[0]))

    def _action(self, step: _Draft, line: int, inside: list[tuple[int, str]]) -> None:
        commands = [(number, text.strip()) for number, text in inside if text.strip()]
        if len(commands) != 1 or step.action is not None:
            self.flaw(line, "A step has one action, which is one command. Make a step for each.")
            return
        number, text = commands[0]
        try:
            words = shlex.split(text)
        except ValueError as error:
            self.flaw(number, f"This command cannot be read: {str(error).lower()}.")
            return
        if words[:1] != ["equipoise"] or len(words) < 2:
            self.flaw(number, "An action is a command of equipoise, such as: equipoise doctor.")
            return
        flags = {word.partition("=")[0] for word in words}
        changes = words[1] not in READS or not flags.isdisjoint(_WRITES)
        step.action = Action(number, tuple(words[1:]), changes)

    def _branch(self, line: int, text: str) -> None:
        while self.at < len(self.lines) and re.match(r"\s+\S", self.lines[self.at]):
            text += f" {self.lines[self.at].strip()}"
            self.at += 1
        shape = _BRANCH.fullmatch(text)
        if shape is None:
            self.flaw(
                line,
                "This outcome cannot be read. Write - if `CONDITION`: **outcome**, or - else: "
                "**outcome**, and ; stop: WHY behind it where nothing follows.",
            )
            return
        if not self.steps:
            self.flaw(line, "An outcome belongs to a step, below its ## heading.")
            return
        condition = None
        if shape["condition"] is not None:
            try:
                condition = parse_expression(shape["condition"])
            except GuideError as error:
                self.flaw(line, str(error))
                return
        outcome, stop = shape["outcome"].strip(), (shape["stop"] or "").strip()
        if not _is_name(outcome):
            self.flaw(line, f'"{outcome}" cannot be an outcome: {_NAME_RULE}')
        self.steps[-1].branches.append(Branch(line, outcome, condition, stop))

    def _quotation(self, line: int, text: str) -> None:
        if not self.steps:
            return
        step = self.steps[-1]
        step.conclusion_line = step.conclusion_line or line
        step.conclusion.append(text)


def _is_name(text: str) -> bool:
    return bool(_NAME.fullmatch(text)) and not re.search(r"\b(and|or)\b", text.lower())


def read_guide(text: str, name: str) -> tuple[Guide, list[Flaw]]:
    """The guide that a text describes, as far as it can be read, and what cannot.

    Args:
        text: Markdown.
        name: What the guide is called.
    """
    reader = _Reader(text.splitlines())
    reader.read()
    if not reader.title:
        reader.flaw(1, "The guide has no title. Begin it with # and what is wrong.")
    if not reader.steps:
        reader.flaw(max(1, len(reader.lines)), "The guide has no step. Begin one with ##.")
    steps = tuple(draft.step() for draft in reader.steps)
    guide = Guide(name, reader.title, " ".join(reader.about), tuple(reader.alarms), steps)
    return guide, sorted(reader.flaws, key=lambda flaw: flaw.line)
