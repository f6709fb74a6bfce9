"""Whatever the bytes of a file, a reader meets OSError or ValueError, with a reason of one line."""

import json
import os
import pwd
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.base.errors import SpecError
from equipoise.base.read import (
    parse_json,
    parse_toml,
    read_bytes,
    read_json,
    read_text,
    user_path,
)

DEEP = "brackets are nested more than 64 deep"
LONG = "a whole number has more digits than 64 bits hold"


def reason_of(read: Callable[[], object]) -> str:
    try:
        read()
    except OSError as error:
        return str(error.strerror)
    except ValueError as error:
        return str(error)
    return "read"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000, DEEP),
        ("[" * 500 + "]" * 500, DEEP),
        ('{"a":' * 65 + "1" + "}" * 65, DEEP),
        ("9" * 5000, LONG),
        ('{"a": [1, ' + "9" * 30 + "]}", LONG),
        ("[" + "9" * 5000 + "," + "[" * 100_000, DEEP),
        (b'"\xff"', "it is not UTF-8 text"),
        ("", "it is not JSON at line 1, column 1: expecting value"),
    ],
)
def test_json_that_nobody_means(text: str | bytes, reason: str) -> None:
    assert reason_of(lambda: parse_json(text)) == reason


def test_a_key_that_must_stand_once() -> None:
    twice = '[{"a": 1}, {"b": {"\\u00e9": 1, "c": 2, "é": 3}}]'
    words = 'an object in it has "\\u00e9" twice; give it once'
    assert reason_of(lambda: parse_json(twice, once=True)) == words
    assert parse_json(twice)[1] == {"b": {"é": 3, "c": 2}}
    assert parse_json('[{"a": 1}, {"a": 2}]', once=True) == [{"a": 1}, {"a": 2}]
    assert reason_of(lambda: parse_json("9" * 5000, once=True)) == LONG
    assert reason_of(lambda: parse_json('{"a":' * 500 + "1" + "}" * 500, once=True)) == DEEP


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a = " + "[" * 100_000, DEEP),
        ("a = " + "[" * 100 + "]" * 100, DEEP),
        ("a" + ".a" * 100 + " = 1", DEEP),
        ("a = " + "9" * 5000, LONG),
        ("a = 0x" + "f" * 5000, LONG),
    ],
)
def test_toml_that_nobody_means(text: str, reason: str) -> None:
    assert reason_of(lambda: parse_toml(text)) == reason


def test_what_is_sane_is_read(tmp_path: Path) -> None:
    value = {"a": [[0] * 200, 2**64 - 1, -(2**63), 1e300], "b": "9" * 100}
    file = tmp_path / "a.json"
    file.write_text(json.dumps(value))
    assert read_json(file) == value
    assert parse_toml("a = 0xff\nb = [[1]]") == {"a": 255, "b": [[1]]}


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reasons = {
        tmp_path / "pipe": "It is a pipe, a socket or a device, not a file",
        Path("/dev/zero"): "It is a pipe, a socket or a device, not a file",
        tmp_path / "a\0b": "The name has a character that no file name can have",
        tmp_path / "\ud800": "The name has a character that no file name can have",
        tmp_path: "Is a directory",
        tmp_path / "none": "No such file or directory",
    }
    for path, reason in reasons.items():
        assert reason_of(lambda path=path: read_bytes(path)) == reason


def test_homes_and_names_that_only_look_like_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert user_path("~/a") == Path.home() / "a"
    assert user_path("~$cat.png") == Path("~$cat.png")
    assert user_path("a/~/b") == Path("a/~/b")
    assert user_path("") == Path()
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # a container's user without a name
    with pytest.raises(SpecError) as caught:
        user_path("~/a")
    assert str(caught.value) == (
        f"~/a begins in a home folder, and this system knows none for user {os.getuid()}. Set "
        f"HOME, or give a path without ~."
    )


def test_the_pipe_of_a_shell_is_read() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"[3]")
    os.close(writer)
    assert read_json(Path(f"/dev/fd/{reader}")) == [3]
    os.close(reader)


def test_the_line_that_is_not_utf8(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"a\nb\n\xff")
    assert reason_of(lambda: read_text(file)) == "it is not UTF-8 text: line 3"


@given(st.binary(max_size=200) | st.text('[]{}",:0123456789-.eE\\u \n', max_size=200))
def test_nothing_else_is_raised(data: bytes | str) -> None:
    for parse in (parse_json, lambda text: parse_toml(str(text))):
        try:
            parse(data)
        except ValueError as error:
            assert str(error).splitlines()
