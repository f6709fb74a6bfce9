"""Verbs, run in this process: their exit code, and what they wrote to stdout and stderr."""

import pytest

from equipoise.cli.main import main


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = main([*map(str, argv)])
    caught = capsys.readouterr()
    return code, caught.out, caught.err


def plan(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    return run(capsys, "plan", *argv)
