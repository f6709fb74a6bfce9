import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from equipoise.base.errors import DataError, SpecError
from equipoise.cli import report as verb
from equipoise.dash import figures
from equipoise.dash.report import read_runs, render, write_report
from equipoise.observe.reader import read_run


def embedded(page: str) -> dict:
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert text is not None
    return json.loads(text[1])


def test_one_file_with_everything_in_it(runs: dict[str, Path], tmp_path: Path) -> None:
    out = write_report([runs["in-order"], runs["by-work"]], tmp_path / "new" / "report.html")
    page = out.read_text(encoding="utf-8")
    assert out == tmp_path / "new" / "report.html"
    assert "{{" not in page and "default-src 'none'" in page
    addresses = set(re.findall(r"https?://[^\"'\s]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, which nobody fetches
    data = embedded(page)
    assert [run["label"] for run in data["runs"]] == ["in-order", "by-work"]
    assert f"<h1>{data['headline']}</h1>" in page


def test_a_report_depends_on_the_runs_alone(runs: dict[str, Path]) -> None:
    def page() -> str:
        return render(figures.page_data(read_runs([runs["by-work"]])))

    assert page() == page()


def test_hostile_names_stay_data(journals: ModuleType, tmp_path: Path) -> None:
    name = "</script><script>alert(1)</script><!--{{script}}"
    run = journals.write_run(tmp_path / "run", steps=3, name=name, policy="<b>&")
    page = write_report([run], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "alert(1)</script>" not in page and page.count("<script") == 2
    assert "<title>equipoise report: &lt;b&gt;&amp;</title>" in page
    row = next(row for row in embedded(page)["configuration"] if row["key"] == "name")
    assert row["values"] == [name]


def test_every_number_of_a_short_run_is_on_the_page(runs: dict[str, Path]) -> None:
    record = read_run(runs["by-work"])
    (run,) = figures.page_data([record])["runs"]
    assert len(run["lines"]["loss"]["x"]) == 40 and run["lines"]["loss"]["steps_a_point"] == 1
    assert run["bars"]["step"] == list(range(1, 41))
    skews = record.in_order_skew
    typical = run["bars"]["typical"]
    assert sorted(skews.tolist()).index(skews[typical]) == 19  # the lower median of 40
    spans = run["timeline"]
    assert [len(rank["t"]) for rank in spans["ranks"]] == [each.name.size for each in record.spans]
    assert not any(step["is_before_gap"] for step in spans["steps"])
    first = record.spans[1]
    assert spans["names"][spans["ranks"][1]["name"][3]] == first.names[first.name[3]]
    assert spans["ranks"][1]["d"][3] == round(first.duration_s[3] * 1e6)


def test_a_long_run_is_drawn_by_samples_that_say_so(journals: ModuleType, tmp_path: Path) -> None:
    record = read_run(journals.write_run(tmp_path / "run", steps=900, ranks=3))
    (run,) = figures.page_data([record])["runs"]
    line = run["lines"]["measured_skew"]
    assert len(line["x"]) == 180 <= figures.LINE_POINTS and line["steps_a_point"] == 5
    busy = record.busy_s.max(axis=1) / record.busy_s.mean(axis=1)
    assert max(line["high"]) == pytest.approx(busy.max(), rel=1e-5)  # no spike is lost
    assert min(line["low"]) == pytest.approx(busy.min(), rel=1e-5)
    spans = run["timeline"]
    steps = [each["step"] for each in spans["steps"]]
    assert spans["of"] == 900 and len(steps) == figures.WHOLE_STEPS
    assert steps[0] == 1 and steps[-12:] == list(range(889, 901))
    gaps = [each["is_before_gap"] for each in spans["steps"]]
    assert gaps[:3] == [True] * 3 and gaps[-12:] == [False] * 12
    assert len(json.dumps(run)) < 600_000


def test_many_ranks_are_drawn_by_samples(journals: ModuleType, tmp_path: Path) -> None:
    record = read_run(journals.write_run(tmp_path / "run", steps=4, ranks=100))
    (run,) = figures.page_data([record])["runs"]
    assert len(run["ranks_drawn"]) == len(run["bars"]["busy_s"][0]) == figures.RANKS
    assert [rank["rank"] for rank in run["timeline"]["ranks"]] == run["ranks_drawn"]
    assert run["timeline"]["ranks_of"] == 100


def test_loading_at_a_step_is_not_part_of_it(runs: dict[str, Path], tmp_path: Path) -> None:
    record = read_run(runs["by-work"])
    extents = figures.page_data([record])["runs"][0]["timeline"]["steps"]
    folder = tmp_path / "run" / "journal"
    folder.mkdir(parents=True)
    for path in (runs["by-work"] / "journal").iterdir():
        (folder / path.name).write_text(path.read_text())
    late = {
        "v": 1, "kind": "span", "name": "load", "t": record.t[-1] + 60, "rank": 1,
        "duration_s": 5.0, "step": 20,
    }  # fmt: skip
    with (folder / "rank-00001.jsonl").open("a") as journal:
        journal.write(json.dumps(late) + "\n")
    assert (
        figures.page_data([read_run(tmp_path / "run")])["runs"][0]["timeline"]["steps"] == extents
    )


def test_notes_come_before_figures(journals: ModuleType, tmp_path: Path) -> None:
    run = journals.write_run(tmp_path / "run", steps=3, stop=False)
    fault = {
        "v": 1, "kind": "fault", "name": "nan-loss", "t": 0.0, "rank": 1, "step": 3,
        "message": "The loss is NaN.",
    }  # fmt: skip
    with (run / "journal" / "rank-00001.jsonl").open("a") as journal:
        journal.write(json.dumps(fault) + '\n{"v": 1, "ki')
    assert [note["text"] for note in figures.page_data([read_run(run)])["notes"]] == [
        "by-work: nan-loss on rank 1 at step 3. The loss is NaN.",
        f"by-work: to find out why, equipoise drill --runbook number-gone-bad {run}",
        "by-work has no stop event: it is still running after step 3, or was killed.",
        "by-work: 1 journal line(s) were torn by a kill and are not shown.",
    ]


def test_a_run_without_steps_has_a_page(journals: ModuleType, tmp_path: Path) -> None:
    run = journals.write_run(tmp_path / "run", steps=0, stop=False)
    data = embedded(write_report([run], tmp_path / "report.html").read_text())
    assert data["headline"] == "by-work has not finished a step yet."
    assert data["runs"][0]["timeline"]["steps"] == []


def test_configuration_says_where_each_value_came_from(runs: dict[str, Path]) -> None:
    records = read_runs([runs["in-order"], runs["by-work"]])
    rows = {row["key"]: row for row in figures.page_data(records)["configuration"]}
    assert rows["pack.policy"] == {
        "key": "pack.policy",
        "values": ["in-order", "by-work"],
        "origins": ["--pack.policy", "--pack.policy"],
        "differs": True,
        "is_unsaid": False,
    }
    assert rows["layout.pin"]["values"] == ["false", "false"] and rows["layout.pin"]["is_unsaid"]
    assert rows["data.path"]["values"][0] == '""'
    # A size that run.toml leaves to the preset is shown as the preset has it.
    assert rows["model.layers"]["values"] == ["6", "6"]
    assert rows["model.layers"]["origins"] == ["preset 7m", "preset 7m"]
    assert rows["model.layers"]["is_unsaid"] and not rows["train.steps"]["is_unsaid"]
    assert rows["pack.max_tokens"]["values"] == ["—", "—"]


def test_errors_are_whole_sentences(runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(SpecError) as none:
        write_report([], tmp_path / "report.html")
    assert str(none.value) == "There is no run to report on. Give one or more run folders."
    run = runs["by-work"]
    with pytest.raises(SpecError) as twice:
        write_report([run, run / "." / ""], tmp_path / "report.html")
    assert str(twice.value) == f"{run} is given twice. Give each run once."
    with pytest.raises(SpecError) as folder:
        write_report([run], tmp_path)
    assert str(folder.value) == (
        f"The report cannot be written to {tmp_path}: Is a directory. "
        "Give another file with --out FILE."
    )
    with pytest.raises(DataError):
        write_report([tmp_path], tmp_path / "report.html")


def run_verb(*arguments: str, quiet: bool = False, as_json: bool = False) -> int:
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    args = parser.parse_args(arguments)
    args.quiet, args.json = quiet, as_json
    return verb.run(args)


def test_the_verb_says_where_the_report_is(
    journals: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = journals.write_run(tmp_path / "run", steps=5)
    assert run_verb(str(run)) == 0
    headline, where = capsys.readouterr().out.splitlines()
    assert where == f"{run}/report.html" and headline.startswith(
        "Packed by-work, the fullest of 2 ranks"
    )
    assert (run / "report.html").exists()
    assert run_verb(str(run), "--out", str(tmp_path / "other.html"), quiet=True) == 0
    assert capsys.readouterr().out == f"{tmp_path}/other.html\n"


def test_the_verbs_json_has_the_keys_that_its_help_names(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(runs["in-order"]), str(runs["by-work"]), "--out", str(tmp_path / "r.html")]
    assert run_verb(*arguments, as_json=True) == 0
    answer = json.loads(capsys.readouterr().out)
    assert set(answer) == {"report", "headline", "runs", "comparisons"}
    keys = [*answer, *answer["runs"][0], *answer["comparisons"][0]]
    assert [key for key in keys if not re.search(rf"\b{key}\b", verb.EXAMPLES)] == []
    assert np.isfinite(answer["comparisons"][0]["measured"])


def test_reporting_imports_no_torch() -> None:
    code = "import sys, equipoise.cli.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
