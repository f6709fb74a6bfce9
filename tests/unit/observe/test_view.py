"""The view of rank 0 off a terminal: sentences, until nobody reads them."""

import io
import sys
from unittest import mock

import pytest

from equipoise.observe.console import make_view


def test_sentences_are_printed_by_rank_0_alone(capsys: pytest.CaptureFixture[str]) -> None:
    make_view("by-work", rank=0, steps=2, done=0, quiet=False).say("one")
    make_view("by-work", rank=1, steps=2, done=0, quiet=False).say("two")
    make_view("by-work", rank=0, steps=2, done=0, quiet=True).say("three")
    assert capsys.readouterr().out == "one\n"


def test_a_name_that_the_stream_cannot_show_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(held, encoding="ascii"))
    make_view("by-work", rank=0, steps=2, done=0, quiet=False).say("café.txt \udcff")
    assert held.getvalue() == b"caf\\xe9.txt \\udcff\n"


def test_a_reader_who_leaves_does_not_end_the_run() -> None:
    view = make_view("by-work", rank=0, steps=2, done=0, quiet=False)
    with mock.patch.object(sys, "stdout") as stdout:
        stdout.write.side_effect = BrokenPipeError
        view.say("one")
        view.say("two")
        assert stdout.write.call_count == 1
