"""Commands of guides: judged without running them, and run as a user would."""

import subprocess
import sys

import pytest

from equipoise.cli.drill.commands import judge_command, run_command


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("report RUN --out page.html", ""),
        ("train run.toml --train.lr {half_lr} --layout.dp 2", ""),
        ("pack run.toml --ranks {ranks}", ""),
        ("explain attention --ranks 2", ""),
        ("dcotor", 'There is no verb "dcotor". Nearest: doctor.'),
        ("explain atention", 'explain has no verb "atention". Nearest: attention.'),
        ("trace RUN --step 3", "equipoise trace: --step: no such flag. Nearest: --steps"),
        ("pack --ranks two", "equipoise pack: --ranks: needs a whole number"),
        ("train --pack.polcy by-work", "--pack.polcy: no such key. Nearest: --pack.policy"),
        ("train --train.steps -3", "--train.steps: "),
        ("report", "equipoise report: needs RUN"),
    ],
)
def test_a_command_is_judged_by_the_verb_s_own_parser(words: str, fault: str) -> None:
    said = judge_command(words.split())
    assert said.startswith(fault) if fault else not said


def test_a_command_runs_and_its_exit_code_and_last_lines_are_kept() -> None:
    end = run_command(["systems", "StepFly"])
    assert end.exit_code == 0
    assert "StepFly" in end.output
    wrong = run_command(["systems", "no such system"])
    assert wrong.exit_code == 2
    assert "no such system" in wrong.output


def test_judging_commands_imports_no_torch() -> None:
    code = (
        "import sys; from equipoise.cli.drill.commands import judge_command as judge; "
        "judge(['train', 'run.toml', '--train.lr', '1']); judge(['doctor', 'RUN']); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
