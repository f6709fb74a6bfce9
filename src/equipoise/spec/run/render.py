"""Write a resolved run as TOML with origins, as a commented template, or as a JSON Schema.

Kept true (tests/unit/spec/run/test_resolve.py, tests/unit/spec/run/test_load.py)
    What ``render`` writes loads back to the same digest; the template loads to the defaults, also
    with every line uncommented.
"""

from collections.abc import Iterable
from typing import Any

from pydantic import TypeAdapter

from equipoise.base.units import format_count
from equipoise.spec.run.keys import (
    DEFAULT,
    EXTENDS,
    EXTENDS_DESCRIPTION,
    Key,
    flatten,
    keys,
    sections,
    toml,
)
from equipoise.spec.run.resolve import ResolvedRun
from equipoise.spec.run.spec import RunSpec

_EXAMPLES = {"layout.deadline_s": 600.0, "fault.least_dp": 1, "fault.wait_s": 60.0}
"""Values of keys for which no one value stands where they are not given."""


def _effective(run: ResolvedRun, key: Key) -> Any:
    """The value used for a key that was not given and has no default, or an example of one."""
    if key.name in _EXAMPLES:
        return _EXAMPLES[key.name]
    if key.section == "model":
        return getattr(run.model, key.field)
    if key.section == "eval":
        return run.spec.checkpoint.usual_steps
    if key.section == "layout":
        layout = run.spec.layout
        return layout.stages // layout.pp if key.field == "virtual" else layout.cp
    if key.section == "train":
        return run.spec.train.falling_steps
    return int(1.25 * run.spec.pack.context_tokens)  # the rule that pack.max_tokens describes


def value_of(run: ResolvedRun, key: Key) -> Any:
    """A key's resolved value; None if it was not given and has no default."""
    owner = getattr(run.spec, key.section) if key.section else run.spec
    return getattr(owner, key.field)


def render(run: ResolvedRun) -> str:
    """The run as TOML that loads back to the same digest, each line with its origin.

    Values that follow from others (a preset's sizes) are commented out.
    """
    rows: list[tuple[str, str]] = []
    section = ""
    for name, key in keys().items():
        if key.section != section:
            section = key.section
            rows += [("", ""), (f"[{section}]", "")]
        value = value_of(run, key)
        is_unused = name == "model.preset" and run.spec.model.init != "random"
        mark = "#" if value is None or is_unused else ""
        shown = _effective(run, key) if value is None else value
        origin = "not used" if is_unused else run.origins[name]
        origin = "not given; an example" if value is None and name in _EXAMPLES else origin
        rows.append((f"{mark}{key.field} = {toml(shown)}", origin))
    head = f"# {format_count(run.model.params)} parameters; digest {run.digest}\n"
    return head + _align(rows)


def template(run: ResolvedRun) -> str:
    """A run.toml to start from: every key with its description, commented out unless given."""
    head = (
        "# A run of equipoise. A line that starts with # shows the default: delete the # to\n"
        '# change it. "equipoise config" shows what every key resolves to, and why.\n\n'
    )
    rows: list[tuple[str, str]] = [(f'# {EXTENDS} = "base.toml"', EXTENDS_DESCRIPTION)]
    section = ""
    for name, key in keys().items():
        if key.section != section:
            section = key.section
            summary = (sections()[section].__doc__ or "").strip()
            rows += [("", ""), (f"[{section}]  # {summary}", "")]
        value = value_of(run, key)
        shown = _effective(run, key) if value is None else value
        mark = "#" if run.origins[name] == DEFAULT.label or value is None else ""
        rows.append((f"{mark}{key.field} = {toml(shown)}", _describe(key)))
    return head + _align(rows)


def _describe(key: Key) -> str:
    options = [each for each in flatten(key.annotation) if not isinstance(each, type)]
    if not options or all(str(each) in key.description for each in options):
        return key.description
    return f"{key.description}: {', '.join(toml(each) for each in options)}"


def _align(rows: Iterable[tuple[str, str]], most: int = 44) -> str:
    rows = list(rows)
    width = max((len(text) for text, note in rows if note and len(text) <= most), default=0)
    lines = (f"{text:<{width}}  # {note}" if note else text for text, note in rows)
    return "\n".join(lines) + "\n"


def schema() -> dict[str, Any]:
    """The JSON Schema of run.toml, for editors."""
    raw = TypeAdapter(RunSpec).json_schema()
    closed: dict[str, Any] = _close(raw)
    closed["properties"] = {
        EXTENDS: {"type": "string", "title": "Extends", "description": EXTENDS_DESCRIPTION},
        **closed["properties"],
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **closed,
        "title": "run.toml",
    }


def _close(part: Any) -> Any:
    """Close every table, and remove null, which TOML does not have."""
    if isinstance(part, list):
        return [_close(each) for each in part]
    if not isinstance(part, dict):
        return part
    closed = {
        name: _close(each)
        for name, each in part.items()
        if not (name == "default" and each is None)
    }
    options = [each for each in closed.get("anyOf", ()) if each != {"type": "null"}]
    if options:
        closed.pop("anyOf")
        closed |= options[0] if len(options) == 1 else {"anyOf": options}
    if closed.get("type") == "object":
        closed["additionalProperties"] = False
    return closed
