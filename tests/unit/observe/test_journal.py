"""The journal's writer: whole lines, whatever was torn before."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from equipoise.base.errors import FaultError
from equipoise.observe.event import SCHEMA_VERSION
from equipoise.observe.journal import Journal


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_event_has_the_schemas_fields(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal", 3) as journal:
        journal.write("scalar", "step", t=12.5, step=1, loss=2.0)
    assert journal.path.name == "rank-00003.jsonl"
    (event,) = lines(journal.path)
    assert re.fullmatch("[0-9a-f]{8}", event.pop("crc"))
    assert event == {
        "v": SCHEMA_VERSION,
        "kind": "scalar",
        "name": "step",
        "t": 12.5,
        "rank": 3,
        "step": 1,
        "loss": 2.0,
    }


def test_a_number_that_is_not_finite_is_null_at_any_depth(tmp_path: Path) -> None:
    with Journal(tmp_path, 0) as journal:
        journal.write("scalar", "step", loss=math.nan, more={"a": [math.inf, (1.0, -math.inf)]})
    (event,) = lines(journal.path)
    assert event["loss"] is None
    assert event["more"] == {"a": [None, [1.0, None]]}


def test_a_span_is_written_also_when_its_block_fails(tmp_path: Path) -> None:
    with (
        Journal(tmp_path, 0) as journal,
        pytest.raises(ZeroDivisionError),
        journal.span("forward", step=2),
    ):
        1 / 0  # noqa: B018
    (event,) = lines(journal.path)
    assert (event["kind"], event["name"], event["step"]) == ("span", "forward", 2)
    assert event["duration_s"] >= 0


@pytest.mark.parametrize("torn", ['{"v":1,"kind":"sc', '{"v":1}', "\0\0"])
def test_a_torn_last_line_stays_alone(tmp_path: Path, torn: str) -> None:
    with Journal(tmp_path, 0) as journal:
        journal.write("instant", "first")
    with journal.path.open("a") as file:
        file.write(torn)
    with Journal(tmp_path, 0) as journal:
        journal.write("instant", "second")
    first, middle, second = journal.path.read_text().splitlines()
    assert json.loads(first)["name"] == "first"
    assert middle == torn
    assert json.loads(second)["name"] == "second"


def test_a_whole_journal_is_appended_without_an_empty_line(tmp_path: Path) -> None:
    for name in ("first", "second"):
        with Journal(tmp_path, 0) as journal:
            journal.write("instant", name)
    assert [event["name"] for event in lines(journal.path)] == ["first", "second"]
    assert "\n\n" not in journal.path.read_text()


def test_a_killed_writer_leaves_whole_lines_and_one_torn_at_most(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from equipoise.observe.journal import Journal\n"
        "journal = Journal(Path(sys.argv[1]), 0)\n"
        "print('go', flush=True)\n"
        "while True:\n"
        "    journal.write('scalar', 'step', values=list(range(40)))\n"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE
    )
    assert writer.stdout is not None
    with writer:
        writer.stdout.readline()
        path = tmp_path / "rank-00000.jsonl"
        while path.stat().st_size < 100_000:
            pass
        os.kill(writer.pid, signal.SIGKILL)
    *whole, last = path.read_bytes().split(b"\n")
    assert all(json.loads(line)["values"] == list(range(40)) for line in whole)
    assert len(last) < 200


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "journal"
    with pytest.raises(FaultError) as caught:
        Journal(folder, 0)
    assert str(caught.value) == (
        f"The journal {folder}/rank-00000.jsonl cannot be written (Not a directory). Make its "
        "folder writable, or choose another with --out."
    )
