"""``equipoise explain towers``: a line for run.toml, beside random towers."""

import json
import statistics
from pathlib import Path

import pytest

from equipoise.cli.main import main
from equipoise.recsys.samples import read_samples
from equipoise.recsys.towers.probe import measure_similarity
from equipoise.spec.recommend import read_recommend
from support.recsys.clicks import write_clicks


def test_its_line_is_a_run_that_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_toml = write_clicks(tmp_path)
    assert main(["explain", "towers", str(run_toml), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert sorted(name for tower in answer["towers"] for name in tower) == ["ad", "user", "words"]
    assert answer["likeness"] >= statistics.mean(answer["random_likeness"])
    assert main(["explain", "towers", str(run_toml), "--quiet"]) == 0
    line = capsys.readouterr().out
    assert line == f"towers = {json.dumps(answer['towers'])}\n"
    run_toml.write_text(run_toml.read_text().replace("top = [8]", f"top = [8]\n{line}"))
    assert read_recommend(run_toml)[0].model.towers == tuple(map(tuple, answer["towers"]))
    assert main(["explain", "towers", str(run_toml)]) == 0  # towers of its own are no matter
    text = capsys.readouterr().out
    assert "3 columns in 2 coherent towers, by what an epoch" in text
    assert line in text


def test_likeness_is_the_mean_size_of_the_cosine(tmp_path: Path) -> None:
    spec, base = read_recommend(write_clicks(tmp_path))
    alike = measure_similarity(spec, read_samples(spec.data, base))
    assert alike.shape == (3, 3)
    assert (alike == alike.T).all()
    assert alike[0, 0] == pytest.approx(1.0)
    assert alike[2, 2] < 1  # a third of the bags of words are empty
    assert ((alike >= 0) & (alike <= 1 + 1e-12)).all()


WRONG = [
    (["--towers", "4"], "3 features cannot fill 4 towers, each with one at least. Give from 1 to "),
    (["--towers", "0"], "--towers 0 is below 1. Give 1 or more."),
    (["--goal", "alike"], '--goal: "alike" is not one of coherent, diverse.'),
    (
        ["--model.kind", "language"],
        'equipoise explain towers is for a run with model.kind = "recommend". Give its run.toml.',
    ),
]


@pytest.mark.parametrize(("flags", "message"), WRONG)
def test_wrong_flags_are_refused(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "towers", str(write_clicks(tmp_path)), *flags]) == 2
    assert capsys.readouterr().err.startswith(message)
