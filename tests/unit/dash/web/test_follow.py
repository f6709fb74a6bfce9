import dataclasses
import json
import shutil
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.base.errors import EquipoiseError
from equipoise.dash.web.follow import Follower
from equipoise.observe.event import seal
from equipoise.observe.reader import read_run
from equipoise.observe.run_record import RunRecord
from support.journals import start_event, write_run

FOREVER = time.monotonic() + 1e6


def read_all(follower: Follower) -> Follower:
    follower.advance(FOREVER)
    assert not follower.is_behind
    return follower


def require_same(one: RunRecord, other: RunRecord, *, but: tuple[str, ...] = ()) -> None:
    for field in dataclasses.fields(RunRecord):
        if field.name in but:
            continue
        require_equal(getattr(one, field.name), getattr(other, field.name), field.name)


def require_equal(one: Any, other: Any, name: str) -> None:
    if isinstance(one, np.ndarray):
        np.testing.assert_array_equal(one, other, err_msg=name)
    elif dataclasses.is_dataclass(one) and name != "start":
        for field in dataclasses.fields(one):
            require_equal(getattr(one, field.name), getattr(other, field.name), f"{name}.{field}")
    elif isinstance(one, tuple) and one and dataclasses.is_dataclass(one[0]):
        assert len(one) == len(other), name
        for each, its in zip(one, other, strict=True):
            require_equal(each, its, name)
    else:
        assert repr(one) == repr(other), name


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Both ranks' journals of a run that was killed in step 7 and resumed after step 4."""
    root = tmp_path_factory.mktemp("resumed")
    killed = write_run(root / "killed", steps=7, stop=False)
    again = write_run(root / "again", steps=9, seed=1)
    journals = []
    for rank in range(2):
        name = f"journal/rank-{rank:05d}.jsonl"
        lines = (killed / name).read_text().splitlines()
        lines = [seal(line) for line in lines[:-3]]
        later = [json.loads(line) for line in (again / name).read_text().splitlines()]
        later = [event for event in later if event.get("step", 9) > 4]
        if rank == 0:
            later[0]["resumed_step"] = 4
        torn = '{"v":1,"kind":"span","name":"forward","t":17'
        text = [*lines, torn, *(seal(json.dumps(event, separators=(",", ":"))) for event in later)]
        path = root / f"rank-{rank}"
        path.write_text("\n".join(text) + "\n")
        journals.append(path)
    return journals


@settings(max_examples=20)
@given(cuts=st.lists(st.tuples(st.integers(0, 1), st.integers(1, 9_000)), min_size=1, max_size=12))
def test_a_journal_in_arbitrary_cuts_is_the_whole(
    resumed: list[Path], cuts: list[tuple[int, int]]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        (folder / "journal").mkdir(parents=True)
        paths = [folder / "journal" / f"rank-{rank:05d}.jsonl" for rank in range(2)]
        follower, at = Follower(folder), [0, 0]
        for rank, size in [*cuts, (0, 1 << 30), (1, 1 << 30)]:
            with paths[rank].open("ab") as file:
                file.write(resumed[rank].read_bytes()[at[rank] : at[rank] + size])
            at[rank] += size
            read_all(follower)
            try:
                expected = read_run(folder)
            except EquipoiseError:
                with pytest.raises(EquipoiseError):
                    follower.record()
                continue
            # A last line without its end may yet be written: it is torn only to the report. And
            # spans are drawn of finished steps.
            require_same(follower.record(), expected, but=("torn_lines", "spans"))
        require_same(follower.record(), read_run(folder))
        assert follower.record().torn_lines == 2
        assert follower.newest_step == 9 and follower.stop == "done"


def test_nothing_is_read_twice(runs: dict[str, Path]) -> None:
    follower = read_all(Follower(runs["by-work"]))
    version = follower.version
    follower.advance(FOREVER)
    assert follower.version == version and follower.read_share == 1.0


@pytest.mark.long
def test_a_long_run_passes_over_old_spans_and_keeps_the_rest(tmp_path: Path) -> None:
    # Spans are passed over only where more than 4 MiB follow, so the journal is longer than that.
    folder = write_run(tmp_path / "run", ranks=1, steps=3_000)
    follower = Follower(folder)
    follower.advance(0.0)
    assert follower.is_behind and 0 < follower.read_share < 1
    read_all(follower)
    assert follower.size_bytes > 4 << 20
    require_same(follower.record(), read_run(folder), but=("spans",))
    drawn = np.unique(follower.record().spans[0].step)
    assert drawn.tolist() == list(range(2_989, 3_001))


def step_line(step: int, loss: float) -> str:
    event = {
        "v": 1, "kind": "scalar", "name": "step", "t": 1e9 + step, "rank": 0, "step": step,
        "loss": loss, "tokens": 10, "tokens_seen": 10 * step, "step_s": 1.0,
    }  # fmt: skip
    return json.dumps(event, separators=(",", ":")) + "\n"


def test_a_run_of_many_steps_is_thinned_but_not_its_spikes(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    steps, spike = 40_000, 1_235
    with (tmp_path / "journal/rank-00000.jsonl").open("w") as file:
        file.write(json.dumps(start_event("by-work", 1, steps, 1e9, "long")) + "\n")
        for step in range(1, steps + 1):
            file.write(step_line(step, 9.0 if step == spike else 3.0 + step % 7 / 100))
    follower = read_all(Follower(tmp_path))
    record = follower.record()
    assert follower.is_thinned and follower.newest_step == steps
    assert record.step.size <= 1 << 14
    assert record.loss[record.step == spike].tolist() == [9.0]
    assert record.step[-64:].tolist() == list(range(steps - 63, steps + 1))
    assert np.diff(record.step).max() in (2, 4, 8, 16)
    assert record.tokens_seen[-1] == 10 * steps


def test_a_journal_that_was_replaced_is_read_anew(journals: ModuleType, tmp_path: Path) -> None:
    folder = journals.write_run(tmp_path / "run", steps=20)
    follower = read_all(Follower(folder))
    shutil.rmtree(folder)
    follower.advance(FOREVER)
    assert follower.refusal == (
        f"No such folder: {folder}. Give the folder of a run, which `equipoise train` wrote, with "
        "journal/ inside it."
    )
    journals.write_run(folder, steps=5, seed=7)
    read_all(follower)
    assert follower.refusal == "" and follower.newest_step == 5
    require_same(follower.record(), read_run(folder))


def test_a_journal_of_a_newer_equipoise_is_refused(journals: ModuleType, tmp_path: Path) -> None:
    folder = journals.write_run(tmp_path / "run", steps=2)
    path = folder / "journal" / "rank-00000.jsonl"
    path.write_text('{"v":2,"kind":"span"}\n')
    follower = Follower(folder)
    follower.advance(FOREVER)
    assert follower.refusal == (
        f"{path}:1 is of journal schema 2; this equipoise reads schemas up to 1. Report with the "
        "equipoise that trained the run, or a newer one."
    )
