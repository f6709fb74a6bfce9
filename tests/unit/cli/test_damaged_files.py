"""Files whose values are not what their writers write: every reader says so, or reads the rest."""

import dataclasses
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from equipoise.cli.main import main
from equipoise.observe.reader import read_run
from equipoise.spec.device.here import cpu_model
from equipoise.spec.model.presets import preset
from support import journals
from support.device_files import A_FILE, written
from support.verbs import run

HERE = dataclasses.replace(A_FILE, machine=cpu_model())
POINT = dataclasses.asdict(A_FILE.gemm[0])
VALUES = (
    None, -1, 0, 2**31, 2**63, 1e308, -1e308, float("nan"), float("inf"), 0.5, "", "x", "\0",
    True, [], {}, [1], ["x"], {"a": 1},
)  # fmt: skip


def spots(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where the values of a JSON document are."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:2])
    for key, inner in items:
        if isinstance(inner, dict | list):
            yield from spots(inner, (*path, key))
        else:
            yield (*path, key)


def put(text: str, path: tuple[str | int, ...], value: Any) -> str:
    """The document with another value at a place."""
    whole = at = json.loads(text)
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return json.dumps(whole)


def damaged(text: str, count: int) -> Iterator[str]:
    """A document with one wrong value, each time another."""
    draw = random.Random(0)
    cases = [(path, value) for path in spots(json.loads(text)) for value in VALUES]
    for path, value in draw.sample(cases, min(count, len(cases))):
        yield put(text, path, value)


def begun(folder: Path) -> Path:
    """A run whose start event has a whole model."""
    journals.write_run(folder, steps=3)
    file = folder / "journal" / "rank-00000.jsonl"
    start, *rest = file.read_text().splitlines()
    start = put(start, ("model",), dataclasses.asdict(preset("2m")))
    file.write_text("\n".join([start, *rest]) + "\n")
    return folder


@pytest.mark.long
def test_journals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = begun(tmp_path / "run")
    device = written(tmp_path, HERE)
    file = folder / "journal" / "rank-00000.jsonl"
    lines = file.read_text().splitlines()
    kinds = {(each["kind"], each["name"]): n for n, each in enumerate(map(json.loads, lines))}
    for number in kinds.values():
        for line in damaged(lines[number], 8):
            file.write_text("\n".join([*lines[:number], line, *lines[number + 1 :]]) + "\n")
            for words in (
                ("report", folder, "--out", tmp_path / "a.html"),
                ("trace", folder, "--out", tmp_path / "a.json"),
                ("inspect", folder, "--json"),
                ("calibrate", "--compare", folder, "--out", device),
            ):
                code, out, err = run(capsys, *words)
                assert code in (0, 2), (line, err)
                assert code == 0 or err.count("\n") == 1, err
                assert "NaN" not in out


STARTS = {
    "pack of a number": ("spec", {"pack": 5}, "pack", ""),
    "edges of text": ("corpus", {"histogram": {"edges": ["x"]}}, "histogram", None),
}


@pytest.mark.parametrize("case", STARTS)
def test_what_a_start_says_wrongly_counts_as_missing(case: str, tmp_path: Path) -> None:
    key, value, inner, missing = STARTS[case]
    folder = begun(tmp_path / "run")
    file = folder / "journal" / "rank-00000.jsonl"
    start, *rest = file.read_text().splitlines()
    assert json.loads(start)["name"] == "start"
    file.write_text("\n".join([put(start, (key,), value), *rest]) + "\n")
    assert (getattr(read_run(folder).start, key).get(inner) or missing) == missing


def test_a_run_that_calibrate_cannot_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = begun(tmp_path / "run")
    file = folder / "journal" / "rank-00000.jsonl"
    start, *rest = file.read_text().splitlines()
    file.write_text("\n".join([put(start, ("spec", "layout", "zero"), "x"), *rest]) + "\n")
    asked = ("calibrate", "--compare", folder, "--out", written(tmp_path, HERE))
    assert run(capsys, *asked)[::2] == (
        2,
        f"{folder} has a start event in its journal that no run writes: layout.zero must be 0, 1, "
        "2 or 3. Copy journal/rank-00000.jsonl again.\n",
    )


DEVICES = {
    ("stream",): (3, "stream must be a table"),
    ("gemm",): ([], "gemm: there is not one point"),
    ("gemm", ...): (
        [POINT, POINT | {"m": 77, "n": 99}],
        "nothing was measured at the sizes (",
    ),
    ("gemm", 0, "m"): (-1, "gemm.0: -1 must be above 0"),
    ("attention", 0): ({}, "it lacks attention.0.dtype"),
    ("peaks", 0, 0): ("fp99", "peaks.0.0 must be 'fp32', 'tf32', 'bf16', 'fp16' or 'fp8'"),
}


@pytest.mark.parametrize("place", DEVICES, ids=lambda place: ".".join(map(str, place)))
def test_device_files(
    place: tuple[str | int, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    value, fault = DEVICES[place]
    place = tuple(each for each in place if each is not ...)
    folder = begun(tmp_path / "run")
    device = written(tmp_path, HERE)
    device.write_text(put(device.read_text(), place, value))
    code, _, err = run(capsys, "calibrate", "--compare", folder, "--out", device)
    assert code == 2
    assert err.startswith(f"{device} is not a device file: {fault}"), err
    assert err.endswith('. Measure again: "equipoise calibrate".\n')


@pytest.mark.parametrize("verb", ["report", "trace"])
def test_no_file_of_a_run_is_written_over(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = journals.write_run(tmp_path / "run", steps=3)
    (run / "run.toml").write_text("")
    journal = run / "journal" / "rank-00000.jsonl"
    before = journal.read_bytes()
    for file in (journal, run / "run.toml"):
        assert main([verb, str(run), "--out", str(file)]) == 2
        assert capsys.readouterr().err == (
            f"--out {file} is a file of the run {run}. Give another file.\n"
        )
    assert journal.read_bytes() == before
    for _ in range(2):  # an earlier page or trace is replaced
        assert main([verb, str(run), "--quiet"]) == 0


def test_lengths_are_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text("5\n6\n")
    assert main(["pack", "--lengths", str(file), "--out", str(file)]) == 2
    assert capsys.readouterr().err == (
        f"--out {file} is the file of lengths that is read. Give another file.\n"
    )
    assert file.read_text() == "5\n6\n"
