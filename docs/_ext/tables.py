"""Tables that are read from the product when the pages are built, so that they cannot go stale.

{run-keys}   every key of run.toml, a section for each table, from ``spec.run.spec``
{presets}    the model presets, from ``spec.model.presets``
{systems}    the registry of systems, from ``base/systems.toml``
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from equipoise.base.registry import systems
from equipoise.base.units import format_count
from equipoise.spec.model.presets import PRESETS
from equipoise.spec.run.keys import Key, keys, toml
from equipoise.spec.run.load import schema

Cell = str | Sequence[nodes.Node]


def inline(text: str) -> list[nodes.Node]:
    """Text in which `quoted` parts are code.

    >>> [type(node).__name__ for node in inline('see `a` now')]
    ['Text', 'literal', 'Text']
    """
    parts: list[nodes.Node] = []
    for index, part in enumerate(re.split(r"`([^`]+)`", text)):
        if part:
            parts.append(nodes.literal(text=part) if index % 2 else nodes.Text(part))
    return parts


def code(text: str) -> list[nodes.Node]:
    return [nodes.literal(text=text)]


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    widths: Sequence[int],
    *,
    right: Sequence[int] = (),
    ids: Sequence[str] = (),
) -> nodes.table:
    """A docutils table; columns in ``right`` hold numbers."""

    def entry(cell: Cell, column: int) -> nodes.entry:
        paragraph = nodes.paragraph()
        paragraph += inline(cell) if isinstance(cell, str) else list(cell)
        classes = ["number"] if column in right else []
        return nodes.entry("", paragraph, classes=classes)

    def row(cells: Sequence[Cell], name: str = "") -> nodes.row:
        made = nodes.row("", *(entry(cell, column) for column, cell in enumerate(cells)))
        if name:
            made["ids"].append(name)
        return made

    body = [row(cells, ids[index] if ids else "") for index, cells in enumerate(rows)]
    group = nodes.tgroup(
        "",
        *(nodes.colspec(colwidth=width) for width in widths),
        nodes.thead("", row(head)),
        nodes.tbody("", *body),
        cols=len(widths),
    )
    return nodes.table("", group, classes=["wide", "colwidths-given"])


class RunKeys(SphinxDirective):
    """Every key of run.toml, a section for each table."""

    def run(self) -> list[nodes.Node]:
        """One section a table."""
        whole = schema()
        sections: list[nodes.Node] = []
        for section, group in _by_section().items():
            part = whole
            title: list[nodes.Node] = [nodes.Text("Outside every table")]
            summary = "These two keys stand before the first table."
            if section:
                part = whole["$defs"][whole["properties"][section]["$ref"].rpartition("/")[2]]
                title, summary = code(f"[{section}]"), part["description"]
            name = f"table-{section or 'top'}"
            made = nodes.section("", nodes.title("", "", *title), ids=[name], names=[name])
            made += nodes.paragraph("", "", *inline(summary))
            rows = [_key_row(key, part["properties"][key.field]) for key in group]
            ids = [f"key-{key.name.replace('.', '-').replace('_', '-')}" for key in group]
            if not section:
                extends = part["properties"]["extends"]
                rows.insert(0, (code("extends"), "none", "a path", extends["description"]))
                ids.insert(0, "key-extends")
            made += table(
                ("key", "default", "allowed", "what it is"), rows, (17, 20, 25, 38), ids=ids
            )
            sections.append(made)
        return sections


def _by_section() -> dict[str, list[Key]]:
    keys_of: dict[str, list[Key]] = {}
    for key in keys().values():
        keys_of.setdefault(key.section, []).append(key)
    return keys_of


def _key_row(key: Key, schema_of_key: dict[str, Any]) -> tuple[Cell, ...]:
    default: Cell = "follows from other keys"
    if key.default is not None:
        default = code(toml(key.default))
    elif key.section == "model":
        default = "the preset's" if key.field != "vocab" else "`data.vocab`"
    return code(key.field), default, _allowed(schema_of_key), _quote(key.description)


def _quote(text: str) -> str:
    """Values in a description, which are in quotes there, as code."""
    return re.sub(r'"[^" ]+"', r"`\g<0>`", text)


def _allowed(part: dict[str, Any]) -> Cell:
    """What a JSON Schema allows, in words."""
    if "anyOf" in part:
        cells = [_allowed(each) for each in part["anyOf"]]
        return " or ".join(cell if isinstance(cell, str) else cell[0].astext() for cell in cells)
    if "const" in part:
        return f"`{toml(part['const'])}`"
    if "enum" in part:
        return ", ".join(f"`{toml(each)}`" for each in part["enum"])
    words = {"integer": "whole number", "number": "number", "string": "text", "array": "list"}
    if part["type"] == "boolean":
        return "`true`, `false`"
    limits = [
        f"{sign}\N{NO-BREAK SPACE}{_number(part[name])}"
        for name, sign in (
            ("minimum", "≥"),
            ("exclusiveMinimum", ">"),
            ("maximum", "≤"),
            ("exclusiveMaximum", "<"),
        )
        if name in part
    ]
    if "pattern" in part:
        limits.append("letters, digits, `.`, `_`, `-`; begins with a letter or digit")
    return ", ".join([words[part["type"]], *limits])


def _number(value: float) -> str:
    return "2⁶³" if value == 2**63 else f"{value:,}"


class Presets(SphinxDirective):
    """The model presets."""

    def run(self) -> list[nodes.Node]:
        """One row a preset."""
        rows = [
            (
                code(name),
                format_count(model.params),
                str(model.layers),
                f"{model.hidden:,}",
                f"{model.heads} / {model.kv_heads}",
                f"{model.ffn:,}",
                f"{model.vocab:,}",
                "yes" if model.tied else "no",
                f"{model.break_even_tokens:,.0f}",
            )
            for name, model in PRESETS.items()
        ]
        head = (
            "preset",
            "parameters",
            "layers",
            "width",
            "heads / KV",
            "FFN",
            "words",
            "tied",
            "break-even",
        )
        return [table(head, rows, (18, 13, 9, 10, 12, 10, 11, 7, 13), right=range(1, 9))]


class Systems(SphinxDirective):
    """The rows of the registry in one state: ``works`` (whole or in part), or ``not yet``."""

    option_spec: ClassVar = {"state": directives.unchanged_required}

    def run(self) -> list[nodes.Node]:
        """One row a system."""
        wanted = self.options["state"]
        shown = [each for each in systems() if (each.state == "not yet") == (wanted == "not yet")]
        if wanted == "not yet":
            rows = [(str(each.number), each.name, _sentence(each.mechanism)) for each in shown]
            return [table(("#", "system", "what it does"), rows, (5, 25, 70))]
        rows = []
        for each in shown:
            rest = f" {_sentence('missing: ' + each.missing)}" if each.missing else ""
            rows.append(
                (
                    str(each.number),
                    each.name,
                    each.state,
                    _sentence(each.mechanism) + rest,
                    code(each.command or ""),
                )
            )
        head = ("#", "system", "state", "what it does", "see it")
        return [table(head, rows, (5, 12, 8, 45, 30))]


class SystemsCount(SphinxDirective):
    """One sentence: how many systems work."""

    def run(self) -> list[nodes.Node]:
        """A paragraph."""
        states = [each.state for each in systems()]
        text = (
            f"Of {len(states)} systems, {states.count('works')} work, {states.count('part')} work "
            f"in part and {states.count('not yet')} do not work yet."
        )
        return [nodes.paragraph(text=text)]


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives."""
    app.add_directive("run-keys", RunKeys)
    app.add_directive("presets", Presets)
    app.add_directive("systems", Systems)
    app.add_directive("systems-count", SystemsCount)
    return {"version": "1", "parallel_read_safe": True}
