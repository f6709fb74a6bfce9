"""``equipoise explain``: its verbs, and the forms of 0.1, which print what they printed."""

from pathlib import Path

import pytest

from equipoise.cli.explain.verb import VERBS
from equipoise.cli.main import main


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["explain", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_alone_it_lists_its_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capsys)
    assert (code, out) == (2, "")
    assert err.startswith("usage: equipoise explain VERB [ARGUMENTS]\n")
    for verb, line in VERBS.items():
        assert f"  {verb:<9}  {line}\n" in err
    assert '"equipoise explain VERB --help" shows the arguments of a verb' in err
    with pytest.raises(SystemExit):
        main(["explain", "--help"])
    assert capsys.readouterr().out == err


@pytest.mark.parametrize(
    ("verb", "own", "not_own"),
    [
        ("attention", "--ranks-per-node", "--most-held"),
        ("pipeline", "--most-held", "--mask"),
        ("boxing", "--mesh", "--strategy"),
        ("plan", "plan.lock", "--link"),
    ],
)
def test_each_has_its_own_flags_alone(
    verb: str, own: str, not_own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["explain", verb, "--help"])
    out = capsys.readouterr().out
    assert f"examples:\n  equipoise explain {verb}" in out
    assert own in out
    assert not_own not in out


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["--attention", "--model", "2m", "--json"], ["attention", "--model", "2m", "--json"]),
        (["--strategy", "rsa", "--attention"], ["attention", "--strategy", "rsa"]),
        (["--schedule", "--layout.dp", "2"], ["pipeline", "--layout.dp", "2"]),
        (["--boxing", "P -> B", "--mesh", "4"], ["boxing", "P -> B", "--mesh", "4"]),
        (["--mesh", "4", "--boxing=P -> B"], ["boxing", "--mesh", "4", "P -> B"]),
        (["--experts", "--ranks", "4", "--json"], ["experts", "--ranks", "4", "--json"]),
        (["--tables", "criteo-kaggle", "--json"], ["tables", "criteo-kaggle", "--json"]),
    ],
)
def test_old_forms_are_taken_with_a_line(
    old: list[str], new: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    flag = next(
        word for word in old if word[2:8] in ("attent", "schedu", "boxing", "expert", "tables")
    )
    line = f"equipoise explain {flag.partition('=')[0]} is now equipoise explain {new[0]}; "
    code, out, err = said(capsys, *old)
    assert (code, err) == (0, f"{line}0.2 drops the old form.\n")
    assert said(capsys, *new) == (0, out, "")


def test_an_old_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "plan.lock")
    code, out, err = said(capsys, "plan", missing)
    assert (code, out) == (4, "")
    assert said(capsys, "--plan", missing) == (
        4,
        "",
        f"equipoise explain --plan is now equipoise explain plan; 0.2 drops the old form.\n{err}",
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["atention"],
            'equipoise explain: there is no verb "atention". Nearest: attention. All: attention, '
            "pipeline, boxing, traffic, experts, items, tables, towers, plan.",
        ),
        (
            ["--attention", "--boxing", "P -> B"],
            "equipoise explain: --attention and --boxing are verbs of their own. Give one: "
            "equipoise explain attention or equipoise explain boxing.",
        ),
        (["--jsn"], "equipoise explain: --jsn: no such flag. Nearest: --version"),
    ],
)
def test_what_is_refused(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, *argv) == (2, "", f"{message}\n")
