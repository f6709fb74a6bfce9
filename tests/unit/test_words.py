"""Prose of the source and the pages keeps to plain English: the worst patterns are refused.

Docstrings and messages are read from the syntax tree, comments from beside the strings, so no
identifier is mistaken for prose. ``python tests/unit/test_words.py`` lists what is left.
"""

import ast
import bisect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A pattern, and what to write instead. Spaces match line ends, too.
PATTERNS = {
    r"(?<!there\s)\b(?:is|are) no (?!longer\b|more\b|less\b|worse\b|\w+er than\b)": (
        '"is not a ..." or "must be ..."'
    ),
    r"\bl(?:eave|eaves|eaving|eft) away\b": '"leave out" or "omit"',
    r"\bso many\b": 'the number\'s name, "this many" or "n"',
    r"(?:,|\bthose|\bthat|\brows) of which\b|\bof which so\b": "a sentence of its own",
    r"\btold\b(?! apart)": '"reported", "said", "named" or "given"',
    r"\bfore(?:told|saw|seen)\b": '"predicted"',
    r"\bmend(?:s|ed|ing)?\b": '"fix"',
    r"\bthe least is\b": '"must be at least ..."',
    r"\bas such\b": "nothing, or the reason",
}
RULES = {re.compile(text.replace(" ", r"\s+"), re.I): use for text, use in PATTERNS.items()}
ANY = re.compile("|".join(f"(?:{rule.pattern})" for rule in RULES), re.I)
"""Whether one of them can match: few texts are worth a look at each."""
OF = re.compile(r"\AOf\s")

STRING_OR_COMMENT = re.compile(
    r'''"""(?:\\.|[^\\])*?"""|"(?:\\.|[^"\\\n])*"|'''
    r"""'''(?:\\.|[^\\])*?'''|'(?:\\.|[^'\\\n])*'|(#[^\n]*)""",
    re.DOTALL,
)
"""A hash sign inside of a string begins no comment; tokenize takes twenty times as long."""


def _prose(text: str, line: int, *, opens: bool = False) -> Iterator[tuple[int, str, str]]:
    """Lines, words and advice: what the rules refuse in a text that begins at a line."""
    if opens and OF.match(text):
        yield line, "Of ...", "a noun or a verb that says what it is"
    if not ANY.search(text):
        return
    for rule, advice in RULES.items():
        for match in rule.finditer(text):
            yield line + text.count("\n", 0, match.start()), match.group(), advice


def _code(source: str) -> Iterator[tuple[int, str, str]]:
    """What the rules refuse in a module's strings, comments and names of locals."""
    nodes = list(ast.walk(ast.parse(source)))
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docstrings = {
        id(node.value)
        for parent in nodes
        if isinstance(parent, documented)
        for node in parent.body  # an attribute's docstring stands behind it
        if isinstance(node, ast.Expr)
    }
    fields = {
        id(node.target)
        for parent in nodes
        if isinstance(parent, ast.ClassDef)
        for node in parent.body
        if isinstance(node, ast.AnnAssign)
    }
    keys = {  # of a bench's figures: names to find them by, not prose
        id(key) for node in nodes if isinstance(node, ast.Dict) for key in node.keys
    }
    for node in nodes:
        opens = id(node) in docstrings
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in keys and (opens or " " in node.value):
            yield from _prose(node.value, node.lineno, opens=opens)
        is_stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        is_local = is_stored and id(node) not in fields
        if (is_local and node.id == "found") or (isinstance(node, ast.arg) and node.arg == "found"):
            yield node.lineno, "found", "the name of what it holds"
    begin, lines = 0, list[str]()
    for row, comment in _comments(source):
        if row != begin + len(lines):
            yield from _prose("\n".join(lines), begin)
            begin, lines = row, []
        lines.append(comment.lstrip("# "))
    yield from _prose("\n".join(lines), begin)


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Each comment with its line."""
    ends = [match.start() for match in re.finditer("\n", source)]
    for match in STRING_OR_COMMENT.finditer(source):
        if match[1] is not None:
            yield bisect.bisect_left(ends, match.start()) + 1, match[1]


def faults(file: Path) -> list[str]:
    """``file:line: "words": write ...`` for each refused pattern of a file, in order of lines."""
    text = file.read_text()
    seen = _code(text) if file.suffix == ".py" else _prose(text, 1)
    name = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
    return [
        f'{name}:{line}: "{" ".join(words.split())}": write {advice}'
        for line, words, advice in sorted(seen)
    ]


def files() -> list[Path]:
    """The modules and data files of the source, the pages, and what benches and tests share."""
    source = ROOT / "src" / "equipoise"
    rooms = (source, ROOT / "bench", ROOT / "tests" / "support", ROOT / "docs" / "_ext")
    modules = [file for room in rooms for file in room.rglob("*.py")]
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "changes").glob("*.md")]
    pages.remove(ROOT / "docs" / "house" / "style.md")  # it quotes what is refused
    return sorted((*modules, *source.rglob("*.toml"), *pages))


def test_prose_keeps_to_plain_english() -> None:
    refused = [fault for file in files() for fault in faults(file)]
    assert not refused, "\n".join(["Refused words:", *refused])


BAD = '''"""Of a rank, which is
no rank, and is told."""

WAIT = 3  # so
# many looks, as such


def price(found: int) -> str:
    """Those of which we foresaw the price."""
    for found in (1, 2):
        pass
    # leave away what nobody mends
    return f"{found} is no price; the least is " f"1"
'''


def test_each_pattern_is_refused_where_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text(BAD)
    assert [fault.removeprefix(f"{file}:").rpartition(": write")[0] for fault in faults(file)] == [
        '1: "Of ..."',
        '1: "is no"',
        '2: "told"',
        '4: "so many"',
        '5: "as such"',
        '8: "found"',
        '9: "Those of which"',
        '9: "foresaw"',
        '10: "found"',
        '12: "leave away"',
        '12: "mends"',
        '13: "is no"',
        '13: "the least is"',
    ]


@pytest.mark.parametrize(
    "line",
    [
        "there is no such file",
        "the run is no longer there",
        "sizes cannot be told apart",
        "which pieces of which documents",
        "amendments recommend an offer of choice",
    ],
)
def test_plain_words_pass(line: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(line)
    assert faults(page) == []


if __name__ == "__main__":
    sys.stdout.writelines(f"{fault}\n" for file in files() for fault in faults(file))
