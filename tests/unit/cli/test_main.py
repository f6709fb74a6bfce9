"""The frame: verbs, help, usage errors, exit codes; and that help loads nothing slow."""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from equipoise.base.errors import CheckError
from equipoise.cli import main as frame
from equipoise.cli.main import VERBS, main

SLOW = ("torch", "pydantic", "numpy", "rich")


NESTED = {f"explain {verb}": line for verb, line in frame.load("explain").VERBS.items()}
LINES = {verb: line for verb, line in VERBS.items() if verb != "explain"} | NESTED


@pytest.mark.parametrize("verb", LINES)
def test_every_verb_has_its_four_members(verb: str) -> None:
    module = frame.load(verb)
    assert LINES[verb] == module.HELP
    assert module.EXAMPLES.startswith("examples:\n")
    assert f"equipoise {verb}" in module.EXAMPLES
    assert callable(module.add_arguments)
    assert callable(module.run)


def loaded(argv: list[str]) -> set[str]:
    code = (
        "import sys\n"
        "from equipoise.cli.main import main\n"
        "try:\n"
        f"    main({argv!r}) if {argv!r} else None\n"
        "except SystemExit:\n"
        "    pass\n"
        f"print('slow:', *[name for name in {SLOW!r} if name in sys.modules])\n"
    )
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    print(f"{' '.join(argv) or 'import'}: {1e3 * (time.perf_counter() - started):.0f} ms")
    return set(done.stdout.splitlines()[-1].split()[1:])


@pytest.mark.long
@pytest.mark.parametrize(
    "argv",
    [
        *([], ["--help"], ["--version"], ["systems"], ["explain", "--help"]),
        *([*verb.split(), "--help"] for verb in LINES),
    ],
)
def test_help_loads_nothing_slow(argv: list[str]) -> None:
    assert loaded(argv) == set()


def test_the_overview_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    for verb, line in VERBS.items():
        assert f"  {verb:<{max(map(len, VERBS))}}  {line}\n" in out


def test_a_verbs_help_shows_its_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["systems", "--help"])
    out = capsys.readouterr().out
    assert "equipoise systems WLB-LLM        one of them: what it does" in out
    assert "List the published systems" in out
    assert "--json" in out
    assert "--quiet" in out


def test_no_verb_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("usage: equipoise VERB [ARGUMENTS]\n")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["trian"],
            f'equipoise: there is no verb "trian". Nearest: train. All: {", ".join(VERBS)}.',
        ),
        (["--versoin"], "equipoise: --versoin: no such flag. Nearest: --version"),
        (["systems", "--jsn"], "equipoise systems: --jsn: no such flag. Nearest: --json"),
        (["systems", "--js"], "equipoise systems: --js: no such flag. Nearest: --json"),
        (
            ["systems", "a", "b"],
            'equipoise systems: "b" is one argument too many. See "equipoise systems --help".',
        ),
        (
            ["init", "--path"],
            'equipoise init: --path: needs a value. See "equipoise init --help".',
        ),
        (
            ["config", "--steps", "3"],
            "equipoise config: --steps: no such flag. Nearest: --train.steps",
        ),
        (["config", "--shema"], "equipoise config: --shema: no such flag. Nearest: --schema"),
        (["config", "--train.step=3"], "--train.step: no such key. Nearest: --train.steps"),
        (
            ["config", "--train.steps"],
            'equipoise config: --train.steps needs a value. See "equipoise config --help".',
        ),
        (
            ["config", "--layout.pin", "--json"],
            'equipoise config: --layout.pin needs a value. See "equipoise config --help".',
        ),
    ],
)
def test_wrong_usage(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.err == f"{message}\n"
    as_json = json.dumps({"error": message, "exit_code": 2}) + "\n"
    assert captured.out == (as_json if "--json" in argv else "")


def stub(monkeypatch: pytest.MonkeyPatch, run: Callable[[argparse.Namespace], int]) -> None:
    module = SimpleNamespace(HELP="x", EXAMPLES="", add_arguments=lambda parser: None, run=run)
    monkeypatch.setattr(frame, "load", lambda verb: module)


def raising(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def run(args: argparse.Namespace) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (CheckError("2 of 3 cases differ."), 5, "2 of 3 cases differ.\n"),
        (KeyboardInterrupt(), 130, "Interrupted.\n"),
        (
            ModuleNotFoundError("no", name="torch"),
            1,
            "This needs torch, which is not installed. "
            'Install it: pip install "equipoise[train]"\n',
        ),
    ],
)
def test_errors_become_exit_codes(
    error: BaseException,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stub(monkeypatch, raising(error))
    assert main(["systems"]) == code
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    "error",
    [BrokenPipeError("a rank's pipe"), ModuleNotFoundError("no", name="equipoise.x"), KeyError()],
)
def test_mistakes_of_ours_are_not_hidden(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(monkeypatch, raising(error))
    with pytest.raises(type(error)):
        main(["systems"])


def test_a_reader_who_leaves_is_no_error() -> None:
    code = "import sys, equipoise.cli.main as m; sys.stdin.read(1); sys.exit(m.main(['systems']))"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == ""
        assert process.wait(240) == 141


def test_a_terminal_of_few_letters() -> None:
    argv = ["config", "--data.source", "text", "--data.path", "é"]
    done = subprocess.run(
        [sys.executable, "-m", "equipoise.cli.main", *argv],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert 'path = "\\xe9"' in done.stdout
