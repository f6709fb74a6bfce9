"""What the launching command says of ranks that cannot speak: all stopped, or hanging at start."""

import dataclasses
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from equipoise.base.errors import EquipoiseError
from equipoise.fault.drill.facts import events, processes
from equipoise.fault.recover import run_recovering
from equipoise.launch.local import Launch
from equipoise.spec.run.resolved import write_resolved
from equipoise.spec.run.spec import FaultSpec
from support.launch.held import Held
from support.verbs import wait_until

HANG_AT_START = """
import os, sys
if "equipoise.fault.stem" in sys.orig_argv:
    import time

    from equipoise.comm import group

    def lie_in():
        time.sleep(600)

    open_store = group.open_store

    def hang(*args, **named):
        if os.environ["RANK"] == "1":
            lie_in()
        return open_store(*args, **named)

    group.open_store = hang
"""


def test_ranks_that_are_all_stopped_are_named_and_run_to_their_end(
    make_run, tmp_path: Path, held: type[Held], capfd
) -> None:
    folder = tmp_path / "run"
    write_resolved(folder, make_run(steps=40))
    orders = held(folder)
    orders.hold(20)

    def stop_all() -> None:
        """Stop all ranks once they train, and let them go on when that has been said."""
        wait_until(lambda: len(events(folder, "step")) >= 2)
        ranks = processes(folder).values()
        for process in ranks:
            os.kill(process, signal.SIGSTOP)
        wait_until(lambda: events(folder, "stopped"))
        for process in ranks:
            os.kill(process, signal.SIGCONT)
        wait_until(lambda: events(folder, "continued"))
        orders.go_on()

    with ThreadPoolExecutor(1) as thread:
        stopped_all = thread.submit(stop_all)
        run_recovering(Launch(folder, ranks=2, quiet=False, port=0))
        stopped_all.result()
    (stopped,), (continued,) = events(folder, "stopped"), events(folder, "continued")
    said = capfd.readouterr().err
    assert stopped["message"] in said and continued["message"] in said
    assert stopped["message"].startswith("All ranks are stopped (processes ")
    assert len(stopped["processes"]) == 2 and continued["stopped_s"] >= 1
    assert len(events(folder, "step")) == 40
    assert not events(folder, "recovery")


def test_a_rank_that_hangs_while_starting_is_hung_and_its_stack_is_shown(
    make_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(HANG_AT_START)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    folder = tmp_path / "run"
    resolved = make_run(steps=5, deadline_s=4.0)
    spec = dataclasses.replace(resolved.spec, fault=FaultSpec(restarts=0))
    write_resolved(folder, dataclasses.replace(resolved, spec=spec))
    with pytest.raises(EquipoiseError) as caught:
        run_recovering(Launch(folder, ranks=2, quiet=True, port=0))
    first, *stack = str(caught.value).splitlines()
    assert re.fullmatch(
        r"Rank 1 of 2 has not come within 4 s of rank 0\. Start it, or look into its log; where "
        r"starting takes longer, raise layout\.deadline_s\. Rank 1 \(process \d+\) hangs while "
        r"starting, in \S+sitecustomize\.py:9 \(lie_in\)\.",
        first,
    )
    assert stack[0] == "Rank 1, innermost line first:"
    assert [line.rpartition(" ")[2] for line in stack[1:3]] == ["(lie_in)", "(hang)"]
    (recovery,) = events(folder, "recovery")
    assert recovery["fault"] == "hung"
