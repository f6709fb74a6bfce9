"""A run keeps the curve that it packs by; other runs measure again what was found wrong."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from equipoise.comm.local import run_ranks
from equipoise.cost.curve import LoadCurve
from equipoise.spec.run.spec import PackSpec, RunSpec
from support.make_run import MODEL
from support.ranks import on_ranks
from support.ranks.curve_ranks import obtain, obtain_beside_others
from support.read_run import events

SPEC = RunSpec(pack=PackSpec(context_tokens=64, step_tokens=256))


def curves(folder: Path) -> list[Path]:
    return sorted((folder / "curves").glob("*.json"))


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[LoadCurve]]:
    """A cache beside a run's folder, and the curve of each of two ranks."""
    root = tmp_path_factory.mktemp("curves")
    return root, run_ranks(2, obtain, SPEC, MODEL, root / "cache", root / "run")


def test_every_rank_has_the_curve_that_the_run_keeps(first) -> None:
    root, (one, other) = first
    assert one == other and one.measured and 0.0 < one.busy_share <= 1.0
    (file,) = curves(root / "run")
    kept = json.loads(file.read_text())
    assert kept["ns_per_token"] == one.ns_per_token and kept["busy_share"] == one.busy_share
    # Under load it is the run's alone.
    assert [each.name for each in curves(root / "cache")] in ([], [file.name])


def test_a_resumed_run_reads_its_own_curve_whatever_the_cache_has(first, tmp_path: Path) -> None:
    root, (one, _) = first
    (file,) = curves(root / "run")
    row = json.loads(file.read_text())
    cache, cheaper = tmp_path / "cache", row | {"ns_per_token": 1.0}
    (cache / "curves").mkdir(parents=True)
    del cheaper["digest"]  # as earlier versions wrote it
    (cache / "curves" / file.name).write_text(json.dumps(cheaper))
    assert run_ranks(2, obtain, SPEC, MODEL, cache, root / "run") == [one, one]
    # A run of its own reads the cache, and keeps what it read.
    cached = dataclasses.replace(one, ns_per_token=1.0)
    assert run_ranks(2, obtain, SPEC, MODEL, cache, tmp_path / "run") == [cached, cached]
    (kept,) = curves(tmp_path / "run")
    assert json.loads(kept.read_text())["ns_per_token"] == 1.0
    # One that has changed since it was written is not read.
    kept.write_text(json.dumps(row | {"ns_per_token": 2.0}))
    assert run_ranks(2, obtain, SPEC, MODEL, cache, tmp_path / "run") == [cached, cached]


def test_fewer_ranks_pack_by_the_curve_that_the_run_has(first, tmp_path: Path) -> None:
    root, (one, _) = first
    shutil.copytree(root / "run", tmp_path / "run")
    assert run_ranks(1, obtain, SPEC, MODEL, tmp_path / "cache", tmp_path / "run") == [one]
    fewer, before = curves(tmp_path / "run")
    assert (fewer.stem[-2:], before.stem[-2:]) == ("-1", "-2")
    assert fewer.read_text() == before.read_text()
    assert not curves(tmp_path / "cache")


def test_what_was_measured_beside_others_is_not_put_into_the_cache(tmp_path: Path) -> None:
    found = run_ranks(1, obtain_beside_others, SPEC, MODEL, tmp_path / "cache", tmp_path / "run")
    assert found[0].busy_share < 0.7
    assert not curves(tmp_path / "cache") and len(curves(tmp_path / "run")) == 1


def test_steps_that_contradict_the_curve_are_said_and_written_down(
    tmp_path: Path, make_run
) -> None:
    wide = dataclasses.replace(MODEL, layers=4, hidden=128, heads=4, ffn=512, head_width=32)
    resolved = make_run(model=wide, steps=6, step_tokens=2048)  # counted: a rank of 1 TFLOP/s
    ended = run_ranks(2, on_ranks.train, tmp_path, resolved, {})
    said = [line for line in ended[0].said if line.startswith("Computing took ")]
    assert len(said) == 1 and said[0].endswith(
        "than the price curve predicted (median of 5 steps). This run keeps its curve; the next "
        "run measures it again."
    )
    (doubt,) = events(tmp_path, "doubt")
    assert (doubt["step"], doubt["message"]) == (5, said[0])
    assert not events(tmp_path, "doubt", rank=1)
