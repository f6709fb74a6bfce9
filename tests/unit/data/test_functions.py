"""The standard library's functions as documents."""

import ast
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.base.errors import DataError
from equipoise.data.functions import WHOLE_BYTES, split_module
from equipoise.data.source import open_source
from equipoise.spec.run.spec import DataSpec

MODULE = '''\
"""A module."""
import os

@cache
@other(1)
def decorated():
    def inner():
        pass
    return inner

class A:
    x = 1

    async def method(self):
        """Text
    of two lines."""

    class B:
        def deep(self): return 1
\x0c
if os.name == "nt":
    def branch(): pass
else:
    try:
        def tried(): pass
    except OSError:
        def caught(): pass
'''


def test_each_function_is_a_document_with_its_decorators():
    documents = list(split_module(MODULE))
    assert [line for line, _ in documents] == [4, 14, 19, 22, 25, 27]
    assert documents[0][1] == (
        "@cache\n@other(1)\ndef decorated():\n    def inner():\n        pass\n    return inner\n"
    )
    assert documents[1][1].startswith('async def method(self):\n    """Text\nof two lines."""\n')
    assert documents[2][1] == "def deep(self): return 1\n"
    for _, text in documents:
        assert len(ast.parse(text).body) == 1


def test_a_module_of_about_one_window_is_one_document():
    function = "def f():\n    return 1\n"
    for size in (WHOLE_BYTES[0], WHOLE_BYTES[-1]):
        text = function + "#" * (size - len(function))
        assert list(split_module(text)) == [(1, text)]
    for size in (WHOLE_BYTES[0] - 1, WHOLE_BYTES[-1] + 1):
        text = function + "#" * (size - len(function))
        assert list(split_module(text)) == [(1, function)]


def test_modules_without_functions_and_those_that_do_not_parse_have_no_documents():
    for text in ("", "x = 1\n", "def f(:\n", "print 1\n", "\0"):
        assert list(split_module(text)) == []


@pytest.mark.parametrize("end", ["\r\n", "\r"])
def test_line_ends_of_any_system(end):
    assert list(split_module(MODULE.replace("\n", end))) == list(split_module(MODULE))


@given(st.text(max_size=60))
def test_any_text_is_split_or_passed_over(text):
    for line, document in split_module(f"def f():\n    {text!r}\n{text}"):
        assert line >= 1
        assert textwrap.dedent(document) == document


def test_the_corpus_is_this_pythons_library_without_its_tests():
    source = open_source(DataSpec(source="python-functions"), Path("nowhere"))
    assert source.name == "python-functions " + ".".join(map(str, sys.version_info[:3]))
    assert "json/decoder.py" in source.names
    assert not any({"test", "tests"} & set(name.split("/")) for name in source.names)
    shards = [s for s in source.shards() if any("dataclasses.py" in p.name for p in s.parts)]
    documents = [each for shard in shards for each in shard.documents()]
    whole = [each for each in documents if source.names[each.file] == "dataclasses.py"]
    assert [(each.row, each.text) for each in whole] == [
        (1, Path(source.root / "dataclasses.py").read_text())
    ]
    assert documents == [each for shard in shards for each in shard.documents()]


def test_it_reads_no_path(tmp_path):
    with pytest.raises(DataError) as caught:
        open_source(DataSpec(source="python-functions", path="x"), tmp_path)
    assert str(caught.value) == (
        'data.path is "x" but data.source is "python-functions", which reads no path. Set '
        'data.source to "text", "jsonl", "parquet" or "datasets", or remove data.path.'
    )
