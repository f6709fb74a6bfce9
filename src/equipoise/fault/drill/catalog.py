"""The faults that a drill can rehearse: a row and a function each."""

from collections.abc import Callable
from dataclasses import dataclass

from equipoise.fault.drill import asked, damage, disks, kill, late, numbers, poisson, skewed
from equipoise.fault.drill.outcome import Rehearsal
from equipoise.fault.drill.stage import Stage

Rehearse = Callable[[Stage, int], Rehearsal]
"""Rehearses a fault once; the number says how often it was before, and so where it strikes."""


def _never(stage: Stage) -> str:
    del stage
    return ""


@dataclass(frozen=True, slots=True)
class DrillFault:
    """A fault that a drill can inject."""

    number: str
    """Its number in the documentation: ``F1``."""
    rehearse: Rehearse
    about: str
    """What is done, for ``--help``."""
    least_ranks: int = 1
    """With fewer it cannot happen."""
    left_out: Callable[[Stage], str] = _never
    """Why it cannot be rehearsed here; "" if it can."""

    def why_not(self, stage: Stage) -> str:
        """Why it is not rehearsed on this stage; "" if it is."""
        if stage.ranks < self.least_ranks:
            return f"needs {self.least_ranks} ranks, and this run has {stage.ranks}"
        return self.left_out(stage)


FAULTS: dict[str, DrillFault] = {
    "kill": DrillFault("F1", kill.kill, "SIGKILL to a rank, at marked and random points of a step"),
    "kill-ready": DrillFault(
        "F1", kill.kill_ready, "SIGKILL to a rank once others are ready to take its place"
    ),
    "shrink": DrillFault(
        "F1",
        kill.shrink,
        "SIGKILL to a rank at one step of three starts, until fewer go on",
        2,
        kill.has_one,
    ),
    "kill-saving": DrillFault(
        "F2", kill.kill_saving, "SIGKILL to a rank at marked and random points of a save"
    ),
    "torn": DrillFault(
        "F3", damage.torn, "a file of the newest checkpoint is cut, zeroed, swapped"
    ),
    "full-disk": DrillFault("F4", disks.full, "no file of a rank may grow (RLIMIT_FSIZE)"),
    "read-only": DrillFault(
        "F4", disks.read_only, "the folder of checkpoints is read-only", left_out=disks.left_out
    ),
    "hang": DrillFault("F5", late.hang, "SIGSTOP to a rank, for good", 2),
    "pause": DrillFault("F5", late.pause, "SIGSTOP for 5 s, which must not end the run", 2),
    "slow": DrillFault("F6", late.slow, "a busy loop in every forward pass of a rank", 2),
    "slow-link": DrillFault(
        "F7", late.slow_link, "what a rank sends is paced by the kernel to a few MB/s", 2
    ),
    "mismatch": DrillFault("F5", late.mismatch, "a rank calls a collective that no other calls", 2),
    "flip-weight": DrillFault("F8", numbers.flip_weight, "a bit of a weight flips on one rank", 2),
    "flip-moment": DrillFault("F8", numbers.flip_moment, "a bit of a moment flips on one rank", 2),
    "rotten": DrillFault("F9", damage.rotten, "a bit of a checkpoint flips on the disk"),
    "nan-loss": DrillFault(
        "F10", numbers.nan_loss, "the output of a layer becomes NaN, and the loss"
    ),
    "nan-gradient": DrillFault(
        "F10", numbers.nan_gradient, "a gradient becomes NaN, the loss is not"
    ),
    "documents": DrillFault(
        "F11", damage.documents, "bits of the tokens flip", left_out=damage.no_single_corpus
    ),
    "memory": DrillFault("F12", kill.no_memory, "a rank can allocate no more (RLIMIT_AS)"),
    "terminate": DrillFault("F14", asked.terminate, "SIGTERM to the command"),
    "skew": DrillFault("F15", skewed.other_seed, "the same folder with another seed"),
    "version": DrillFault(
        "F15", skewed.newer_version, "the newest checkpoint is of a newer version"
    ),
    "dtype": DrillFault("F15", skewed.other_dtype, "a tensor of a checkpoint has another dtype"),
    "desync": DrillFault("F17", asked.desync, "one rank plans other documents", 2),
    "second-gang": DrillFault("F18", asked.second_gang, "the same command beside a running one"),
    "older-gang": DrillFault("F18", asked.older_gang, "ranks wake up in a folder that others took"),
    "poisson": DrillFault(
        "F20", poisson.soak, "kills and hangs at random moments, for --minutes", 2
    ),
}
"""By the names that ``--only`` takes."""
