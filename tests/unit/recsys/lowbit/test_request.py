"""A run in few bits: within its budget, served to the bit, and calibrated anew where it drifts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from equipoise.base.errors import CheckpointError, EquipoiseError
from equipoise.cli.main import main
from equipoise.recsys.lowbit.artefact import open_any, read_artefact
from equipoise.recsys.lowbit.drift import DriftMonitor
from equipoise.recsys.lowbit.layers import rounded_of
from equipoise.recsys.lowbit.parts import make_scorer, parts_of
from equipoise.recsys.lowbit.request import convert_run, read_stream
from equipoise.recsys.lowbit.scan import ReferenceScores, Sampled, scan_parts
from equipoise.recsys.lowbit.search import search_forms
from equipoise.recsys.rank.ranker import Ranker, open_ranker
from equipoise.recsys.samples import Samples, read_samples
from equipoise.spec.recommend import read_recommend
from support.recsys.runs import trained_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_run(tmp_path_factory.mktemp("clicks"))


@pytest.fixture(scope="module")
def samples(run: Path) -> Samples:
    spec, base = read_recommend(run.parent / "run.toml")
    return read_samples(spec.data, base)


@pytest.fixture(scope="module")
def ranker(run: Path) -> Ranker:
    return open_ranker(run)


@pytest.fixture(scope="module")
def reference(ranker: Ranker, samples: Samples) -> ReferenceScores:
    return ReferenceScores(ranker.scorer, part_of(samples, 0, 600))


def part_of(samples: Samples, begin: int, end: int) -> Sampled:
    jagged, numbers, labels = samples.batch(np.arange(begin, end))
    return Sampled(jagged, numbers, labels.double().numpy())


def test_a_scan_has_every_format_of_every_part_alone(
    ranker: Ranker, reference: ReferenceScores
) -> None:
    rows = scan_parts(reference)
    names = [part.name for part in parts_of(ranker.scorer)]
    assert names == [
        *("user", "ad", "words"),
        *("layer vectors.mlp.0", "layer vectors.mlp.2", "layer top.0", "layer top.2"),
    ]
    assert len(rows) == 3 * 4 + 4 * 2
    for each in rows:
        made = make_scorer(ranker.scorer, {each.part.name: each.form}, reference.ends)
        assert each.loss == reference.measure(made)
        held = made.held_bytes - ranker.scorer.held_bytes
        assert held == each.part.bytes_of(each.form) - each.part.bytes_of("fp32")
    noise = {(row.part.name, row.form): row.loss.noise_db for row in rows}
    for name in ("user", "ad"):
        forms = [noise[name, form] for form in ("fp16", "int8", "int4", "int2")]
        assert forms == sorted(forms, reverse=True)
    plain = make_scorer(ranker.scorer, {}, reference.ends)
    assert reference.measure(plain).entropy == pytest.approx(0.0, abs=1e-7)


def test_the_budget_is_met_and_more_budget_never_takes_more_bytes(
    reference: ReferenceScores,
) -> None:
    sizes = []
    for budget in (0.0, 1e-4, 2e-3, 2e-2):
        searched = search_forms(reference, budget)
        assert searched.loss.entropy <= budget + 1e-12
        assert searched.scorer.held_bytes == searched.cost_bytes + _indices(reference)
        assert searched.cost_bytes <= searched.fp32_bytes
        sizes.append(searched.cost_bytes)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 0.4 * sizes[0]


def _indices(reference: ReferenceScores) -> int:
    """Bytes of what is no weight: which pairs the model multiplies."""
    buffers = [*reference.scorer.dense.buffers()]
    return sum(each.numel() * each.element_size() for each in buffers)


def test_the_monitor_is_silent_until_inputs_shift_and_then_calibrates(
    ranker: Ranker, reference: ReferenceScores, samples: Samples
) -> None:
    forms = {part.name: "int8" for part in parts_of(ranker.scorer)}
    scorer = make_scorer(ranker.scorer, forms, reference.ends)
    monitor = DriftMonitor(ranker.scorer, scorer, forms, budget=0.01)
    monitor.calibrated_on(reference.samples)
    for begin in range(600, 840, 60):
        row = monitor.follow(part_of(samples, begin, begin + 60))
        assert (row.fired, row.did) == ("", "")
    # The price is now given in cents, say: far beyond the ends.
    shifted = part_of(samples, 600, 840)
    shifted = Sampled(shifted.jagged, 8 * shifted.numbers, shifted.labels)
    row = monitor.follow(shifted)
    assert row.fired and row.did
    assert row.clipped > 0.1
    assert abs(row.entropy_after) <= 0.01 < abs(row.entropy)
    assert monitor.scorer is not scorer
    # On the same inputs it is silent again.
    row = monitor.follow(shifted)
    assert (row.fired, row.entropy) == ("", monitor.seen[-2].entropy_after)
    assert [each.window for each in monitor.seen] == [*range(6)]


def test_a_folder_is_served_to_the_bit_and_understood(
    run: Path, samples: Samples, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "small"
    assert main(["convert", str(run), str(target), "--budget", "0.02", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["folder"] == str(target)
    assert facts["loss"]["loss"] <= 0.02 == facts["budget"]
    kept, whole = facts["bytes"]["kept"], facts["bytes"]["fp32"]
    assert sum(part["bytes"] for part in facts["parts"]) == kept < 0.6 * whole
    assert sum(each["samples"] for each in facts["windows"]) == 90
    low, again = open_any(target), read_artefact(target)
    jagged, numbers, _ = samples.batch(np.arange(*samples.bounds("test")))
    logits = low.scorer.score(jagged, numbers)
    assert torch.equal(logits, again.scorer.score(jagged, numbers))
    assert low.scorer.held_bytes == kept + sum(
        each.numel() * each.element_size()
        for name, each in low.scorer.dense.named_buffers()
        if name.endswith("_pairs")
    )
    spread = np.abs(logits.numpy() - open_any(run).scorer.score(jagged, numbers).numpy()).max()
    assert 0 < spread < 0.5
    assert main(["inspect", str(target), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["kind"], told["name"]) == ("recommender in few bits", "clicks")
    assert told["weight_bytes"] == low.scorer.held_bytes
    assert told["forms"] == low.form
    assert main(["inspect", str(target)]) == 0
    assert "recommender in few bits" in capsys.readouterr().out


def test_a_stream_of_a_file_is_followed_in_order_of_time(
    run: Path, ranker: Ranker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (run.parent / "clicks.csv").read_text().splitlines()
    head, rows = lines[0].split(","), [line.split(",") for line in lines[1:]]
    at = head.index("price")
    for row in rows[600:]:
        row[at] = f"{12 * float(row[at]):.4f}"
    file = tmp_path / "later.csv"
    file.write_text("\n".join([lines[0], *(",".join(row) for row in reversed(rows[400:]))]) + "\n")
    spec, _ = read_recommend(run.parent / "run.toml")
    windows = read_stream(file, spec.data, ranker.coding)
    assert [len(each.labels) for each in windows] == [50] * 10
    target = tmp_path / "small"
    flags = ["--budget", "0.02", "--stream", str(file)]
    assert main(["convert", str(run), str(target), *flags]) == 0
    said = capsys.readouterr().out
    assert "Followed 10 windows of later samples; the monitor fired " in said
    assert said.endswith(f"Serve it: equipoise serve {target}\n")
    facts = json.loads((target / "ranking.json").read_text())
    layers = rounded_of(read_artefact(target).scorer.dense)
    if any(layer.form == "int8" for layer in layers.values()):
        assert [bool(each["fired"]) for each in facts["windows"]][4:].count(True) >= 1
    assert not any(each["fired"] for each in facts["windows"][:4])


def test_losses_are_of_the_folder_that_was_written(
    run: Path, ranker: Ranker, samples: Samples, tmp_path: Path
) -> None:
    """After the monitor fired they were of the model that it had replaced."""
    lines = (run.parent / "clicks.csv").read_text().splitlines()
    at, rows = lines[0].split(",").index("price"), [line.split(",") for line in lines[1:]]
    for row in rows[450:]:
        row[at] = f"{40 * float(row[at]):.4f}"
    file = tmp_path / "later.csv"
    file.write_text("\n".join([lines[0], *(",".join(row) for row in rows)]) + "\n")
    record = convert_run(run, tmp_path / "small", 0.02, stream=file)
    assert any(each["did"] for each in record["windows"])
    written = read_artefact(tmp_path / "small").scorer
    for split, key in (("validation", "loss"), ("test", "held_out")):
        part = part_of(samples, *samples.bounds(split))
        loss = ReferenceScores(ranker.scorer, part).measure(written)
        assert record[key]["loss"] == loss.entropy


def test_what_is_wrong_is_one_sentence(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*words: str) -> str:
        assert main(["convert", *words]) != 0
        return capsys.readouterr().err

    target = str(tmp_path / "to")
    assert said(str(run), target, "--budget", "2") == (
        "--budget 2 is not a share of normalised entropy. Give 0 to 1; 0.001 lets it grow by "
        "0.1%.\n"
    )
    assert said(str(run), target, "--dtype", "bf16") == (
        "--dtype is not for a recommender. Leave it out.\n"
    )
    assert said(str(run), target, "--cluster-experts", "0") == (
        "--cluster-experts is not for a recommender. Leave it out.\n"
    )
    assert said(str(run)) == "convert needs TO, the folder to make.\n"
    assert said(str(run), str(run)) == (f"{run} already exists. Name a new folder, or delete it.\n")
    assert said(str(tmp_path), target, "--budget", "0.1") == (
        f"--budget is for a recommender's run, and {tmp_path} is none. Leave it out.\n"
    )
    assert said(str(run), target, "--stream", str(tmp_path / "gone.csv"), "--quiet") == (
        f"No such file: {tmp_path / 'gone.csv'}. Set --stream to a Parquet, CSV or TSV file.\n"
    )
    (tmp_path / "later.csv").write_text("user,ad\nu1,a1\n")
    assert said(str(run), target, "--stream", str(tmp_path / "later.csv"), "--quiet") == (
        'later.csv has no column "words" among its 2 (user, ad). Nearest: "ad".\n'
    )
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    later = {name: ["1", "1"] for name in ("ad", "price", "t", "click")}
    later |= {"user": ["u1", "u2"], "words": [[["w1"]], []]}
    parquet.write_table(arrow.table(later), tmp_path / "later.parquet")
    assert said(str(run), target, "--stream", str(tmp_path / "later.parquet"), "--quiet") == (
        'later.parquet, column "words", row 1: a list of lists or objects, where a sample has '
        "texts or numbers. Write a list of texts or numbers.\n"
    )
    assert not (tmp_path / "to").exists()


def test_scores_that_are_not_numbers_have_no_loss(ranker: Ranker, samples: Samples) -> None:
    part = part_of(samples, 0, 40)
    part.numbers[3] = torch.inf
    with pytest.raises(EquipoiseError) as caught:
        ReferenceScores(ranker.scorer, part)
    assert str(caught.value) == (
        "Scores of 1 of 40 samples are not numbers, so no loss can be measured. Leave out rows "
        "with numbers far from training's."
    )


def test_a_torn_folder_is_refused(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "small"
    convert_run(run, target, 0.02)
    weights, said = target / "weights.safetensors", target / "ranking.json"
    whole: dict[str, Any] = json.loads(said.read_text())

    def refused() -> str:
        with pytest.raises(EquipoiseError) as caught:
            open_any(target)
        assert isinstance(caught.value, CheckpointError)
        return str(caught.value)

    again = "Convert the run again: equipoise convert RUN TO --budget 0.001."
    changed = f"cannot be read: its bytes have changed, or it is another folder's. {again}"
    said.write_text(json.dumps(whole | {"format": 3}))
    assert refused() == f"{said} is of format 3, and this version reads 2. Update equipoise."
    said.write_text(json.dumps(whole | {"step": whole["step"] + 1}))
    assert refused() == f"{said} cannot be read: its bytes have changed. {again}"
    said.write_text(json.dumps({"format": 1}))
    assert refused() == f"{said} cannot be read: it is damaged. {again}"
    said.write_text(json.dumps(whole))
    columns = target / "columns.json"
    words = json.loads(columns.read_text())
    mine, words["words"]["user"] = columns.read_text(), words["words"]["user"][::-1]
    columns.write_text(json.dumps(words))  # as a run on the same users in another order has it
    assert refused() == f"{columns} {changed}"
    columns.unlink()
    assert refused() == f"{columns} cannot be read: no such file or directory. {again}"
    columns.write_text(mine)
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert refused() == f"{weights} {changed}"
    weights.unlink()
    assert refused() == f"{weights} cannot be read: no such file or directory. {again}"
    # Format 1 had no digests.
    said.write_text(
        json.dumps({key: each for key, each in whole.items() if key != "files"} | {"format": 1})
    )
    weights.write_bytes(data[:400])
    assert refused() == f"{weights} cannot be read: it is damaged. {again}"


def test_a_folder_that_cannot_be_made_is_said_before_anything_is_computed(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    target = tmp_path / "file" / "small"
    assert main(["convert", str(run), str(target), "--quiet"]) == 2
    assert capsys.readouterr().err == (
        f"{target} cannot be written (Not a directory). Name a folder on another disk.\n"
    )
