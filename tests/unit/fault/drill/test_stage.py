"""What is made smaller, and when an end counts as equal."""

import dataclasses
from pathlib import Path

import pytest

from equipoise.fault.drill.attempt import Attempt
from equipoise.fault.drill.facts import ledger, resumed_s
from equipoise.fault.drill.kill import has_one
from equipoise.fault.drill.poisson import Strike, are_named, is_exact
from equipoise.fault.drill.stage import STEPS, DrillRun, Stage, smaller
from equipoise.observe.journal import Journal
from equipoise.spec.run.load import read_run
from equipoise.spec.run.spec import LayoutSpec, PackSpec, RunSpec


def asked(ranks: int, **pack: object) -> DrillRun:
    spec = dataclasses.replace(RunSpec(), pack=PackSpec(**pack), layout=LayoutSpec(dp=ranks))
    return DrillRun((), spec, ranks)


@pytest.mark.parametrize(
    ("pack", "ranks", "sizes"),
    [
        ({"context_tokens": 16384, "step_tokens": 32768}, 2, (1024, 2048)),
        ({"context_tokens": 8192, "step_tokens": 8192 * 64}, 2, (1024, 8192)),
        ({"context_tokens": 8192, "step_tokens": 4096}, 1, (1024, 1024)),
        ({"context_tokens": 512, "step_tokens": 1024}, 2, None),
        ({"context_tokens": 512, "step_tokens": 512 * 64}, 2, (512, 4096)),
    ],
)
def test_a_step_has_as_many_windows_but_small_ones(
    pack: dict[str, int], ranks: int, sizes: tuple[int, int] | None
) -> None:
    keys = "pack.context_tokens", "pack.step_tokens"
    expected = {} if sizes is None else dict(zip(keys, sizes, strict=True))
    assert smaller(asked(ranks, **pack)) == expected


def test_a_cap_is_made_smaller_with_its_step() -> None:
    sizes = smaller(asked(2, context_tokens=8192, step_tokens=16384, max_tokens=9000))
    assert sizes["pack.max_tokens"] == sizes["pack.step_tokens"] == 2048


@pytest.mark.parametrize("keeps_none", ["1", ""])
def test_commands_compile_modules_once_where_the_environment_keeps_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps_none: str
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", keeps_none)
    bytecode = tmp_path / "bytecode"
    with Attempt(("--help",), None, bytecode) as attempt:
        assert attempt.end() == 0
    assert bool(list(bytecode.rglob("main.*.pyc"))) == bool(keeps_none)


def finished(folder: Path, steps: list[tuple[int, str, float]]) -> Path:
    """A journal with these steps: number, digest of their documents, loss."""
    with Journal(folder / "journal", 0) as journal:
        for step, digest, loss in steps:
            journal.write("decision", "pack", step=step, digest=digest)
            journal.write("scalar", "step", step=step, tokens_seen=64 * step, loss=loss, t=step)
    return folder


def test_an_end_is_equal_by_state_and_documents(tmp_path: Path) -> None:
    stage = Stage(asked(2), tmp_path)
    for name, digest in (("undisturbed", "a"), ("alike", "a"), ("other", "b")):
        folder = finished(tmp_path / name, [(1, "a", 3.0), (2, digest, 2.0)])
        (folder / "checkpoint" / f"step-{STEPS:06}").mkdir(parents=True)
        shard = folder / "checkpoint" / f"step-{STEPS:06}" / "shard-00000.bin"
        shard.write_bytes(b"weights")
    assert stage.is_equal(tmp_path / "alike")
    assert not stage.is_equal(tmp_path / "other")
    (tmp_path / "alike/checkpoint" / f"step-{STEPS:06}" / "shard-00000.bin").write_bytes(b"Weights")
    assert not stage.is_equal(tmp_path / "alike")
    assert not stage.is_equal(finished(tmp_path / "unsaved", [(1, "a", 3.0)]))
    assert ledger(tmp_path / "other") == {1: ("a", 64), 2: ("b", 128)}


STRAIGHT = [(1, "a", 3.0), (2, "b", 2.0), (3, "c", 1.0)]


@pytest.mark.parametrize(
    ("steps", "is_so"),
    [
        (STRAIGHT, True),
        ([*STRAIGHT, *STRAIGHT[1:]], True),
        ([*STRAIGHT, (2, "b", 2.5)], False),  # computed again with another result
        ([*STRAIGHT, (2, "x", 2.0)], False),  # from other documents
        ([STRAIGHT[0], STRAIGHT[2]], False),  # one is missing
    ],
)
def test_a_ledger_is_exact_if_each_step_came_out_alike(
    tmp_path: Path, steps: list[tuple[int, str, float]], is_so: bool
) -> None:
    assert is_exact(finished(tmp_path, steps), 3) is is_so


def test_the_time_back_is_from_the_decision_to_the_first_step_after_it(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal", 0) as journal:
        journal.write("scalar", "step", step=1, t=10.0)
        journal.write("decision", "recovery", action="restart", t=12.0)
        journal.write("scalar", "step", step=1, t=15.5)
        journal.write("scalar", "step", step=2, t=16.0)
    assert resumed_s(tmp_path) == 3.5
    assert resumed_s(tmp_path, since=14.0) == 1.5
    assert resumed_s(tmp_path, since=20.0) is None


@pytest.mark.parametrize(
    ("decided", "is_so"),
    [
        ([(2.0, "killed", 1), (9.0, "killed", 0)], True),  # the hang went with the kill after it
        ([(2.0, "killed", 1), (9.0, "hung", 1)], True),
        ([(2.0, "killed", 0), (9.0, "killed", 0)], False),  # another rank
        ([(2.0, "killed", 1)], False),  # nothing followed the others
        ([(2.0, "killed", 1), (3.0, "killed", 1), (9.0, "killed", 0)], False),  # nothing was done
    ],
)
def test_faults_are_named_if_each_decision_is_of_one_since_the_last(
    decided: list[tuple[float, str, int]], is_so: bool
) -> None:
    struck = [Strike("killed", 1, 1.0), Strike("hung", 1, 5.0), Strike("killed", 0, 8.0)]
    assert are_named(struck, decided) is is_so


def test_losses_of_fewer_ranks_are_equal_up_to_rounding(tmp_path: Path) -> None:
    stage = Stage(asked(2), tmp_path)
    for name, second in (("undisturbed", 2.0), ("near", 2.000002), ("far", 2.1)):
        finished(tmp_path / name, [(1, "a", 3.0), (2, "a", second)])
    finished(tmp_path / "short", [(1, "a", 3.0)])
    assert stage.loss_distances(tmp_path / "undisturbed") == [0, 0]
    assert stage.loss_distances(tmp_path / "near") == pytest.approx([0, 1e-6])
    assert stage.loss_distances(tmp_path / "far") == pytest.approx([0, 0.05])
    assert stage.loss_distances(tmp_path / "short") == []


def test_a_rank_is_given_up_only_where_others_have_its_model(tmp_path: Path) -> None:
    assert (has_one(Stage(asked(2), tmp_path)), Stage(asked(3), tmp_path).data_ranks) == ("", 3)
    divided = dataclasses.replace(asked(1), spec=RunSpec(layout=LayoutSpec(dp=1, tp=2)), ranks=2)
    assert has_one(Stage(divided, tmp_path)) == "needs layout.dp of 2 or more"


@pytest.mark.parametrize(
    "keys",
    [
        '[checkpoint]\nevery_steps = "auto"\nrank_mtbf_hours = 4000\n',
        '[eval]\npath = "held.txt"\nsource = "text"\nevery_steps = 100\ntokens = 5000\n',
        '[train]\nsteps = 2000\nwarmup_steps = 100\nschedule = "wsd"\ndecay_steps = 200\n',
    ],
)
def test_keys_that_only_the_whole_run_reads_do_not_keep_it_from_its_rehearsal(
    tmp_path: Path, keys: str
) -> None:
    run_toml = tmp_path / "run.toml"
    run_toml.write_text(keys)
    spec = read_run(run_toml).spec
    stage = Stage(DrillRun((), spec, 2), tmp_path)
    words = [word.removeprefix("--").split("=", 1) for word in stage._words({})]
    small = read_run(run_toml, [(key, value) for key, value in words]).spec
    assert (small.train.steps, small.checkpoint.every_steps, small.eval.path) == (STEPS, 8, "")
    assert small.train.warmup_steps + small.train.falling_steps <= STEPS
