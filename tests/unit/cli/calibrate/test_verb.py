"""``equipoise calibrate``: what it covers, what it refuses, how a run corrects the curves."""

import re
from pathlib import Path

import numpy as np
import pytest

from equipoise.cli.calibrate.table import file_rows, print_comparison, print_file
from equipoise.cli.main import main
from equipoise.cost.compare import CurveComparison, Factor, fitted
from equipoise.spec.run.load import read_run
from equipoise.train.calibrate.plan import CalibrationPlan
from support.device_files import A_FILE

COMPARISON = CurveComparison(
    steps=8,
    ranks=2,
    compute_predicted_s=2.0,
    compute_measured_s=2.6,
    step_errors=np.array([-0.25, -0.2]),
    optimizer_predicted_s=0.01,
    optimizer_measured_s=0.02,
    curves=(
        Factor("products", 1.0, 1.02, 0.97, 1.06),
        Factor("attention", 0.8, 1.5, 1.4, 1.6),
        Factor("moves", 0.2, 1.0, 0.8, 1.2),
    ),
    is_told_apart=False,
)


def test_the_sizes_of_a_run_are_covered() -> None:
    plan = CalibrationPlan.for_run(read_run(None, []))
    assert (plan.rows[-1], plan.widths[-1], plan.doc_tokens[-1]) == (16_384, 4096, 8192)
    long = CalibrationPlan.for_run(
        read_run(None, [("pack.context_tokens", "32768"), ("model.preset", "smollm2-135m")])
    )
    assert (long.rows[-1], long.widths[-1], long.doc_tokens[-1]) == (65_536, 4096, 32_768)
    assert long.head_widths == (32, 64)


def test_what_was_measured_is_shown_with_its_intervals(capsys) -> None:
    print_file(A_FILE, Path("lab.json"))
    text = capsys.readouterr().out
    assert "Abacus, 2 cores: measured in 42 s on every core at once, with 0.5 cores" in text
    assert "Measure again on a quiet machine." in text.replace("\n", " ")
    assert re.search(r"memory, triad +12\.00 GB/s +11\.76 to 12\.36", text)
    assert "8 products, 2 attentions and 10 collectives are in lab.json" in text
    rows = file_rows(A_FILE)
    assert rows["stream_bytes_per_s"]["triad"] == {"median": 12e9, "low": 11.76e9, "high": 12.36e9}
    assert rows["points"] == {"gemm": 8, "attention": 2, "collectives": 10}


def test_a_comparison_names_the_wrong_curve(capsys) -> None:
    print_comparison(COMPARISON, Path("runs/x"), Path("lab.json"), is_fitted=True)
    text = capsys.readouterr().out
    assert re.search(r"attention, fitted +800\.0 ms +1\.20 s +1\.50 +1\.40 to 1\.60", text)
    assert re.search(r"forward and backward +2\.00 s +2\.60 s +1\.30", text)
    assert "predicted to within 22.5% on average" in text
    assert "Products and moves rise together" in text
    assert "The curve of attention is wrong: this run took 1.50 times what it predicts" in text
    assert "The factors are kept in lab.json" in text
    assert COMPARISON.as_row()["wrong"] == "attention"


def test_fitting_twice_multiplies() -> None:
    once = fitted(A_FILE, COMPARISON)
    assert dict(once.residuals) == {"products": 1.02, "attention": 1.5, "moves": 1.0}
    assert dict(fitted(once, COMPARISON).residuals)["attention"] == pytest.approx(2.25)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--compare", "a", "--fit", "b"],
            "--compare and --fit exclude each other: --fit shows the comparison too.",
        ),
        (
            ["--fit", "runs/x", "--train.steps", "5"],
            "--fit runs/x measures nothing, so a run.toml, its keys and --plot say nothing to it. "
            "Leave them out.",
        ),
        (
            ["--plot", "curves.txt"],
            '--plot curves.txt: a picture\'s name ends in .png, .svg or .pdf, not ".txt". Try '
            "curves.png.",
        ),
        (
            ["--plot", "nowhere/curves.png"],
            "--plot nowhere/curves.png: there is no folder nowhere. Create it first.",
        ),
        (
            ["--out", "/proc/lab.json"],
            "--out: no file can be written in /proc: no such file or directory. Give one in "
            "another folder.",
        ),
    ],
)
def test_arguments_that_do_not_go_together(arguments: list[str], message: str, capsys) -> None:
    assert main(["calibrate", *arguments]) == 2
    assert capsys.readouterr().err == message + "\n"


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "lab" / "this.json"
    assert main(["calibrate", "--out", str(out)]) == 2
    assert capsys.readouterr().err == (
        f"--out: the folder {out.parent} cannot be made: not a directory.\n"
    )


def test_comparing_needs_a_device_file(tmp_path: Path, capsys) -> None:
    file = tmp_path / "none.json"
    assert main(["calibrate", "--compare", "runs/x", "--out", str(file)]) == 2
    assert capsys.readouterr().err == (
        f'No such device file: {file}. Measure again: "equipoise calibrate".\n'
    )
