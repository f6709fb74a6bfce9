"""Train on this machine's ranks through faults: start them again as the policy says.

What it decides
    Nothing: ``fault.policy`` does. This starts the ranks, tells the policy how they ended, writes
    both to the run's journal and to the user, and obeys. Every start loads the newest whole
    checkpoint, as the same command would, so what is trained is what an undisturbed run trains.

    Ranks of one start are gone before the next: the agent reaps them, and they die with it. Where
    that cannot be known, on another host, ``observe.fence`` keeps the older ones from writing.

Kept true (tests/multi/fault/test_recover.py)
    Killed at any point, a run ends with the weights of an undisturbed one, bit for bit; a fault
    that repeats ends it.
"""

import dataclasses
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from equipoise.base.errors import FaultError
from equipoise.fault.policy import Action, Fault, Policy, Restart, Shrink, Stop
from equipoise.launch.local import Ended, Launch, LocalRanks
from equipoise.observe.journal import Journal
from equipoise.spec.run.compared import resolved_sides
from equipoise.spec.run.resolved import ResolvedFile, read_resolved

_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Smaller:
    """How a run goes on with fewer data-parallel ranks."""

    fits: Callable[[int], bool]
    """Whether it can, with a number of them."""
    prepare: Callable[[int], int]
    """Prepares the run's folder for that number; returns how many ranks there are then."""


def _never(dp: int) -> bool:
    del dp
    return False


def run_recovering(launch: Launch, smaller: Smaller | None = None) -> None:
    """Start the ranks of a prepared run and wait until its work is done, through faults.

    Args:
        launch: The ranks; ``[fault]`` of the folder's run says what follows a fault.
        smaller: How it goes on with fewer ranks; never unless given.

    Raises:
        EquipoiseError: nothing follows the last fault; with the words and the exit code of the
            rank that failed first.
        KeyboardInterrupt: the user did not wait for the last step to be saved.
    """
    resolved = read_resolved(launch.folder)
    layout, rules = resolved.spec.layout, resolved.spec.fault
    fits = _never if smaller is None else smaller.fits
    policy = Policy(rules, launch.ranks // layout.sharing, fits)
    with LocalRanks(is_quiet=launch.quiet) as ranks:
        while (ended := ranks.run(launch)) is not None:
            said = ended.sentence if ended.kind in ("failed", "non-finite") else ""
            fault = Fault(ended.kind, time.monotonic(), ended.step, said, ranks.asked > 0)
            policy, action = policy.after(fault)
            _write(launch.folder, resolved, ended, action)
            if isinstance(action, Stop):
                raise ended.error(action.reason)
            if not launch.quiet:
                sys.stderr.write(f"{ended.sentence} {_say(action, rules.restarts)}\n")
            if isinstance(action, Shrink) and smaller is not None:
                launch = dataclasses.replace(launch, ranks=smaller.prepare(action.dp))
                resolved = read_resolved(launch.folder)
            elif isinstance(action, Restart):
                _pause(action.pause_s, ranks)
            if ranks.asked:
                raise ended.error("You asked the run to stop before its ranks were started again.")


def _say(action: Restart | Shrink, most: int) -> str:
    """What follows, as a sentence."""
    if isinstance(action, Shrink):
        return (
            f"It repeats, so the run goes on from its newest whole checkpoint with layout.dp = "
            f"{action.dp}."
        )
    wait = f" in {action.pause_s:g} s" if action.pause_s else ""
    return (
        f"All ranks start again{wait} from the newest whole checkpoint (restart {action.number} of "
        f"at most {most})."
    )


def _pause(seconds: float, ranks: LocalRanks) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and not ranks.asked:
        time.sleep(_LOOK_S)


def _write(folder: Path, resolved: ResolvedFile, ended: Ended, action: Action) -> None:
    """Journal how the ranks ended, and what follows.

    A killed rank left no word, so its fault is written here; others wrote theirs. Nothing is
    written of a refusal: the folder may be another run's.
    """
    if ended.kind == "refused":
        return
    step = {} if ended.step is None else {"step": ended.step}
    follows = type(action).__name__.lower()
    number = {} if isinstance(action, Stop) else {"number": action.number}
    dp = {"dp": action.dp} if isinstance(action, Shrink) else {}
    for side, _ in resolved_sides(folder, resolved):
        if not side.is_dir():  # somebody moved it: nothing may be made in its place
            continue
        with suppress(OSError, FaultError):
            if ended.kind == "killed":
                with Journal(side / "journal", ended.rank or 0) as journal:
                    journal.write("fault", "killed", message=ended.sentence, **step)
            with Journal(side / "journal", 0) as journal:
                journal.write(
                    "decision",
                    "recovery",
                    action=follows,
                    fault=ended.kind,
                    fault_rank=ended.rank,
                    message=ended.sentence,
                    **step,
                    **number,
                    **dp,
                )
