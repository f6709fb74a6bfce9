"""The functions of Python's standard library as documents, and whole modules among them.

Why
    Instruction data is thousands of short texts and a few that fill the window. The standard
    library has that shape on every machine: a function of 70 tokens beside a module of 15,000.

What it decides
    Each text once. A module of ``WHOLE_BYTES`` is one document; of every other module, each
    function is one: methods too, with their decorators, indented as if they stood alone. Functions
    within functions belong to the outer one. Test suites are left out, and so are modules that do
    not parse. Modules are parsed, never imported.

Kept true (tests/unit/data/test_functions.py)
    The documents of a module are its own text, in order, and none overlaps another.
"""

import ast
import textwrap
import warnings
from collections.abc import Iterator

WHOLE_BYTES = range(32 << 10, (64 << 10) + 1)
"""Sizes of modules that are one document: half a window of 16,384 tokens to a whole one."""

TESTS = frozenset({"test", "tests", "idle_test"})
"""Folders of test suites."""


def split_module(text: str) -> Iterator[tuple[int, str]]:
    r"""The documents of a module, each with its first line, from 1.

    >>> list(split_module("import os\n\nclass A:\n    def f(self):\n        return 1\n"))
    [(4, 'def f(self):\n    return 1\n')]
    """
    if len(text.encode()) in WHOLE_BYTES:
        yield 1, text
        return
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes, in a library that is not the user's
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = text.split("\n")  # splitlines() also splits at form feeds, which ast does not count
    for function in _functions(tree):
        first = min(each.lineno for each in (function, *function.decorator_list))
        yield first, textwrap.dedent("\n".join(lines[first - 1 : function.end_lineno])) + "\n"


def _functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions below a node in order; those of classes and branches, not those of functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _functions(child)
