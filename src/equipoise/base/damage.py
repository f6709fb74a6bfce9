"""What libraries say of damaged files, as parts of sentences.

Why
    Libraries name the types of their own code: "invalid type: sequence, expected u32" is a list in
    the place of a whole number, and "cannot reshape array" a file that ends too early.

Kept true (tests/unit/base/test_damage.py)
    Words that are not in the tables stay as they are.
"""

import re
from collections.abc import Callable

_HEADER = "Error while deserializing header: "
_KINDS = {
    "sequence": "a list",
    "map": "a table",
    "boolean": "a flag",
    "a boolean": "true or false",
    "null": "null",
    "unit": "null",
    "floating point": "the number",
    "integer": "the number",
    "string": "the text",
    "character": "the text",
    "a sequence": "a list",
    "a map": "a table",
    "a string": "a text",
    "string or map": "a text or a table",
}
_WHOLE, _REAL = re.compile(r"[ui](8|16|32|64|size)"), re.compile(r"f(32|64)")
_PLACE = re.compile(r" at line (\d+) column (\d+)$")

_RULES: tuple[tuple[str, Callable[[re.Match[str]], str]], ...] = (
    # serde, which reads JSON for safetensors and tokenizers
    (
        r"invalid (?:type|value): (.+), expected (.+)",
        lambda match: f"{_given(match[1])} stands where {_wanted(match[2])} belongs",
    ),
    (
        r"invalid length (\d+), expected (.+)",
        lambda match: f"a list of {match[1]} stands where {_wanted(match[2])} belongs",
    ),
    (r"data did not match any variant of .*", lambda _: "a part of it is of no known kind"),
    (r"missing field `(.*)`", lambda match: f"it lacks {match[1]}"),
    (r"unknown variant `(.*)`, expected .*", lambda match: f'"{match[1]}" is not a known name'),
    (r"Token `(.*)` out of vocabulary", lambda match: f'its vocabulary lacks "{match[1]}"'),
    (
        r"expected (value|ident|`.*)|EOF while parsing .*|trailing (comma|characters)"
        r"|key must be a string|control character .*|invalid (escape|number|unicode).*",
        lambda _: "it is not JSON",
    ),
    # safetensors
    (r"header too (small|large)|invalid header (length|start)", lambda _: "its header is damaged"),
    (r"invalid UTF-8 in header.*", lambda _: "its header is not UTF-8 text"),
    (
        r"incomplete metadata.*|.*not fully covered.*",
        lambda _: "its size is not what its header says",
    ),
    (
        r"invalid shape, data type, or offset for tensor.*",
        lambda _: "its header gives a tensor more or fewer bytes than its shape takes",
    ),
    (r"No such file or directory.*", lambda _: "no such file or directory"),
    # gguf, by numpy
    (
        r"index -?\d+ is out of bounds.*|cannot reshape array.*|When changing to a larger dtype.*"
        r"|Maximum allowed dimension.*|buffer is smaller.*|array is too big.*",
        lambda _: "what its header says reaches beyond its end",
    ),
    (r"GGUF magic invalid.*", lambda _: "it does not begin like a GGUF file"),
    (
        r"np\.\w+\((.*)\) is not a valid GGML?\w*Type",
        lambda match: f"it has values of the unknown kind {match[1]}",
    ),
)


def plain_words(text: str) -> str:
    """A library's words as part of a sentence, without the names of its types.

    >>> plain_words("invalid type: sequence, expected u32 at line 1 column 9")
    'a list stands where a whole number belongs (line 1, column 9)'
    >>> plain_words("cannot reshape array of size 3792 into shape (8,589840)")
    'what its header says reaches beyond its end'
    >>> plain_words("some words of another kind")
    'some words of another kind'
    """
    in_header = text.startswith(_HEADER)
    core = text.removeprefix(_HEADER).removeprefix("invalid JSON in header: ")
    place = _PLACE.search(core)
    where = f" (line {place[1]}, column {place[2]})" if place and not in_header else ""
    core = _PLACE.sub("", core)
    for pattern, say in _RULES:
        if match := re.fullmatch(pattern, core, re.DOTALL):
            said = say(match)
            return f"its header: {said}" if "invalid JSON in header" in text else said + where
    return text


def _given(text: str) -> str:
    """What stands in a file, such as ``floating point `0.5```.

    >>> _given("floating point `0.5`"), _given("map"), _given('string "x"')
    ('the number 0.5', 'a table', 'the text "x"')
    """
    kind = next((each for each in _KINDS if text.startswith(each)), "")
    rest = text.removeprefix(kind).strip().strip("`")
    return f"{_KINDS[kind]} {rest}".strip() if kind else text


def _wanted(text: str) -> str:
    """What belongs there, such as ``usize`` or ``struct TensorInfo``.

    >>> _wanted("u32"), _wanted("a tuple of size 2"), _wanted("struct TensorInfo")
    ('a whole number', 'a list of 2', 'a table')
    """
    if _WHOLE.fullmatch(text):
        return "a whole number"
    if _REAL.fullmatch(text):
        return "a number"
    if text.startswith(("struct ", "internally tagged", "adjacently tagged")):
        return "a table"
    return _KINDS.get(text, text.replace("tuple of size", "list of"))
