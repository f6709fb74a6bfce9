"""`equipoise completion`: what a real bash completes, and which words each script holds."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from equipoise.cli import main as frame
from equipoise.cli.completion.words import read_words
from equipoise.cli.explain import verb as explain
from equipoise.spec.catalog import POLICIES
from equipoise.spec.run.keys import keys
from support.verbs import run

PRESS_TAB = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
_equipoise; printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bash's script, as the command prints it."""
    file = tmp_path_factory.mktemp("completion") / "equipoise.bash"
    command = [sys.executable, "-m", "equipoise.cli.main", "completion", "bash"]
    file.write_text(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return file


def tab(script: Path, *words: str) -> set[str]:
    """What bash offers for the last word."""
    command = ["bash", "--norc", "-c", PRESS_TAB, "bash", str(script), "equipoise", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return set(done.stdout.split())


def test_bash_completes_verbs(script: Path) -> None:
    assert tab(script, "") == set(frame.VERBS)
    assert tab(script, "tra") == {"train", "trace"}
    assert tab(script, "explain", "") == set(explain.VERBS)
    assert tab(script, "explain", "p") == {"pipeline", "plan"}


def with_prefix(start: str) -> set[str]:
    named = {f"--{name}" for name in keys() if name.startswith(start)}
    assert len(named) > 1
    return named


def test_bash_completes_flags_and_keys(script: Path) -> None:
    assert tab(script, "report", "--") == {"--help", "--out", "--json", "--quiet"}
    assert tab(script, "explain", "boxing", "--l") == {"--link"}
    assert tab(script, "train", "run.toml", "--train.s") == with_prefix("train.s")
    assert {f"--{name}" for name in keys()} <= tab(script, "train", "--")
    assert tab(script, "report", "--train") == set()  # a report takes no keys
    assert tab(script, "explain", "pipeline", "--layout.p") == with_prefix("layout.p")


def test_bash_completes_values_and_leaves_files_to_the_shell(script: Path) -> None:
    assert tab(script, "plan", "--export", "") == {"torchtitan", "megatron"}
    assert tab(script, "completion", "") == {"bash", "zsh", "fish"}
    assert tab(script, "train", "--train.precision", "") == {"fp32", "bf16", "fp8"}
    assert tab(script, "train", "--train.precision", "=", "b") == {"bf16"}
    assert tab(script, "train", "--layout.pin", "t") == {"true"}
    assert tab(script, "train", "ru") == set()
    assert tab(script, "train", "--out", "--") == set()  # a file's name
    assert "complete -o default -F _equipoise equipoise" in script.read_text()


def test_every_flag_of_every_parser_is_in_every_script(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = read_words()
    names = {verb.name for verb in words.verbs}
    below = {f"explain {name}" for name in frame.load("explain").VERBS}
    assert names == set(frame.VERBS) - {"explain"} | below
    for shell in ("bash", "zsh", "fish"):
        code, out, err = run(capsys, "completion", shell)
        assert (code, err) == (0, "")
        for verb in words.verbs:
            assert {"--help", "--json", "--quiet"} <= {flag.name for flag in verb.flags}
            for flag in verb.flags:
                mark = f"-l {flag.name.removeprefix('--')} " if shell == "fish" else flag.name
                assert mark in out, (shell, verb.name)
    code, out, _ = run(capsys, "completion", "bash", "--json")
    shown = json.loads(out)
    assert shown["keys"] == [f"--{name}" for name in keys()]
    assert "--plan" in shown["verbs"]["train"]


def test_values_of_a_key_are_those_of_its_type() -> None:
    values = {key.name: key.values for key in read_words().keys}
    assert values["--train.precision"] == ("fp32", "bf16", "fp8")
    assert values["--train.steps"] == ()
    assert set(values["--pack.policy"]) <= set(POLICIES)


ZSH_TAB = """
compdef() { : }
compadd() { shift; print -l -- ${(M)@:#$words[CURRENT]*} }
_files() { print files }
source $1; shift
words=(equipoise "$@"); CURRENT=$#words
_equipoise
"""


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_completes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "_equipoise"
    file.write_text(run(capsys, "completion", "zsh")[1])

    def press(*words: str) -> set[str]:
        command = ["zsh", "-f", "-c", ZSH_TAB, "zsh", str(file), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return set(done.stdout.split())

    assert press("tra") == {"train", "trace"}
    assert press("explain", "p") == {"pipeline", "plan"}
    assert press("plan", "--export", "") == {"torchtitan", "megatron"}
    assert press("train", "--train.s") == with_prefix("train.s")
    assert press("report", "runs/") == {"files"}


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_completes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "equipoise.fish"
    file.write_text(run(capsys, "completion", "fish")[1])
    command = (
        f"source {file}; complete -C 'equipoise explain p'; complete -C 'equipoise plan --expo'"
    )
    done = subprocess.run(["fish", "-c", command], capture_output=True, text=True, check=True)
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == [
        "pipeline",
        "plan",
        "--export",
    ]
