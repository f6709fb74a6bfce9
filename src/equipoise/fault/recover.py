"""Train on this machine's ranks through faults: start them again as the policy says.

What it decides
    Nothing: ``fault.policy`` does. This starts the ranks, tells the policy how they ended, writes
    both to the run's journal and to the user, and obeys. Every start loads the newest whole
    checkpoint, as the same command would, so what is trained is what an undisturbed run trains.

    Ranks of one start are gone before the next: the agent reaps them, and they die with it. Where
    that cannot be known, on another host, ``observe.fence`` keeps the older ones from writing.

Kept true (tests/multi/fault/test_recover.py, tests/multi/recsys/test_recover.py)
    Killed at any point, a run ends with the weights of an undisturbed one, bit for bit; a fault
    that repeats ends it.
"""

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from equipoise.base.errors import EquipoiseError, HungError, NonFiniteError
from equipoise.fault.policy import (
    Action,
    EndRun,
    Policy,
    RanksFault,
    Restart,
    Shrink,
    SpareState,
    WaitForSpare,
)
from equipoise.fault.runbook.shipped import guide_command, guide_for
from equipoise.launch.explain import RanksEnd
from equipoise.launch.gang import KeptReady, Launch
from equipoise.launch.local import LocalRanks
from equipoise.observe.journal import note
from equipoise.plan.space.accepted import require_accepted
from equipoise.spec.run.compared import resolved_sides
from equipoise.spec.run.resolve import ResolvedRun
from equipoise.spec.run.resolved import read_resolved
from equipoise.spec.run.spec import FaultSpec

_LOOK_S = 0.1

_SETTLED_S = 30.0
"""For which a run trains before ranks of its next start are kept ready with ``auto``: one that is
over by then has no use for them."""


@dataclass(frozen=True, slots=True)
class Smaller:
    """How a run goes on with fewer data-parallel ranks."""

    fits: Callable[[int], bool]
    """Whether it can, with a number of them."""
    prepare: Callable[[int], int]
    """Prepares the run's folder for that number; returns how many ranks there are then."""


def with_fewer(run: ResolvedRun, prepare: Callable[[ResolvedRun], int]) -> Smaller:
    """How a run goes on with fewer data-parallel ranks: ``prepare`` readies its folder."""

    def of(dp: int) -> ResolvedRun:
        layout = dataclasses.replace(run.spec.layout, dp=dp)
        return dataclasses.replace(run, spec=dataclasses.replace(run.spec, layout=layout))

    def fits(dp: int) -> bool:
        try:
            require_accepted(of(dp).spec, run.model, dp * run.spec.layout.sharing)
        except EquipoiseError:
            return False
        return True

    return Smaller(fits, lambda dp: prepare(of(dp)))


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
    sides = tuple(side for side, _ in resolved_sides(launch.folder, resolved))
    layout = resolved.spec.layout
    recover_ranks(launch, resolved.spec.fault, launch.ranks // layout.sharing, sides, smaller)


def recover_ranks(
    launch: Launch,
    rules: FaultSpec,
    dp: int,
    sides: Sequence[Path],
    smaller: Smaller | None = None,
) -> None:
    """Start ranks of any program and wait until their work is done, through faults.

    Args:
        launch: The ranks, and their program.
        rules: What follows a fault.
        dp: How many data-parallel ranks they are.
        sides: Folders whose journals hear of it.
        smaller: As for ``run_recovering``.

    Raises:
        EquipoiseError: as ``run_recovering``.
        KeyboardInterrupt: likewise.
    """
    fits = _never if smaller is None else smaller.fits
    policy = Policy(rules, dp, fits)
    note = partial(_note_stopped, sides)
    launch = dataclasses.replace(launch, spares=_kept(rules, launch))
    with LocalRanks(is_quiet=launch.quiet, note=note) as ranks:
        while (ended := ranks.run(launch)) is not None:
            said = ended.sentence if ended.kind in ("failed", "non-finite") else ""
            now = time.monotonic()
            fault = RanksFault(ended.kind, now, ended.step, said, ended.rank, ranks.asked > 0)
            spares = ranks.spares
            policy, action = policy.after(fault, spares)
            guides = not launch.quiet and not ranks.asked
            if isinstance(action, EndRun):
                ranks.see_off()
                _write(sides, ended, action, spares)
                sys.stderr.write(name_guide(launch.folder, ended) if guides else "")
                raise ended.error(action.reason)
            waited = action if isinstance(action, WaitForSpare) else None
            then = action.then if isinstance(action, WaitForSpare) else action
            if not launch.quiet:
                sys.stderr.write(f"{ended.sentence} {_say(then, rules.restarts)}\n")
            ranks.see_off()  # they may still write, and what follows them comes after
            _write(sides, ended, action, spares)
            if guides:  # reading the guides takes longer than the sentence may wait
                sys.stderr.write(name_guide(launch.folder, ended))
            if isinstance(then, Shrink) and smaller is not None:
                launch = dataclasses.replace(launch, ranks=smaller.prepare(then.dp))
            elif isinstance(then, Restart):
                _pause(then.pause_s, ranks)
            if waited is not None:
                have_come = ranks.wait_for_spares(waited.most_s)
                if not (have_come or launch.quiet or ranks.asked):
                    sys.stderr.write(_say_in_vain(waited))
            if ranks.asked:
                raise ended.error("You asked the run to stop before its ranks were started again.")


def _kept(rules: FaultSpec, launch: Launch) -> KeptReady | None:
    """Whether ranks of the next start are kept ready; not where they would have to share a port."""
    if rules.spares == "never" or launch.port or not (rules.restarts and rules.on):
        return None
    if rules.spares == "at-once":
        return KeptReady(0.0, needs_room=False)
    return KeptReady(_SETTLED_S, needs_room=True)


def _say_in_vain(waited: WaitForSpare) -> str:
    return (
        f"The ranks that were to be ready have not come within {waited.most_s:g} s, so others are "
        f"started.\n"
    )


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


_NAMES = {
    "killed": ("killed", ""),
    "failed": ("exception", ""),
    "hung": ("error", HungError.__name__),
    "non-finite": ("error", NonFiniteError.__name__),
}
"""The fault that the journal has for each kind of end, and the class of its error."""


def name_guide(folder: Path, ended: RanksEnd) -> str:
    """A line that names the guide for how ranks ended; empty if none fits."""
    if ended.kind not in _NAMES:
        return ""
    name, error = _NAMES[ended.kind]
    message = f"{ended.sentence} {ended.more}"
    guide = guide_for({"kind": "fault", "name": name, "type": error, "message": message})
    return f"To find out why: {guide_command(guide, str(folder))}\n" if guide else ""


def _pause(seconds: float, ranks: LocalRanks) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and not ranks.asked:
        time.sleep(_LOOK_S)


def _note_stopped(
    sides: Sequence[Path], sentence: str, processes: list[int], stopped_s: float
) -> None:
    """Journal that all ranks are stopped, or that they go on: they could not."""
    name = "stopped" if processes else "continued"
    for side in sides:
        told = {"message": sentence, "processes": processes, "stopped_s": stopped_s}
        note(side, 0, "instant", name, **told)


def _write(sides: Sequence[Path], ended: RanksEnd, action: Action, spares: SpareState) -> None:
    """Journal how the ranks ended, and what follows.

    A killed rank left no word, so its fault is written here; others wrote theirs. Nothing is
    written of a refusal: the folder may be another run's.
    """
    if ended.kind == "refused":
        return
    action = action.then if isinstance(action, WaitForSpare) else action
    step = {} if ended.step is None else {"step": ended.step}
    follows = "stop" if isinstance(action, EndRun) else type(action).__name__.lower()
    number = {} if isinstance(action, EndRun) else {"number": action.number}
    dp = {"dp": action.dp} if isinstance(action, Shrink) else {}
    for side in sides:
        if ended.kind == "killed":
            note(side, ended.rank or 0, "fault", "killed", message=ended.sentence, **step)
        note(
            side,
            0,
            "decision",
            "recovery",
            action=follows,
            fault=ended.kind,
            fault_rank=ended.rank,
            spares=spares,
            message=ended.sentence,
            **step,
            **number,
            **dp,
        )
