"""Runs whose ranks are killed, fail or are taken over while they train: they go on, or say why not.

Each test proves that its fault was injected: by the process that it ended, or by what it left.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from equipoise.cli.main import main
from equipoise.launch.still import is_stopped
from equipoise.observe.reader import read_run
from support.launch.held import Held
from support.make_run import share_curve, write_run
from support.read_run import EXACT, events, ranks_of
from support.verbs import run, train_while, wait_until

STEPS, LAST = 24, 20
"""Steps of a run, and the one that it waits at until a test has done its deed."""
RESUME = "Run the same command again to resume from the last checkpoint."


@pytest.fixture
def run_toml(texts: Path, cache: Path, tmp_path: Path) -> Path:
    return write_run(tmp_path, texts, cache, steps=STEPS, every_steps=6, layout="dp = 2")


def lines_of(folder: Path, name: str) -> int:
    return len(events(folder, name))


def both_ranks_of(folder: Path) -> dict[int, int]:
    """The process of each of two ranks, once both are there; read once, since either may end."""
    found = dict[int, int]()

    def have_come() -> bool:
        found.clear()
        found.update(ranks_of(folder))
        return len(found) == 2

    wait_until(have_come)
    return found


def weights(folder: Path) -> str:
    """A digest of every byte of the last checkpoint's weights and moments."""
    state = hashlib.sha256()
    for file in sorted((folder / "checkpoint" / f"step-{STEPS:06}").glob("shard-*")):
        state.update(file.read_bytes())
    return state.hexdigest()


@pytest.fixture(scope="module")
def straight(
    tmp_path_factory: pytest.TempPathFactory, texts: Path, cache: Path, priced: Path
) -> Path:
    """The folder of a run that nobody disturbed."""
    root = tmp_path_factory.mktemp("straight")
    path = write_run(root, texts, cache, steps=STEPS, every_steps=6, layout="dp = 2")
    assert main(["train", str(path), "--out", str(share_curve(priced, root / "run"))]) == 0
    return root / "run"


@pytest.fixture
def folder(straight: Path, tmp_path: Path) -> Path:
    """A run's folder that has the price curve of the undisturbed one, and measures none."""
    made = tmp_path / "run"
    made.mkdir()
    shutil.copytree(straight / "curves", made / "curves")
    return made


def test_killed_ranks_are_replaced_and_the_weights_are_those_of_an_undisturbed_run(
    run_toml: Path,
    straight: Path,
    folder: Path,
    held: type[Held],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Three starts of two ranks: killed before the first step, and between two saves."""
    killed, orders = list[tuple[int, int]](), held(folder)
    orders.hold(LAST)

    def kill() -> None:
        for rank, starts, steps in ((0, 0, 0), (1, 1, 8)):
            wait_until(
                lambda starts=starts, steps=steps: (
                    lines_of(folder, "start") >= starts and lines_of(folder, "step") >= steps
                )
            )
            killed.append((rank, both_ranks_of(folder)[rank]))
            os.kill(killed[-1][1], signal.SIGKILL)
            wait_until(lambda: lines_of(folder, "recovery") == len(killed))
        orders.go_on()

    code = train_while(kill, run_toml, "--out", folder)
    err = capsys.readouterr().err
    assert code == 0, err
    assert weights(folder) == weights(straight)
    lines = [line for line in err.splitlines() if "start again" in line]
    assert lines == [
        f"Rank {rank} of 2 (pid {process}) was ended by SIGKILL; it left no traceback. All ranks "
        f"start again from the newest whole checkpoint (restart {number} of at most 8)."
        for number, (rank, process) in enumerate(killed, start=1)
    ]
    begun = events(folder, "start")
    assert [event["epoch"] for event in begun] == sorted({event["epoch"] for event in begun})
    assert begun[-1]["resumed_step"] > 0
    record = read_run(folder)
    assert [(each.number, each.fault, each.rank) for each in record.recoveries] == [
        (number, "killed", rank) for number, (rank, _) in enumerate(killed, start=1)
    ]
    assert record.recoveries[0].action == "restart"
    assert record.stop is not None and record.stop.reason == "done"
    found = [fault for fault in record.faults if fault.name == "killed"]
    assert sorted(fault.rank for fault in found) == [0, 1]
    assert ranks_of(folder) == {}


def test_a_rank_that_dies_at_the_same_step_again_and_again_ends_the_run(
    run_toml: Path, folder: Path, held: type[Held], capsys: pytest.CaptureFixture[str]
) -> None:
    held(folder).die(0, 1, step=8, saved="step-000006")
    code, _, err = run(capsys, "train", run_toml, "--out", folder, "--layout.dp", 1)
    assert code == 6
    *_, last = err.splitlines()
    assert re.fullmatch(
        "Rank 0 of 1 \\(pid \\d+\\) was ended by SIGKILL; it left no traceback. The same happened "
        f"3 times in a row after step [78], so starting again does not help. {re.escape(RESUME)}",
        last,
    )
    assert [each["action"] for each in events(folder, "recovery")] == ["restart"] * 2 + ["stop"]
    assert [each["resumed_step"] for each in events(folder, "start")] == [0, 6, 6]


def test_where_a_rank_dies_again_and_again_fewer_go_on_with_the_same_batches(
    run_toml: Path,
    straight: Path,
    folder: Path,
    held: type[Held],
    capsys: pytest.CaptureFixture[str],
) -> None:
    held(folder).die(1, 2, step=8, saved="step-000006")
    code, _, err = run(capsys, "train", run_toml, "--out", folder, "--fault.least_dp", 1)
    assert code == 0, err
    assert (
        "It repeats, so the run goes on from its newest whole checkpoint with layout.dp = 1."
        in (err)
    )
    decided = events(folder, "recovery")
    assert [each["action"] for each in decided] == ["restart", "restart", "shrink"]
    begun = events(folder, "start")
    assert [each["world"] for each in begun] == [2, 2, 2, 1]
    # Nobody measured prices again for fewer ranks.
    assert [each["curve"] == begun[0]["curve"] for each in begun] == [True] * 4
    assert len({*(file.read_text() for file in (folder / "curves").iterdir())}) == 1
    ours, theirs = read_run(folder), read_run(straight)
    assert ours.loss == pytest.approx(theirs.loss, rel=EXACT)
    assert ours.tokens_seen.tolist() == theirs.tokens_seen.tolist()


def test_an_exception_is_tried_once_more(
    run_toml: Path, folder: Path, held: type[Held], capsys: pytest.CaptureFixture[str]
) -> None:
    held(folder).die(1, 2, step=8, saved="step-000006", says="a bad card")
    code, _, err = run(capsys, "train", run_toml, "--out", folder, "--quiet")
    assert code == 6
    first, *stack, last = err.splitlines()
    assert re.fullmatch(
        "Rank 1 of 2 failed: ValueError: a bad card The same happened 2 times in a row after step "
        f"[78], so starting again does not help. {re.escape(RESUME)}",
        first,
    )
    assert stack[0] == "Traceback (most recent call last):" and stack.count(stack[0]) == 1
    assert last == "ValueError: a bad card"


def test_ctrl_c_between_a_fault_and_its_restart_ends_the_run(
    run_toml: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = list[int]()

    def interrupt() -> None:
        wait_until(lambda: lines_of(folder, "step") >= 8)
        ranks = both_ranks_of(folder)
        killed.append(ranks[1])
        os.kill(ranks[0], signal.SIGSTOP)  # so that nothing ends before the signals come
        os.kill(os.getpid(), signal.SIGINT)
        wait_until(lambda: (folder / "stop").exists())
        os.kill(killed[0], signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # its agent may have ended it already
            os.kill(ranks[0], signal.SIGCONT)

    assert train_while(interrupt, run_toml, "--out", folder, "--train.steps", 1_000_000) == 6
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"Rank 1 of 2 (pid {killed[0]}) was ended by SIGKILL; it left no traceback. {RESUME}"
    )
    assert ranks_of(folder) == {}


def test_ranks_whose_folder_newer_ones_have_taken_write_nothing_more(
    run_toml: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The older ranks are stopped, as with their machine, and wake up when others have begun."""

    def everything() -> dict[str, bytes]:
        """But for what their launcher notes once they have been stopped for a second."""
        files = [*(folder / "journal").iterdir(), *(folder / "checkpoint").rglob("*")]
        return {
            str(file): re.sub(rb".*\"name\":\"(stopped|continued)\".*\n", b"", file.read_bytes())
            for file in files
            if file.is_file()
        }

    before = dict[str, bytes]()

    def take_over() -> None:
        wait_until(lambda: lines_of(folder, "step") >= 8)
        ranks = both_ranks_of(folder)
        for rank in ranks.values():
            os.kill(rank, signal.SIGSTOP)
        wait_until(lambda: all(map(is_stopped, ranks.values())))
        (epoch,) = [event["epoch"] for event in events(folder, "start")]
        (folder / ".lock").write_text(f"{epoch + 1:020d}")
        before.update(everything())
        for rank in ranks.values():
            os.kill(rank, signal.SIGCONT)

    assert train_while(take_over, run_toml, "--out", folder, "--train.steps", 1_000_000) == 6
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"Newer ranks have taken over the run's folder {folder}. The steps since the last "
        "checkpoint are lost. They go on from the newest whole checkpoint."
    )
    assert everything() == before


def test_the_report_says_what_followed(tmp_path: Path) -> None:
    """Reads the journals that a launcher and ranks have written together."""
    folder = tmp_path / "run" / "journal"
    folder.mkdir(parents=True)
    begun = {"kind": "instant", "name": "start", "world": 1, "resumed_step": 0}
    again = {"kind": "decision", "name": "recovery", "action": "restart", "fault": "killed"}
    lines = [begun, again | {"fault_rank": 0, "number": 1, "step": 3, "message": "Killed."}, begun]
    text = "".join(json.dumps({"v": 1, "t": 1.0, "rank": 0, **line}) + "\n" for line in lines)
    (folder / "rank-00000.jsonl").write_text(text)
    (recovery,) = read_run(tmp_path / "run").recoveries
    assert (recovery.fault, recovery.step, recovery.message) == ("killed", 3.0, "Killed.")


def test_a_pause_is_named_and_ends_nothing(
    run_toml: Path,
    straight: Path,
    folder: Path,
    held: type[Held],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rank 1 is stopped until that is named; no busy machine pauses for as long as the deadline."""
    orders = held(folder)
    orders.hold(5)
    lates, stopped = list[dict](), list[int]()

    def pause() -> None:
        wait_until(lambda: lines_of(folder, "step") == 4)
        stopped.append(both_ranks_of(folder)[1])
        os.kill(stopped[0], signal.SIGSTOP)
        known, came = lines_of(folder, "late"), lines_of(folder, "came")
        orders.hold(LAST)  # rank 0 goes on, and waits for rank 1
        wait_until(lambda: lines_of(folder, "late") > known)
        lates.append(events(folder, "late")[known])
        os.kill(stopped[0], signal.SIGCONT)
        wait_until(lambda: lines_of(folder, "came") > came)
        wait_until(lambda: lines_of(folder, "step") > 4)
        assert both_ranks_of(folder)[1] == stopped[0]
        orders.go_on()

    code = train_while(pause, run_toml, "--out", folder, "--layout.deadline_s", 100)
    err = capsys.readouterr().err
    assert code == 0, err
    (late,) = lates
    assert (late["culprits"], late["waiting_rank"]) == ([1], 0)
    assert late["waited_s"] < 100 / 2
    assert late["stacks"]["1"]
    said = err.splitlines()
    named = late["message"]
    assert named.startswith("Rank 0 has waited ") and "rank 1 has not come: it " in named
    assert named.endswith(" If this lasts 100 s, the ranks are ended.")
    assert re.fullmatch(
        "The wait for rank 1 \\([a-z ]+\\d+\\) has ended, and the run goes on.",
        said[said.index(named) + 1],
    )
    assert not events(folder, "recovery")
    assert weights(folder) == weights(straight)


def test_a_hang_starts_the_ranks_again(
    run_toml: Path,
    straight: Path,
    folder: Path,
    held: type[Held],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rank 1 is stopped for good: some 20 s, most of them waiting."""
    orders = held(folder)
    orders.hold(LAST)

    def stop() -> None:
        wait_until(lambda: lines_of(folder, "step") >= 4)
        os.kill(both_ranks_of(folder)[1], signal.SIGSTOP)
        orders.go_on()

    code = train_while(stop, run_toml, "--out", folder, "--layout.deadline_s", 15)
    err = capsys.readouterr().err
    assert code == 0, err
    (decided,) = events(folder, "recovery")
    assert (decided["fault"], decided["fault_rank"]) == ("hung", 1)
    assert decided["action"] == "restart"
    assert weights(folder) == weights(straight)
