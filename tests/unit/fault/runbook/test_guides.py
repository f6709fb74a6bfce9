"""Each shipped guide on the faults that it is for, on a healthy run, and its alarms."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from equipoise.base.errors import SpecError
from equipoise.cli.drill.commands import judge_command
from equipoise.fault.runbook.query import METRIC, wanted_events
from equipoise.fault.runbook.run import CommandEnd, GuideRun, GuideSubject, run_guide
from equipoise.fault.runbook.shipped import guide_for, open_guide, shipped_guides
from equipoise.fault.runbook.source import JournalSource
from support.runbooks.written import WrittenRun

NAMES = [name for name, _ in shipped_guides()]
OF_JOURNALS = [name for name in NAMES if name != "serving-objective-missed"]


def run_on(name: str, folder: Path, *, exit_code: int = 0) -> GuideRun:
    """A guide on a run; commands end at once with an exit code."""
    guide = open_guide(name, judge_command)
    source = JournalSource(folder, wanted_events(guide.queries))

    def act(words: Sequence[str]) -> CommandEnd:
        return CommandEnd(exit_code, " ".join(words))

    return run_guide(guide, GuideSubject(str(folder), source, source.start), act)


def concluded(run: GuideRun) -> list[str]:
    return [step.name for step in run.steps if step.conclusion]


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_guide_has_no_flaw(name: str) -> None:
    guide = open_guide(name, judge_command)
    assert guide.title and guide.about and len(guide.steps) >= 3
    assert any(step.conclusion for step in guide.steps)
    if name == "serving-objective-missed":
        kinds = {query.events.kind for query in guide.queries if query.events is not None}
        assert kinds == {METRIC}


def test_there_are_guides_for_what_the_catalogue_of_faults_lists() -> None:
    assert len(NAMES) >= 8
    assert {"slow-rank", "hung-collective", "number-gone-bad", "out-of-memory"} <= {*NAMES}
    assert {"checkpoint-stall", "data-starvation", "corruption-suspected"} <= {*NAMES}


def test_an_unknown_guide_is_refused_with_the_nearest() -> None:
    with pytest.raises(SpecError) as refusal:
        open_guide("slow-rnak", judge_command)
    assert str(refusal.value) == (
        'There is neither a guide nor a file called "slow-rnak". Nearest: slow-rank. All: '
        f"{', '.join(NAMES)}."
    )


@pytest.mark.parametrize("name", OF_JOURNALS)
def test_a_healthy_run_is_unknown_to_every_guide(name: str, tmp_path: Path) -> None:
    run = WrittenRun(tmp_path, 2)
    run.start()
    run.steps(60)
    run.saved(20)
    run.saved(40)
    run.write(0, "instant", "stop", reason="done", step=60)
    done = run_on(name, tmp_path)
    assert (done.state, done.conclusions) == ("unknown", ())
    assert any(step.state == "stopped" and step.sentence for step in done.steps)
    assert not any(step.state == "failed" for step in done.steps)


@pytest.mark.parametrize("name", OF_JOURNALS)
def test_a_run_without_a_step_is_unknown_or_says_why(name: str, tmp_path: Path) -> None:
    WrittenRun(tmp_path, 2).start()
    done = run_on(name, tmp_path)
    assert (done.state, done.conclusions) == ("unknown", ())


# Slow ranks: four causes, and one that nobody knows


def slow(**fields: float) -> Callable[[int, int], dict[str, float]]:
    """Rank 1 of three is late by its fields; the others wait for it."""

    def of(rank: int, step: int) -> dict[str, float]:
        del step
        if rank == 1:
            return {"step_s": 0.7, "wait_s": 0.01, **fields}
        return {"step_s": 0.7, "wait_s": 0.25}

    return of


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"busy_s": 0.6, "predicted_s": 0.6}, ["The pack is uneven"]),
        ({"busy_s": 0.4, "run_delay_s": 0.2}, ["The host is crowded"]),
        ({"busy_s": 0.61}, ["The processor is slow"]),
        ({"busy_s": 0.4, "outside_s": 0.2}, ["The rank is held up"]),
    ],
)
def test_a_slow_rank_is_named_with_its_cause(
    fields: dict[str, float], names: list[str], tmp_path: Path
) -> None:
    run = WrittenRun(tmp_path, 3)
    run.start()
    run.steps(60, slow(**fields))
    done = run_on("slow-rank", tmp_path)
    assert concluded(done) == names
    assert done.conclusions[0].startswith("Rank 1 is slow") or "Rank 1" in done.conclusions[0]


def test_an_uneven_pack_proposes_the_same_command_with_another_policy(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path, 3)
    run.start()
    run.steps(60, slow(busy_s=0.6, predicted_s=0.6))
    done = run_on("slow-rank", tmp_path)
    step = next(each for each in done.steps if each.name == "The pack is uneven")
    assert step.action is not None and step.action.exit_code is None
    assert step.action.command == (
        f"equipoise train run.toml --train.steps 100 --pack.policy by-work --out {tmp_path}"
    )
    asked = {each.name: each for s in done.steps for each in s.evidence}
    assert asked["slowest"].value == 1
    assert asked["surplus_s"].value == pytest.approx(0.2)
    assert asked["wait"].events == 150
    assert all(line.startswith("journal/rank-0000") for line in asked["wait"].lines)


# Hangs


def test_a_hang_that_ended_the_run_names_the_rank_that_did_not_come(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path, 3)
    run.start()
    run.steps(9)
    run.wait("instant", "late", 0, [2])
    run.wait("fault", "error", 0, [2], type="HungError", exit_code=6, traceback="")
    run.recovered("hung", 0, 9, "restart")
    done = run_on("hung-collective", tmp_path)
    assert concluded(done) == ["The rank that did not come"]
    assert done.conclusions[0] == (
        "Rank 2 did not come to all_gather (wait of step 9) for 31.00 s. The stacks of the missing "
        "ranks are in the journal's fault event. What followed: restart."
    )


def test_a_rank_that_hangs_again_is_named_with_its_number_of_times(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path, 3)
    for _ in range(2):
        run.start()
        run.steps(9)
        for rank in (0, 1):  # both wait, and both report
            run.wait("fault", "error", rank, [2], type="HungError", exit_code=6, traceback="")
    done = run_on("hung-collective", tmp_path)
    assert concluded(done) == ["A rank that hangs again"]
    assert done.conclusions[0].startswith("Rank 2 has held up the run 2 times")


def test_a_pause_that_ended_a_wait_that_has_not_and_a_link(tmp_path: Path) -> None:
    paused = WrittenRun(tmp_path / "paused", 2)
    paused.start()
    paused.wait("instant", "late", 0, [1])
    paused.wait("instant", "came", 0, [])
    assert concluded(run_on("hung-collective", paused.folder)) == ["The pause is over"]
    late = WrittenRun(tmp_path / "late", 2)
    late.start()
    late.steps(1)
    late.wait("instant", "late", 0, [1])
    assert concluded(run_on("hung-collective", late.folder)) == ["A rank is missing now"]
    late.steps(1)
    assert concluded(run_on("hung-collective", late.folder)) == ["The pause is over"]
    link = WrittenRun(tmp_path / "link", 2)
    link.start()
    link.wait("fault", "error", 0, [], type="HungError", exit_code=6, traceback="")
    assert concluded(run_on("hung-collective", link.folder)) == ["The link"]


# Numbers


def bad_number(run: WrittenRun, step: int) -> None:
    for rank in range(run.ranks):
        run.write(
            rank, "fault", "nan-loss", step=step, documents=[7, 9], what="loss",
            message="The first bad layer is layers.1.",
        )  # fmt: skip


def test_a_diverging_run_is_given_half_its_learning_rate(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path, 2)
    run.start()
    run.steps(40, lambda rank, step: {"grad_norm": 1.0 if step < 35 else 3.0 ** (step - 34)})
    bad_number(run, 41)
    done = run_on("number-gone-bad", tmp_path)
    assert concluded(done) == ["The learning rate is too high"]
    step = next(each for each in done.steps if each.conclusion)
    assert step.action is not None
    assert "--train.lr 0.0015" in step.action.command


def test_a_number_that_goes_bad_again_is_its_documents_and_once_is_a_question(
    tmp_path: Path,
) -> None:
    for times, name in ((2, "The documents"), (1, "The machine")):
        run = WrittenRun(tmp_path / str(times), 2)
        for _ in range(times):
            run.start()
            run.steps(40)
            run.step = 0
            bad_number(run, 41)
        done = run_on("number-gone-bad", run.folder)
        assert concluded(done) == [name]
        assert "documents 7, 9" in done.conclusions[0]


def test_fp8_is_named_beside_the_cause(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path, 1)
    run.start({"train": {"lr": 1e-3, "precision": "fp8"}})
    bad_number(run, 1)
    assert concluded(run_on("number-gone-bad", tmp_path)) == ["The machine", "The precision is low"]


# Memory


def test_memory_that_grows_is_a_leak_and_a_full_machine_is_a_large_step(tmp_path: Path) -> None:
    leak = WrittenRun(tmp_path / "leak", 2)
    leak.start()
    leak.steps(60, lambda rank, step: {"memory_bytes": (1 << 29) + rank * step * (20 << 20)})
    leak.write(1, "fault", "killed", message="Rank 1 of 2 (pid 7) was ended by SIGKILL; no word.")
    assert concluded(run_on("out-of-memory", leak.folder)) == ["A leak"]
    full = WrittenRun(tmp_path / "full", 2)
    full.start()
    full.steps(60, lambda rank, step: {"peak_memory_bytes": 3.5 * 2**30})
    full.write(1, "fault", "killed", message="Rank 1 of 2 (pid 7) was ended by SIGKILL; no word.")
    done = run_on("out-of-memory", full.folder)
    assert concluded(done) == ["The step is too large"]
    assert "7.0 GiB at most, 87.5% of the machine's 8.0 GiB" in done.conclusions[0]


def test_a_refused_allocation_before_the_first_steps_and_a_kill_with_room_left(
    tmp_path: Path,
) -> None:
    early = WrittenRun(tmp_path / "early", 2)
    early.start()
    fields = {"type": "RuntimeError", "exit_code": 6, "traceback": ""}
    said = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes."
    early.write(0, "fault", "exception", message=said, **fields)
    done = run_on("out-of-memory", early.folder)
    assert concluded(done) == ["Refused before the first steps"]
    assert said in done.conclusions[0]
    killed = WrittenRun(tmp_path / "killed", 2)
    killed.start()
    killed.steps(60)
    killed.write(1, "fault", "killed", message="Rank 1 of 2 (pid 7) was ended by SIGKILL.")
    done = run_on("out-of-memory", killed.folder)
    assert done.state == "unknown"
    assert any("somebody else killed it" in step.sentence for step in done.steps)


# Disks


def test_saves_that_a_disk_refuses_or_slows_down(tmp_path: Path) -> None:
    refused = WrittenRun(tmp_path / "refused", 2)
    refused.start()
    refused.steps(20)
    said = "The checkpoint cannot be written (Permission denied)."
    refused.write(0, "fault", "save", step=20, message=said)
    done = run_on("checkpoint-stall", refused.folder)
    assert concluded(done) == ["The disk refuses"]
    assert said in done.conclusions[0]
    slow_disk = WrittenRun(tmp_path / "slow", 2)
    slow_disk.start()
    for step in (20, 40, 60):
        slow_disk.steps(20)
        slow_disk.saved(step, 8.0, written_s=17.0)
    done = run_on("checkpoint-stall", slow_disk.folder)
    assert concluded(done) == ["Writing is slow"]
    assert "24.00 s, 44.4% of its time" in done.conclusions[0]
    copying = WrittenRun(tmp_path / "copying", 2)
    copying.start()
    for step in (20, 40):
        copying.steps(20)
        copying.saved(step, 1.0, staged_s=1.1)
    assert concluded(run_on("checkpoint-stall", copying.folder)) == ["Copying is slow"]


def test_a_full_disk_that_is_full_or_was(tmp_path: Path) -> None:
    said = "The journal x cannot be written (No space left on device; the disk at / has 0 B free)."
    for is_over, name in ((False, "Make room"), (True, "It was full")):
        run = WrittenRun(tmp_path / name, 2)
        run.start()
        run.steps(20)
        run.write(0, "fault", "journal", message=said)
        if is_over:
            run.steps(20)
            run.saved(40)
        done = run_on("disk-full", run.folder)
        assert concluded(done) == [name]
        assert said in done.conclusions[0]
    broken = WrittenRun(tmp_path / "broken", 2)
    broken.start()
    broken.write(0, "fault", "save", step=1, message="cannot be written (Read-only file system)")
    assert concluded(run_on("disk-full", broken.folder)) == ["The disk is broken"]


def test_a_checkpoint_that_is_damaged_still_or_no_more(tmp_path: Path) -> None:
    said = "step-000020 is passed over: shard-00000.bin has changed at bytes 0 to 4194304."
    run = WrittenRun(tmp_path, 2)
    run.start()
    run.write(0, "fault", "torn-checkpoint", message=said)
    assert concluded(run_on("corruption-suspected", tmp_path, exit_code=4)) == ["Still damaged"]
    assert concluded(run_on("corruption-suspected", tmp_path)) == ["Whole again"]
    both = run_on("corruption-suspected", tmp_path, exit_code=5)
    assert concluded(both) == ["This machine is suspect"]


# Data, and ranks that end


def test_data_that_comes_slowly_from_a_disk_or_from_the_packer(tmp_path: Path) -> None:
    for ranks, name in (
        ((0, 1, 2), "Reading is slow on all ranks"),
        ((1,), "Reading is slow on one rank"),
    ):
        run = WrittenRun(tmp_path / name, 3)
        run.start()
        run.steps(
            60,
            lambda rank, step, slow=ranks: (
                {"step_s": 1.2, "outside_s": 0.7} if rank in slow else {}
            ),
        )
        assert concluded(run_on("data-starvation", run.folder)) == [name]
    packing = WrittenRun(tmp_path / "packing", 1)
    packing.start()
    for step in range(1, 61):
        fields = {"policy": "fixed-exact", "plan_s": 0.5}
        packing.write(0, "decision", "pack", step=step, **fields)
        packing.write(0, "scalar", "step", step=step, step_s=0.5, busy_s=0.4, wait_s=0.0)
        packing.write(0, "span", "forward", step=step, duration_s=0.49, micro_batch=0)
    done = run_on("data-starvation", packing.folder)
    assert concluded(done) == ["Packing by this policy is slow"]
    assert "fixed-exact takes 500.0 ms, 50.0% of a step" in done.conclusions[0]


def ended(run: WrittenRun, rank: int, step: int) -> None:
    said = f"Rank {rank} of {run.ranks} (pid 7) was ended by SIGTERM; it left no traceback."
    run.write(rank, "fault", "killed", message=said, step=step)
    run.recovered("killed", rank, step, "restart")


@pytest.mark.parametrize(
    ("ends", "name"),
    [
        ([(1, 5)], "Chance"),
        ([(1, 5), (1, 9)], "One host fails"),
        ([(1, 5), (0, 9)], "Ranks fail everywhere"),
        ([(1, 5), (0, 5)], "The run fails at one step"),
    ],
)
def test_ranks_that_end(ends: list[tuple[int, int]], name: str, tmp_path: Path) -> None:
    run = WrittenRun(tmp_path, 2)
    run.start()
    for rank, step in ends:
        run.steps(5)
        ended(run, rank, step)
    run.steps(5)
    done = run_on("rank-lost", tmp_path)
    assert name in concluded(done)
    others = {"Chance", "One host fails", "Ranks fail everywhere", "The run fails at one step"}
    assert not (others - {name}) & {*concluded(done)}


# Alarms


@pytest.mark.parametrize(
    ("event", "name"),
    [
        ({"kind": "fault", "name": "error", "type": "HungError", "message": ""}, "hung-collective"),
        ({"kind": "instant", "name": "late"}, "hung-collective"),
        ({"kind": "fault", "name": "nan-loss"}, "number-gone-bad"),
        ({"kind": "fault", "name": "error", "type": "NonFiniteError"}, "number-gone-bad"),
        (
            {"kind": "fault", "name": "exception", "type": "X", "message": "CUDA out of memory."},
            "out-of-memory",
        ),
        ({"kind": "fault", "name": "exception", "type": "KeyError", "message": "a"}, "rank-lost"),
        ({"kind": "fault", "name": "killed", "message": "by SIGKILL"}, "rank-lost"),
        ({"kind": "fault", "name": "save", "message": "Permission denied"}, "checkpoint-stall"),
        ({"kind": "fault", "name": "save", "message": "No space left on device"}, "disk-full"),
        ({"kind": "fault", "name": "torn-checkpoint"}, "corruption-suspected"),
        ({"kind": "fault", "name": "error", "type": "SpecError", "message": "a key"}, ""),
        ({"kind": "scalar", "name": "step"}, ""),
    ],
)
def test_an_alarm_picks_its_guide(event: dict[str, str], name: str) -> None:
    assert guide_for(event) == name
