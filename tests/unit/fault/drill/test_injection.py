"""What a drill asks of a rank fires once, with its proof first."""

import os
import signal
from pathlib import Path

from equipoise.fault.drill.injection import Fired, Injection, ask, asked, prove, proven
from equipoise.fault.drill.inside import Injector

KILL = Injection("kill", rank=0, phase="backward", step=3)


def test_what_is_asked_is_read_back(tmp_path: Path) -> None:
    both = [KILL, Injection("kill", 1, "save", 6, after_s=0.5, amount=2.0)]
    ask(tmp_path / "drill", both)
    assert asked(tmp_path / "drill") == both
    assert proven(tmp_path / "drill") == []


def test_a_proof_has_process_place_and_time_and_a_torn_one_is_none(tmp_path: Path) -> None:
    ask(tmp_path, [KILL])
    prove(tmp_path, 0, 1, "save", 6)
    with (tmp_path / "fired.jsonl").open("a") as file:
        file.write('{"number": 1, "rank"')
    (fired,) = proven(tmp_path)
    assert (fired.number, fired.rank, fired.process) == (0, 1, os.getpid())
    assert (fired.phase, fired.step) == ("save", 6)
    ask(tmp_path, [KILL])
    assert proven(tmp_path) == []


def reached(folder: Path, rank: int, *places: tuple[str, int]) -> tuple[int, list[Fired]]:
    """How a process ends that reaches these places as a rank of a drill, and what fired."""
    process = os.fork()
    if not process:
        injector = Injector(folder, rank)
        for phase, step in places:
            injector.reach(phase, step)
        os._exit(0)
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status), proven(folder)


def test_a_rank_is_killed_where_it_was_asked_and_not_again_when_it_starts_again(
    tmp_path: Path,
) -> None:
    ask(tmp_path, [KILL])
    before = [("forward", 3), ("backward", 2)]
    assert reached(tmp_path, 0, *before) == (0, [])
    assert reached(tmp_path, 1, ("backward", 3)) == (0, [])  # another rank's
    code, (fired,) = reached(tmp_path, 0, *before, ("backward", 3), ("wait", 3))
    assert code == -signal.SIGKILL
    assert (fired.rank, fired.phase, fired.step) == (0, "backward", 3)
    assert reached(tmp_path, 0, ("backward", 3)) == (0, [fired])


def test_what_fires_is_proven(tmp_path: Path) -> None:
    ask(tmp_path, [Injection("mark", 0, "forward", 2)])
    injector = Injector(tmp_path, 0)
    for step in (1, 2, 3):
        injector.reach("forward", step)
    assert [(each.phase, each.step) for each in proven(tmp_path)] == [("forward", 2)]


def test_a_fault_that_is_due_later_strikes_whatever_the_rank_does_then(tmp_path: Path) -> None:
    ask(tmp_path, [Injection("mark", 0, "forward", 2, after_s=0.01)])
    injector = Injector(tmp_path, 0)
    injector.reach("forward", 2)
    injector.reach("backward", 2)
    while not proven(tmp_path):
        pass
    assert [(each.phase, each.step) for each in proven(tmp_path)] == [("backward", 2)]


def test_outside_a_drill_there_is_nothing_to_reach() -> None:
    assert Injector.from_environment(0) is None
