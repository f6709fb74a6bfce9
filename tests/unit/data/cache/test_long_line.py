"""A long line of JSON holds what the ordinary parser reads, and is refused where that refuses."""

import json
from io import BytesIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.base.read import parse_json
from equipoise.data.cache import long_line
from equipoise.data.cache.long_line import parse_long_line, read_line, skip_line

TEXTS = st.one_of(
    st.text(),
    st.text('\\"/u0dDeE8aA{}[],:\n\t é漢😀\x7f'),
    st.text(st.characters(categories=("Cs",)) | st.sampled_from('a\\"')),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
    max_leaves=12,
)
ROWS = st.dictionaries(TEXTS, VALUES, max_size=4)
SIZES = st.integers(1, 9)


def whole(value: Any, strings: dict[str, long_line.LongString]) -> Any:
    """The value with every long string put back, keys too, and halves of pairs joined."""
    if isinstance(value, str) and value in strings:
        pieces = list(strings[value].pieces())
        assert all(pieces)
        return "".join(pieces).encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    if isinstance(value, dict):
        return {whole(key, strings): whole(each, strings) for key, each in value.items()}
    return [whole(each, strings) for each in value] if isinstance(value, list) else value


def parse(line: bytes, long_bytes: int, piece_bytes: int) -> Any:
    return whole(*parse_long_line(bytearray(line), long_bytes=long_bytes, piece_bytes=piece_bytes))


def same(one: Any, other: Any) -> bool:
    """Equal, and NaN equal to itself."""
    return repr(one) == repr(other)


@given(ROWS, SIZES, SIZES, st.booleans())
def test_the_values_are_those_of_the_ordinary_parser(row, long_bytes, piece_bytes, plain) -> None:
    try:
        line = json.dumps(row, ensure_ascii=not plain).encode()
    except UnicodeEncodeError:  # halves of pairs, which only an escape can write
        line = json.dumps(row).encode()
    assert same(parse(line, long_bytes, piece_bytes), parse_json(line))


@given(ROWS, SIZES, SIZES, st.data())
def test_a_damaged_line_is_refused_by_both_or_by_neither(
    row, long_bytes, piece_bytes, data
) -> None:
    line = bytearray(json.dumps(row).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(line)))
        stop = data.draw(st.integers(at, min(at + 3, len(line))))
        line[at:stop] = data.draw(st.binary(max_size=2) | st.sampled_from([b'"', b"\\", b"\\u"]))
    said: list[Any] = []
    for read in (
        lambda: parse(bytes(line), long_bytes, piece_bytes),
        lambda: parse_json(bytes(line).decode()),
    ):
        try:
            value = read()
            said.append([] if isinstance(value, list) else value)  # a list is not read through
        except ValueError:
            said.append(ValueError)
    if line.lstrip(b" \t\r\n").startswith(b"["):
        assert said[0] == []
    else:
        assert same(*said)


FAULTS = {
    "an escape that is none": (b'{"a": "0123456789\\x"}', "Invalid \\escape"),
    "a control character": (b'{"a": "01234\x01"}', "Invalid control character at"),
    "half an escape": (b'{"a": "01234\\u12"}', "Invalid \\uXXXX escape"),
    "behind a long string": (b'{"a": "0123456789", b}', "Expecting property name"),
    "behind letters of several bytes": ('{"é": "éééééééé", b}'.encode(), "Expecting property name"),
    "torn": (b'{"a": "0123456789', "Unterminated string"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_columns_are_those_of_the_whole_line(case: str) -> None:
    line, words = FAULTS[case]
    with pytest.raises(json.JSONDecodeError) as ordinary:
        json.loads(line)
    with pytest.raises(json.JSONDecodeError) as ours:
        parse(line, 5, 4)
    assert ours.value.msg.startswith(words)
    assert (ours.value.msg, ours.value.colno) == (ordinary.value.msg, ordinary.value.colno)


@pytest.mark.parametrize(
    "line", [b'{"a": "01234567\xff89"}', b'{"\xff": 1}', b'{"a": "012345\xc3"}']
)
def test_bytes_that_are_not_utf8_are_at_their_place(line: bytes) -> None:
    with pytest.raises(UnicodeDecodeError) as ordinary:
        line.decode()
    with pytest.raises(UnicodeDecodeError) as ours:
        parse(line, 5, 4)
    assert ours.value.start == ordinary.value.start
    assert ours.value.object[ours.value.start] == line[ordinary.value.start]


def test_only_long_lines_are_held_apart() -> None:
    data = b"1234567\n1234567890\n\nlast line"
    file, lines = BytesIO(data), []
    while line := read_line(file, 8):
        lines.append(line)
    assert lines == [b"1234567\n", b"1234567890\n", b"\n", b"last line"]
    assert [type(line) for line in lines] == [bytes, bytearray, bytes, bytearray]
    file = BytesIO(data)
    skip_line(file, 8)
    skip_line(file, 8)
    assert file.read() == b"\nlast line"
