"""Progress and colour, on a terminal and off one."""

import io
import re

import pytest

from equipoise.cli.console import StageProgress, make_console, make_progress


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def use(progress: StageProgress, done: int) -> None:
    progress.start("tokenize books", 8)
    progress.advance(done - 1)
    progress.advance()
    progress.finish()


def test_off_a_terminal_a_stage_is_one_line() -> None:
    file = io.StringIO()
    use(StageProgress(file=file), 8)
    assert re.fullmatch(r"tokenize books: done in \d+\.\d ms\n", file.getvalue())


def test_a_stage_that_fails_says_how_far_it_came() -> None:
    file = io.StringIO()
    use(StageProgress(file=file), 2)
    assert re.fullmatch(r"tokenize books: stopped at 25% after \d+\.\d ms\n", file.getvalue())


def test_off_a_terminal_a_long_stage_says_every_half_minute_how_far_it_is() -> None:
    file, seconds = io.StringIO(), iter([0.0, 29.0, 31.0, 31.0, 40.0, 61.0, 61.0, 70.0])
    progress = StageProgress(file=file, clock=lambda: next(seconds))
    progress.start("read 8 tokens", 8)
    for _ in range(4):
        progress.advance(2)
    progress.finish()
    assert file.getvalue() == (
        "read 8 tokens: 50% after 31.00 s\n"
        "read 8 tokens: 100% after 1 min 1 s\n"
        "read 8 tokens: done in 1 min 10 s\n"
    )


def test_quiet_is_silent() -> None:
    for file in (io.StringIO(), Terminal()):
        use(StageProgress(quiet=True, file=file), 8)
        assert file.getvalue() == ""


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    file = Terminal()
    use(StageProgress(file=file), 8)
    assert "tokenize books" in file.getvalue()
    assert "100%" in file.getvalue()


def test_progress_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    use(make_progress(), 8)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("tokenize books: done in ")


def test_no_colour_off_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    file = io.StringIO()
    make_console(file=file).print("[b] 12", style="bold red")
    assert file.getvalue() == "[b] 12\n"


def test_a_quiet_console_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    make_console(quiet=True).print("x")
    make_console().print("y")
    assert capsys.readouterr().out == "y\n"
