"""Disks that are full and folders that cannot be written while a run saves (F4)."""

import os

from equipoise.fault.drill.injection import Fired, Injection
from equipoise.fault.drill.judge import UNDISTURBED, Expected, strike
from equipoise.fault.drill.outcome import Rehearsal
from equipoise.fault.drill.stage import EVERY, Stage


def full(stage: Stage, repeat: int) -> Rehearsal:
    """No file of a rank may grow while a checkpoint is due; later they may again."""
    rank = repeat % stage.ranks
    injection = Injection("fill-disk", rank, "forward", EVERY, amount=EVERY // 2)
    expected = Expected("RLIMIT_FSIZE 0", "checkpoint", _unwritten, ways=(UNDISTURBED,))
    return strike(stage, "full-disk", injection, expected)


def read_only(stage: Stage, repeat: int) -> Rehearsal:
    """Nothing can be made in the folder of checkpoints while one is due."""
    del repeat
    injection = Injection("lock-folder", 0, "forward", EVERY, amount=EVERY // 2)
    expected = Expected("chmod 0555", "checkpoint", _unwritten, ways=(UNDISTURBED,))
    return strike(stage, "read-only", injection, expected)


def left_out(stage: Stage) -> str:
    """Why a folder cannot be made read-only here."""
    del stage
    return "needs a user other than root, who writes to every folder" if os.geteuid() == 0 else ""


def _unwritten(fired: Fired) -> str:
    del fired
    return r"(?i)checkpoint.*(cannot|could not) be (written|saved|kept)"
