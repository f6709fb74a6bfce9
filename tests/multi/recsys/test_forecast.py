"""What verbs say of a recommender: placements, predicted seconds, and a journal beside them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from equipoise.comm.local import run_ranks
from equipoise.dash.recommend.report import render
from equipoise.recsys.folder import prepare
from equipoise.recsys.foresight.forecast import count_exchanges, count_step, read_rates
from equipoise.recsys.place import plan_samples
from equipoise.recsys.samples import read_samples
from equipoise.recsys.worker import make_record
from equipoise.spec.recommend import RankLayoutSpec, read_recommend
from support.read_run import events
from support.recsys.clicks import train_part, write_clicks
from support.verbs import run

PARTS = ["lookup_s", "exchange_s", "dense_s", "reduce_s", "rest_s", "step_s"]


@pytest.fixture(scope="module")
def run_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clicks(tmp_path_factory.mktemp("clicks"))


def test_rates_are_measured_and_stand_beside_a_journal(
    run_toml: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "simulate", run_toml)
    assert (code, out) == (2, "")
    assert err == (
        "No rates of recommenders were measured on this machine, so no seconds are predicted. "
        "Measure them: equipoise calibrate run.toml.\n"
    )
    code, out, _ = run(capsys, "plan", run_toml, "--json")
    assert (code, json.loads(out)["step_s"]) == (0, None)
    code, out, err = run(capsys, "calibrate", run_toml, "--json")
    assert code == 0, err
    measured = json.loads(out)
    rates = read_rates()
    assert rates is not None and rates.as_row() | {"file": measured["file"]} == measured
    assert all(rate >= 0 for each in rates.rates.values() for rate in each)

    spec, base = read_recommend(run_toml)
    folder = tmp_path / "runs" / "clicks"
    prepare(folder, spec, base)  # its tables stay where assumed rates put them
    trained = run_ranks(2, train_part, folder, spec, base)
    code, out, err = run(capsys, "simulate", run_toml, "--json")
    assert code == 0, err
    row = json.loads(out)
    assert list(row["predicted"]) == list(row["measured"]) == PARTS
    assert sum(list(row["predicted"].values())[:-1]) == pytest.approx(row["predicted"]["step_s"])
    assert row["rates"]["error"] == measured["error"]
    code, out, _ = run(capsys, "plan", run_toml, "--json")
    answer = json.loads(out)
    assert answer["placed_by"] == "assumed rates"
    assert answer["step_s"] == pytest.approx(row["predicted"]["step_s"])
    sent = [sum(each["measured"]["sent_bytes"]) for each in trained]
    assert [each["sent_bytes"] for each in answer["ranks"]] == pytest.approx(sent, rel=0.1)

    code, _, err = run(capsys, "simulate", run_toml, "--layout.dp", 3)
    assert (code, err) == (
        2,
        "runs/clicks has journals of steps from 2 ranks, and the run asked about has 3. Give the "
        "folder of such a run with --run, or its ranks with --layout.dp.\n",
    )
    file = Path(measured["file"])
    file.write_text(json.dumps(measured | {"machine": "an abacus"}))
    code, _, err = run(capsys, "plan", run_toml)
    assert code == 2 and err.startswith(f'{file} was measured on "an abacus" but this is "')


def test_exchanges_and_parts_are_those_of_a_run(run_toml: Path, tmp_path: Path) -> None:
    for kinds in ('["data"]', '["row"]', '["column", "data"]'):
        flags = [("tables.kinds", kinds), ("tables.optimizer", "row-wise-adagrad")]
        spec, base = read_recommend(run_toml, [*flags, ("train.epochs", "1")])
        samples = read_samples(spec.data, base)
        answer = plan_samples(spec, samples)
        folder = tmp_path / kinds
        run_ranks(2, train_part, folder, spec, base, 2)
        steps = events(folder, "recommend")
        assert {each["exchanges"] for each in steps} == {count_exchanges(spec, answer)}
        assert all(0 < each[part] < each["step_s"] for each in steps for part in PARTS[:4])
        counts = count_step(spec, samples, answer)
        assert [each.samples for each in counts] == [32.0, 32.0]


TOWERS = {
    "model.towers": '[["ad", "words"], ["user"]]',
    "model.tower_module": "linear",
    "model.tower_width": "2",
    "layout.ranks_per_host": "1",
}


def test_towers_are_planned_counted_and_recorded(
    run_toml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for key, value in TOWERS.items() for word in (f"--{key}", value)]
    code, out, err = run(capsys, "plan", run_toml, *words, "--json")
    assert code == 0, err
    planned = json.loads(out)
    assert planned["towers"] == [
        {"columns": ["ad", "words"], "host": 0, "vectors": 2},
        {"columns": ["user"], "host": 1, "vectors": 1},
    ]
    code, out, _ = run(capsys, "plan", run_toml, *words)
    assert "Tower 1 on host 0: ad, words; 2 vectors leave it for each sample." in out
    assert "of it between 2 hosts." in out
    code, out, _ = run(capsys, "pack", run_toml, *words, "--steps", 3, "--json")
    assert (code, json.loads(out)[0]["placement"]) == (0, "planned")

    spec, base = read_recommend(run_toml, [*TOWERS.items(), ("train.epochs", "1")])
    samples = read_samples(spec.data, base)
    answer = plan_samples(spec, samples)
    rows = run_ranks(2, train_part, tmp_path / "run", spec, base, 4)
    steps = events(tmp_path / "run", "recommend")
    assert {each["exchanges"] for each in steps} == {count_exchanges(spec, answer)}
    record = make_record(tmp_path / "run", spec, samples, answer, rows)
    assert (record["hosts"], record["towers"]) == (2, [["ad", "words"], ["user"]])
    across = [each["across_bytes"] for each in record["traffic"]]
    assert across == pytest.approx(
        [each["predicted_across_bytes"] for each in record["traffic"]], rel=0.1
    )
    assert sum(across) == pytest.approx(planned["across_bytes"], rel=0.1)
    assert across == [each["sent_bytes"] for each in record["traffic"]]  # each rank is a host
    page = render(record)
    assert "<h2>Sent to other hosts, of 2</h2>" in page
    assert "<td>1</td><td>ad, words</td>" in page
    assert "Sent to other hosts" not in render(record | {"hosts": 1})
    counts = count_step(spec, samples, answer)
    single = replace(spec, layout=RankLayoutSpec(dp=1))
    alone = count_step(single, samples, plan_samples(single, samples))
    assert sum(each.flop for each in counts) == alone[0].flop


def test_pack_names_every_placement(run_toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "pack", run_toml, "--steps", 5, "--json")
    rows = json.loads(out)
    assert code == 0
    assert [row["placement"] for row in rows] == [
        "planned",
        "whole, by cost",
        "whole, by storage",
        "rows, contiguous",
        "rows, modulo",
    ]
    assert all(1.0 <= row["skew"] <= row["worst_skew"] for row in rows)
    code, out, _ = run(capsys, "pack", run_toml)
    assert code == 0 and "clicks: 3 tables of 54 rows on 2 ranks" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("pack", "--policy", "by-work"), "--policy"),
        (("plan", "--measure"), "--measure"),
        (("simulate", "--trace", "step.json"), "--trace"),
        (("calibrate", "--plot", "curves.png"), "--plot"),
    ],
)
def test_flags_about_tokens_are_refused(
    run_toml: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    code, _, err = run(capsys, words[0], run_toml, *words[1:])
    assert (code, err) == (
        2,
        f'{message}: not for a run with model.kind = "recommend". Leave it out.\n',
    )
