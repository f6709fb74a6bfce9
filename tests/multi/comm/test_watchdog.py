"""Ranks that stop, sleep or never come: what the others say, how soon, and that all end."""

import dataclasses
import json
import os
import re
import time
from pathlib import Path

import pytest

from equipoise.base.errors import EquipoiseError, FaultError
from equipoise.comm.local import run_ranks
from equipoise.fault.recover import run_recovering
from equipoise.launch.gang import Launch
from equipoise.spec.run.resolved import write_resolved
from equipoise.spec.run.spec import FaultSpec
from support.launch.ports import free_port
from support.ranks import watchdog_ranks

DEADLINE_S = 4.0
"""No rank of a busy machine is so late by itself."""
WAITED = r"([4-9]|\d\d+) s"
"""At least that."""
FIX = (
    "Run the same command again to resume from the last checkpoint; if a rank was only slow, "
    "raise layout.deadline_s = 4."
)


def told_of(folder: Path, world: int, function, *args) -> list[str]:
    """What each rank was told, by which all have ended: by themselves they sleep for longer."""
    with pytest.raises(FaultError) as caught:
        run_ranks(world, function, folder, *args, timeout_s=120.0)
    assert " gave no answer within " not in str(caught.value), "not ended by the watchdog"
    files = [folder / f"told-{rank}" for rank in range(world)]
    return [file.read_text() if file.exists() else "" for file in files]


def process_of(folder: Path, rank: int) -> int:
    return int((folder / f"process-{rank}").read_text())


HOST = os.uname().nodename


def test_a_stopped_rank_is_named_and_ended(tmp_path: Path) -> None:
    told = told_of(tmp_path, 3, watchdog_ranks.hang_in, "stopped", DEADLINE_S)
    process = process_of(tmp_path, 2)
    (text,) = {text for text in told if text}
    waiting = text[len("Rank ")]
    assert waiting in "01"
    assert re.fullmatch(
        f"Rank {waiting} has waited {WAITED} in all_reduce of ranks 0, 1, 2 "
        f"\\(reduce of step 7\\), to which rank 2 has not come: it gives no sign of life "
        f"\\(process {process} on {re.escape(HOST)}; last in ([a-z 7]+, )?[a-z_/.]+:\\d+ "
        "\\([a-z_]+\\)\\). "
        f"{re.escape(FIX)}",
        text,
    )
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_a_rank_that_sleeps_is_told_with_its_place(tmp_path: Path) -> None:
    told = told_of(tmp_path, 2, watchdog_ranks.hang_in, "asleep", DEADLINE_S)
    assert re.fullmatch(
        f"Rank 0 has waited {WAITED} in all_reduce of ranks 0, 1 \\(reduce of step 7\\), to which "
        f"rank 1 has not come: it is busy \\(process {process_of(tmp_path, 1)} on "
        f"{re.escape(HOST)}; in reduce of step 7, comm/local.py:\\d+ \\(_call\\)\\). "
        f"{re.escape(FIX)}",
        told[0],
    )
    assert told[1] in (told[0], "")  # where it was slow to hear of it, it has been ended


def test_a_slow_rank_ends_nothing(tmp_path: Path) -> None:
    assert run_ranks(2, watchdog_ranks.hang_in, tmp_path, "slow", 12.0) == [101, 101]
    assert not list(tmp_path.glob("told-*"))


def test_whom_a_message_waits_for_in_the_end(tmp_path: Path) -> None:
    told = told_of(tmp_path, 3, watchdog_ranks.hang_in_messages, DEADLINE_S)
    (text,) = {text for text in told if text}
    busy = (
        f"is busy \\(process \\d+ on {re.escape(HOST)}; in backward of step 3, [^)]*\\(_call\\)\\)"
    )
    of_rank_1 = (
        f"Rank 1 has waited {WAITED} in messages of rank 2 \\(backward of step 3\\), to which "
        f"rank 2 has not come: it {busy}. {re.escape(FIX)}"
    )
    of_rank_0 = (
        f"Rank 0 has waited {WAITED} in messages of rank 1 \\(backward of step 3\\), to which "
        "rank 1 has not come: it waits in messages of rank 2 \\(backward of step 3, "
        f"comm/mail.py:\\d+ \\(wait\\)\\); rank 2 {busy}. {re.escape(FIX)}"
    )
    assert re.fullmatch(f"{of_rank_0}|{of_rank_1}", text)


def test_a_rank_that_never_makes_a_group(tmp_path: Path) -> None:
    told = told_of(tmp_path, 3, watchdog_ranks.hang_in_a_group_that_is_made, DEADLINE_S)
    (text,) = {text for text in told if text}
    assert re.fullmatch(
        f"Rank [01] has waited {WAITED} in new_group \\(start\\), to which rank 2 has not come: it "
        f"is busy \\(process \\d+ on {re.escape(HOST)}; in start, [^)]*\\(_call\\)\\). "
        f"{re.escape(FIX)}",
        text,
    )


def test_a_store_that_has_stopped_with_its_rank(tmp_path: Path) -> None:
    port = free_port()
    with pytest.raises(FaultError) as caught:
        run_ranks(2, watchdog_ranks.hang_with_the_store, tmp_path, port, DEADLINE_S, timeout_s=60)
    assert str(caught.value) == (
        "Rank 1 of 2 failed.\nThe process left with code 6 and without an answer."
    )
    assert re.fullmatch(
        f"Rank 1 has waited {WAITED} in all_reduce of ranks 0, 1, and the ranks' store, which "
        "would say who is missing, does not answer. Look at the host that MASTER_ADDR names and at "
        "rank 0, and run the same command again to resume from the last checkpoint.",
        (tmp_path / "told-1").read_text(),
    )


STOP_IN_STEP_3 = """
import os, sys
if "equipoise.fault.stem" in sys.orig_argv:
    import signal
    from equipoise.train import step

    make_batch, calls = step.make_batch, []

    def stop(*args):
        calls.append(1)
        if os.environ["RANK"] == "1" and len(calls) == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        return make_batch(*args)

    step.make_batch = stop
"""


def test_a_run_whose_rank_stops_ends_with_its_sentence(
    make_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(STOP_IN_STEP_3)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    folder = tmp_path / "run"
    resolved = make_run(zero=3, steps=50, deadline_s=6.0)
    spec = dataclasses.replace(resolved.spec, fault=FaultSpec(restarts=0))
    write_resolved(folder, dataclasses.replace(resolved, spec=spec))
    began = time.monotonic()
    with pytest.raises(EquipoiseError) as caught:
        run_recovering(Launch(folder, ranks=2, quiet=True, port=0))
    assert time.monotonic() - began < 100, "the agent waited for the stopped rank"
    assert caught.value.exit_code == 6
    assert re.fullmatch(
        "Rank 0 has waited ([6-9]|\\d\\d+) s in all_to_all of ranks 0, 1 "
        "\\(forward of step \\d\\), to which rank 1 has not come: it gives no sign of life "
        f"\\(process \\d+ on {re.escape(HOST)}; last in [^)]*\\)\\). Run the same command "
        "again to resume from the last checkpoint; if a rank was only slow, raise "
        "layout.deadline_s = 6.",
        str(caught.value),
    )
    (line,) = [
        line
        for line in (folder / "journal" / "rank-00000.jsonl").read_text().splitlines()
        if '"kind":"fault"' in line
    ]
    fault = json.loads(line)
    assert fault["message"] == str(caught.value)
    assert (fault["what"], fault["missing"]) == ("all_to_all of ranks 0, 1", [1])
    assert fault["waited_s"] > 6
