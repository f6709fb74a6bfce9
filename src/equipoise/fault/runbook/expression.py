"""Expressions of a guide: Python's syntax for arithmetic and comparison, checked, never executed.

What it decides
    Python's parser reads the text, and a walk over its tree accepts a short list of nodes and
    functions, infers the kind of every value before anything runs, and computes.
    What the journal does not know is None, the unknown. Whatever is computed from it is unknown,
    too, unless the other side settles it (``True or unknown``): an unknown condition stops a
    step, so silence is never taken for health.

Kept true (tests/unit/fault/runbook/test_expression.py)
    No text runs code; a text that compiles never fails by the kind of a value.
"""

import ast
import math
import operator
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from equipoise.base.nearest import nearest

ValueKind = Literal["number", "text", "flag", "list", "object", "numbers", "texts", "any"]
"""What a value is; ``numbers`` and ``texts`` are tables, by rank for example."""

Value = Any
"""A float, a str, a bool, a list, a dict (an object, or a table by key), or None: unknown."""

SAID: dict[ValueKind, str] = {
    "number": "a number",
    "text": "a text",
    "flag": "a condition",
    "list": "a list",
    "object": "an object",
    "numbers": "a table of numbers",
    "texts": "a table of texts",
    "any": "a value",
}
"""Kinds as messages name them."""

_MOST_CHARACTERS = 400

CONSTANTS = {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}


class GuideError(ValueError):
    """What is wrong with a part of a guide, as a sentence."""


@dataclass(frozen=True, slots=True)
class Expression:
    """A text that has been checked, and the names that it reads."""

    text: str
    tree: ast.expr
    names: frozenset[str]

    def kind(self, kinds: Mapping[str, ValueKind]) -> ValueKind:
        """The kind of its value, given those of its names.

        Raises:
            GuideError: a name that nobody has set, or values that do not go together.
        """
        return _Kinds(kinds).of(self.tree)

    def value(self, values: Mapping[str, Value]) -> Value:
        """Its value; None if it is unknown."""
        return _compute(self.tree, values)


def parse_expression(text: str) -> Expression:
    """Read an expression.

    Raises:
        GuideError: Python could not read it, or it holds what no guide may.

    >>> parse_expression("max(busy) > 1.1 * median(busy)").value({"busy": {0: 1.0, 1: 3.0}})
    True
    """
    if len(text) > _MOST_CHARACTERS:
        raise GuideError(
            f"This expression has {len(text)} characters and may have {_MOST_CHARACTERS}. Give "
            f"parts of it names of their own."
        )
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        hint = " Compare with ==." if "==" not in text and "=" in text else ""
        raise GuideError(f"`{text.strip()}` cannot be read as an expression.{hint}") from error
    names = set()
    for node in ast.walk(tree):
        _require_allowed(node)
        if isinstance(node, ast.Name):
            names.add(node.id)
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call)}  # type: ignore[attr-defined]
    return Expression(text.strip(), tree, frozenset(names - called - CONSTANTS.keys()))


_NODES = (
    ast.BoolOp,
    ast.And,
    ast.Or,
    ast.UnaryOp,
    ast.Not,
    ast.USub,
    ast.BinOp,
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.Div,
    ast.Compare,
    ast.Eq,
    ast.NotEq,
    ast.Lt,
    ast.LtE,
    ast.Gt,
    ast.GtE,
    ast.In,
    ast.NotIn,
    ast.Name,
    ast.Load,
    ast.Constant,
    ast.Call,
    ast.Subscript,
)


def _require_allowed(node: ast.AST) -> None:
    if not isinstance(node, _NODES):
        what = type(node).__name__.lower()
        raise GuideError(
            f"A guide's expressions have no {what}; they have numbers, names, texts, + - * /, "
            f"comparisons, in, and, or, not, table[key] and functions."
        )
    if isinstance(node, ast.Constant) and not isinstance(node.value, int | float | str):
        raise GuideError(f"`{node.value!r}` is neither a number nor a text.")
    if isinstance(node, ast.Call):
        if not isinstance(node.func, ast.Name) or node.keywords:
            raise GuideError("Functions are called by their name, with values alone.")
        name = node.func.id
        if name not in FUNCTIONS:
            raise GuideError(
                f"There is no function {name}. Nearest: {nearest(name, FUNCTIONS)}. All: "
                f"{', '.join(FUNCTIONS)}."
            )
        wanted = len(FUNCTIONS[name].takes)
        if len(node.args) != wanted:
            raise GuideError(f"{name} takes {wanted} values, not {len(node.args)}.")


# Functions


@dataclass(frozen=True, slots=True)
class Function:
    """A function of guides."""

    takes: tuple[tuple[ValueKind, ...], ...]
    """The kinds that each of its values may have."""
    gives: ValueKind | Literal["same"]
    """``same`` as its first value."""
    compute: Callable[..., Value]


def _over(compute: Callable[[list[float]], float]) -> Callable[[Mapping[Any, Value]], Value]:
    def of_table(table: Mapping[Any, Value]) -> Value:
        known = [value for value in table.values() if value is not None]
        return compute(known) if known else None

    return of_table


def _key(choose: Callable[..., Any]) -> Callable[[Mapping[Any, Value]], Value]:
    def of_table(table: Mapping[Any, Value]) -> Value:
        known = {key: value for key, value in table.items() if value is not None}
        return choose(known, key=lambda key: known[key]) if known else None

    return of_table


def _without(table: Mapping[Any, Value], key: Value) -> Value:
    return {each: value for each, value in table.items() if each != key}


def _first(values: list[Value]) -> Value:
    return values[0] if values else None


_TABLE: tuple[ValueKind, ...] = ("numbers",)
_COUNTED: tuple[ValueKind, ...] = ("numbers", "texts", "list")
_ANY: tuple[ValueKind, ...] = (
    *("number", "text", "flag", "list", "object", "numbers", "texts", "any"),
)

FUNCTIONS: dict[str, Function] = {
    "max": Function((_TABLE,), "number", _over(max)),
    "min": Function((_TABLE,), "number", _over(min)),
    "sum": Function((_TABLE,), "number", _over(math.fsum)),
    "mean": Function((_TABLE,), "number", _over(statistics.fmean)),
    "median": Function((_TABLE,), "number", _over(statistics.median)),
    "argmax": Function((_TABLE,), "any", _key(max)),
    "argmin": Function((_TABLE,), "any", _key(min)),
    "without": Function((_TABLE, _ANY), "numbers", _without),
    "count": Function((_COUNTED,), "number", lambda values: float(len(values))),
    "first": Function((("list",),), "any", _first),
    "lower": Function((("text",),), "text", str.lower),
    "abs": Function((("number",),), "number", abs),
    "known": Function((_ANY,), "flag", lambda value: value is not None),
}
"""All functions; each but ``known`` of an unknown value is unknown."""


# Kinds, before anything runs


@dataclass(frozen=True, slots=True)
class _Kinds:
    names: Mapping[str, ValueKind]

    def of(self, node: ast.expr) -> ValueKind:
        match node:
            case ast.Constant(value=str()):
                return "text"
            case ast.Constant(value=bool()):
                return "flag"
            case ast.Constant():
                return "number"
            case ast.Name(id=name):
                return self._of_name(name)
            case ast.BoolOp(values=parts):
                for part in parts:
                    self._require(part, "flag", "and, or")
                return "flag"
            case ast.UnaryOp(op=ast.Not(), operand=part):
                self._require(part, "flag", "not")
                return "flag"
            case ast.UnaryOp(operand=part):
                self._require(part, "number", "a minus")
                return "number"
            case ast.BinOp(left=left, right=right):
                return self._of_sum(self.of(left), self.of(right))
            case ast.Compare(left=left, ops=operators, comparators=others):
                for sign, one, other in zip(operators, [left, *others], others, strict=False):
                    self._require_comparable(sign, self.of(one), self.of(other))
                return "flag"
            case ast.Subscript(value=table, slice=key):
                self.of(key)
                kind = self.of(table)
                if kind not in ("numbers", "texts", "any"):
                    raise GuideError(f"`{ast.unparse(table)}` is {SAID[kind]}, not a table.")
                return {"numbers": "number", "texts": "text"}.get(kind, "any")  # type: ignore[return-value]
            case ast.Call(func=ast.Name(id=name), args=values):
                return self._of_call(name, values)
        raise GuideError(f"`{ast.unparse(node)}` is not part of a guide's expressions.")

    def _of_name(self, name: str) -> ValueKind:
        if name in CONSTANTS:
            return "number"
        if name not in self.names:
            known = f" Nearest: {nearest(name, self.names)}." if self.names else ""
            raise GuideError(f"Nothing has set `{name}` here.{known}")
        return self.names[name]

    def _require(self, node: ast.expr, wanted: ValueKind, where: str) -> None:
        kind = self.of(node)
        if kind not in (wanted, "any"):
            raise GuideError(
                f"`{ast.unparse(node)}` is {SAID[kind]}; {where} takes {SAID[wanted]}."
            )

    @staticmethod
    def _of_sum(left: ValueKind, right: ValueKind) -> ValueKind:
        for kind in (left, right):
            if kind not in ("number", "numbers", "any"):
                raise GuideError(f"{_begin(kind)} cannot be added, multiplied or divided.")
        return "numbers" if "numbers" in (left, right) else "number"

    @staticmethod
    def _require_comparable(sign: ast.cmpop, left: ValueKind, right: ValueKind) -> None:
        if isinstance(sign, ast.In | ast.NotIn):
            holds = {"text": ("text", "any"), "list": _ANY, "any": _ANY, "numbers": _ANY}
            if left not in holds.get(right, ()):
                raise GuideError(
                    f"`in` looks for a text in a text, or for a value in a list; not for "
                    f"{SAID[left]} in {SAID[right]}."
                )
            return
        is_order = not isinstance(sign, ast.Eq | ast.NotEq)
        kinds = {left, right} - {"any"}
        if len(kinds) > 1 or (is_order and kinds - {"number"}) or kinds & {"numbers", "texts"}:
            raise GuideError(f"{_begin(left)} cannot be compared with {SAID[right]} here.")

    def _of_call(self, name: str, values: list[ast.expr]) -> ValueKind:
        function = FUNCTIONS[name]
        for wanted, value in zip(function.takes, values, strict=True):
            kind = self.of(value)
            if kind not in wanted and kind != "any":
                raise GuideError(
                    f"{name} takes {' or '.join(SAID[each] for each in wanted)}, and "
                    f"`{ast.unparse(value)}` is {SAID[kind]}."
                )
        return self.of(values[0]) if function.gives == "same" else function.gives


def _begin(kind: ValueKind) -> str:
    return SAID[kind].capitalize()


# Values

_SUMS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_SIGNS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda one, many: one in many,
    ast.NotIn: lambda one, many: one not in many,
}


def _compute(node: ast.expr, values: Mapping[str, Value]) -> Value:
    match node:
        case ast.Constant(value=value):
            return float(value) if type(value) is int else value
        case ast.Name(id=name):
            return CONSTANTS[name] if name in CONSTANTS else values.get(name)
        case ast.BoolOp(op=sign, values=parts):
            settles = isinstance(sign, ast.Or)
            flags = [_compute(part, values) for part in parts]
            if settles in flags:
                return settles
            return None if None in flags else not settles
        case ast.UnaryOp(op=sign, operand=part):
            value = _compute(part, values)
            if value is None:
                return None
            return not value if isinstance(sign, ast.Not) else _checked(operator.neg, value)
        case ast.BinOp(left=left, op=sign, right=right):
            return _sum(_SUMS[type(sign)], _compute(left, values), _compute(right, values))
        case ast.Compare(left=left, ops=signs, comparators=others):
            sides = [_compute(each, values) for each in (left, *others)]
            flags = [
                None if one is None or other is None else _checked(_SIGNS[type(sign)], one, other)
                for sign, one, other in zip(signs, sides, sides[1:], strict=False)
            ]
            return False if False in flags else None if None in flags else True
        case ast.Subscript(value=table, slice=key):
            rows, at = _compute(table, values), _compute(key, values)
            return rows.get(at) if isinstance(rows, dict) and _is_key(at) else None
        case ast.Call(func=ast.Name(id=name), args=parts):
            given = [_compute(part, values) for part in parts]
            if name != "known" and None in given:
                return None
            return _checked(FUNCTIONS[name].compute, *given)
    raise AssertionError(node)  # refused when it was parsed


def _is_key(value: Value) -> bool:
    return isinstance(value, float | int | str)


def _sum(combine: Callable[[float, float], float], left: Value, right: Value) -> Value:
    """A sum of numbers, or of tables element by element."""
    if isinstance(left, dict) and isinstance(right, dict):
        return {key: _sum(combine, left[key], right[key]) for key in left if key in right}
    if isinstance(left, dict):
        return {key: _sum(combine, value, right) for key, value in left.items()}
    if isinstance(right, dict):
        return {key: _sum(combine, left, value) for key, value in right.items()}
    if not (isinstance(left, float | int) and isinstance(right, float | int)):
        return None
    value = _checked(combine, left, right)
    return value if value is not None and math.isfinite(value) else None


def _checked(compute: Callable[..., Value], *given: Value) -> Value:
    """What is computed; unknown where values that the journal left open do not go together."""
    try:
        return compute(*given)
    except (TypeError, ValueError, ZeroDivisionError, OverflowError, AttributeError):
        return None
