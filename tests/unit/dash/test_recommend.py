"""The page of a recommender's run."""

import json
from pathlib import Path

import pytest

from equipoise.base.errors import DataError
from equipoise.dash.recommend.report import headline, read_record, render, write_report

RECORD = {
    "spec": {"name": "clicks"},
    "samples": {"train": 80, "held_out": 20, "by_time": True},
    "tables": [
        {
            "name": "<b>user",
            "rows": 9,
            "width": 4,
            "ids_per_sample": 1.0,
            "kind": "row",
            "buckets": "by-cost",
            "ranks": [0, 1],
        }
    ],
    "losses": [0.7, 0.6, 0.5],
    "best": {"epoch": 2, "test_auc": 0.7, "test_entropy": 0.9},
    "traffic": [
        {
            "rank": rank,
            "ids": 10.0 + rank,
            "predicted_ids": 10,
            "sent_bytes": 2048.0,
            "predicted_sent_bytes": 2000,
            "held_bytes": 4096,
        }
        for rank in range(2)
    ],
}


def test_predicted_stands_beside_measured(tmp_path: Path) -> None:
    page = render(RECORD)
    assert "Placed by" not in page  # a record of an earlier version
    for date, words in (("", "assumed rates"), ("2026-01-01", "rates measured on 2026-01-01")):
        assert f"<p>Placed by {words}.</p>" in render(RECORD | {"placed_by": {"date": date}})
    assert "<td>rank 1</td><td>11</td><td>10</td><td>2.0 KiB</td>" in page
    assert "&lt;b&gt;user" in page
    assert "<b>user" not in page
    assert headline(RECORD) == (
        "On later samples: AUC 0.7000, normalised entropy 0.9000 (epoch 2); ids looked up by the "
        "busiest rank are 1.048 times the mean."
    )
    assert headline(RECORD | {"best": None}).startswith("No epoch has ended yet;")
    copied = [row | {"ids": 0.0, "predicted_ids": 0} for row in RECORD["traffic"]]
    page_of_copies = render(RECORD | {"traffic": copied})
    assert "<p>Every rank has a copy of all tables, so no ids travel.</p>" in page_of_copies
    assert write_report(RECORD, tmp_path / "r.html").read_text() == page


def test_bytes_of_a_divided_dense_part_stand_by_rank() -> None:
    sent = {"inside_bytes": 3072.0, "predicted_inside_bytes": 3072}
    sent |= {"across_bytes": 1024.0, "predicted_across_bytes": 1024}
    page = render(RECORD | {"dense": [{"rank": 0, **sent}]})
    cells = ("rank 0", "3.0 KiB", "3.0 KiB", "1.0 KiB", "1.0 KiB")
    assert "".join(f"<td>{cell}</td>" for cell in cells) in page
    assert "shards of the dense part" not in render(RECORD)


def test_a_damaged_record_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "recommend.json"
    for text, why in (
        ("[1]", "it does not hold a JSON object"),
        ("{}", "it does not hold a run's record"),
        ('{"traffic": []}', "it does not hold a run's record"),
        (json.dumps(RECORD | {"best": 3}), "it does not hold a run's record"),
    ):
        file.write_text(text)
        with pytest.raises(DataError) as caught:
            read_record(tmp_path)
        assert str(caught.value) == (
            f"{file} cannot be read: {why}. Delete it, and run the same `equipoise train` again, "
            "which writes it from the newest checkpoint."
        )


def test_a_record_that_was_written_anew_has_no_traffic() -> None:
    again = RECORD | {"traffic": [], "sharing": [], "held": []}
    assert headline(again) == ("On later samples: AUC 0.7000, normalised entropy 0.9000 (epoch 2).")
    assert "No step was taken since the record was written anew." in render(again)
